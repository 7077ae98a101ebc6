"""What the shell is told."""

from __future__ import annotations

from typing import NoReturn

import typer

from musigma.cli import _console

NOTHING_FOUND = 0
FINDINGS = 1
UNUSABLE = 2
INTERRUPTED = 130


def fail(message: str, *, trace: str = "") -> NoReturn:
    """Say what is wrong on standard error, the user's own traceback first, and end with `UNUSABLE`."""
    console = _console.err()
    if trace:
        console.print(trace.rstrip(), soft_wrap=True)
        console.print()
    console.print(f"error: {message}", soft_wrap=True)
    raise typer.Exit(UNUSABLE)
