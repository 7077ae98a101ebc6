"""The two consoles: results go to standard output, everything about them to standard error."""

from __future__ import annotations

import os
import sys

from rich.console import Console

# What a shell reports for a process that SIGPIPE ended: 128 + 13.
BROKEN_PIPE = 141


class QuietConsole(Console):
    """A console whose reader may leave early, as `| head` does."""

    def on_broken_pipe(self) -> None:
        """Point standard output nowhere, so that the interpreter's last flush stays quiet too."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(BROKEN_PIPE)


def out() -> Console:
    """For results. Names and messages are data: nothing in them is read as markup or coloured by guessing."""
    return QuietConsole(markup=False, highlight=False, emoji=False, soft_wrap=False)


def err() -> Console:
    """For errors and progress."""
    return QuietConsole(stderr=True, markup=False, highlight=False, emoji=False)
