"""`musigma doctor TARGET`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from musigma.cli import _examined, _exit, _target
from musigma.cli._examined import Format
from musigma.doctor import treat

TARGET = "path/to/file.py:factory or package.module:factory, a function that returns a Case."


def doctor(
    target: Annotated[str, typer.Argument(metavar="TARGET", help=TARGET)],
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
    train: Annotated[
        bool, typer.Option("--train/--no-train", help="Train both models where the case has a loader.")
    ] = True,
    steps: Annotated[int, typer.Option(min=1, help="Batches to train on.")] = _examined.STEPS,
    seed: Annotated[int, typer.Option(help="Where all random numbers start.")] = 0,
) -> None:
    """Examine a model on a batch of its data; treat a copy and train both where the case has a loader."""
    if out is not None and not out.parent.is_dir():
        _exit.fail(f"--out: there is no folder {out.parent}")
    torch.manual_seed(seed)
    try:
        case = _target.load(target)
    except _target.TargetError as error:
        _exit.fail(str(error), trace=error.trace)
    report = _examined.examine(case, select=_codes(select), ignore=_codes(ignore))
    examined = _examined.Examined(report)
    if len(report):
        treated, examined.record = treat(case.model, report, data=case.loader, seed=seed)
        if train and case.loader is not None and any(given.kept for given in examined.record.given):
            examined.runs.append(_examined.train(case, treated, steps=steps, seed=seed))
    try:
        if out is not None:
            examined.write(out)
        examined.show(format)
    except ImportError as error:  # plotly is an extra
        _exit.fail(str(error))
    raise typer.Exit(_exit.FINDINGS if len(report) else _exit.NOTHING_FOUND)


def _codes(text: str | None) -> list[str] | None:
    return None if text is None else [code.strip() for code in text.split(",") if code.strip()]
