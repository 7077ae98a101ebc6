"""`musigma demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from musigma.cli import _exit


def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="Where the HTML report is written.")] = Path(
        "report.html"
    ),
) -> None:
    """Examine, treat and train a small network on scikit-learn's handwritten digits."""
    _exit.fail("the demo waits for the doctor's treatments")
