"""`musigma doctor TARGET`."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import torch
import typer

from musigma import doctor as _doctor
from musigma.cli import _console, _exit, _target
from musigma.doctor.report import to_html, write_html


class Format(StrEnum):
    """How the findings are printed."""

    text = "text"
    json = "json"
    html = "html"


def doctor(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="path/to/file.py:factory or package.module:factory, a function that returns a Case.",
        ),
    ],
    format: Annotated[
        Format, typer.Option("--format", "-f", help="How the findings are printed.")
    ] = Format.text,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write the HTML report to this file too.")
    ] = None,
    select: Annotated[
        str | None, typer.Option(help="Judge by these rules only: codes or their beginnings, with commas.")
    ] = None,
    ignore: Annotated[
        str | None, typer.Option(help="Leave these rules out: codes or their beginnings.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Where the factory's random numbers start.")] = 0,
) -> None:
    """Examine a model on a batch of its data; treat a copy and train both where the case has a loader."""
    if out is not None and not out.parent.is_dir():
        _exit.fail(f"--out: there is no folder {out.parent}")
    torch.manual_seed(seed)
    try:
        case = _target.load(target)
    except _target.TargetError as error:
        _exit.fail(str(error), trace=error.trace)
    report = examined(case, select=select, ignore=ignore)
    try:
        if out is not None:
            write_html(out, report)
        _show(report, format)
    except ImportError as error:  # plotly is an extra
        _exit.fail(str(error))
    raise typer.Exit(_exit.FINDINGS if len(report) else _exit.NOTHING_FOUND)


def _show(report: _doctor.Report, format: Format) -> None:
    if format is Format.text:
        _console.out().print(report)
    else:
        sys.stdout.write(report.to_json() + "\n" if format is Format.json else to_html(report))


def examined(case: _doctor.Case, *, select: str | None, ignore: str | None) -> _doctor.Report:
    """The report of a case, or the end of the command with what is wrong with the case."""
    try:
        return _doctor.examine(
            case.model,
            case.inputs,
            case.targets,
            loss=case.loss,
            optimizer=case.optimizer,
            scheduler=case.scheduler,
            mask=case.mask,
            independent=case.independent,
            intent=case.intent,
            select=_codes(select),
            ignore=_codes(ignore),
            name=case.name,
        )
    except Exception as error:
        if not _raised_by_the_model(error):
            if isinstance(error, TypeError | ValueError):
                _exit.fail(str(error))
            raise
        _exit.fail(_what_to_pass(case, error), trace=_target.own_traceback(error))


def _codes(text: str | None) -> list[str] | None:
    return None if text is None else [code.strip() for code in text.split(",") if code.strip()]


def _raised_by_the_model(error: BaseException) -> bool:
    """`examine` leaves a note on what the model or its loss raised; its own complaints have none."""
    return bool(getattr(error, "__notes__", ()))


def _what_to_pass(case: _doctor.Case, error: BaseException) -> str:
    said = _target.summary(error)
    if not any(note.startswith("musigma.graph") for note in error.__notes__):
        called = "loss(output, targets), or loss(output) where there are no targets"
        return f"the loss raised {said}\nCase.loss is called as {called}."
    return (
        f"{type(case.model).__name__} can't run on Case.inputs: {said}\n"
        "Case.inputs is what the model takes: a tensor, a tuple of arguments or a mapping of keywords."
    )
