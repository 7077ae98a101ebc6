"""`python -m musigma.cli` for where the script is not on the path."""

from musigma.cli import main

main()
