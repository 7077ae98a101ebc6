"""`musigma explain CODE`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markdown import Markdown

from musigma import doctor
from musigma.cli import _console, _exit


def complete(incomplete: str) -> list[tuple[str, str]]:
    """Codes that begin with what is typed, with their names, for the shell."""
    return [(r.code, r.name) for r in doctor.list_rules() if r.code.startswith(incomplete.upper())]


def explain(
    code: Annotated[
        str,
        typer.Argument(
            metavar="CODE", help="A rule's code or name, such as INP101.", autocompletion=complete
        ),
    ],
) -> None:
    """Tell what a rule looks for, why it hurts, and what to do instead."""
    try:
        text = doctor.explain(code)
    except ValueError as error:
        _exit.fail(str(error))
    title, _, rest = text.partition("\n")
    console = _console.out()
    console.print(title, style="bold")
    console.print(Markdown(rest))
