"""The `musigma` command: arguments and exit codes; the work is done on the floors below."""

from musigma.cli._app import main

__all__ = ["main"]
