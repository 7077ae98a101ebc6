"""What `doctor` and `demo` share: examine a case, treat a copy, train both, and print or write the result."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from torch import nn

from musigma import doctor
from musigma.cli import _console, _exit, _progress, _target
from musigma.doctor.report import to_html, to_rich, write_html

# Enough for a small model to show which of the two learns faster
STEPS = 200


class Format(StrEnum):
    """How the findings are printed."""

    text = "text"
    json = "json"
    html = "html"


@dataclass
class Examined:
    """A case's report, and what came of it."""

    report: doctor.Report
    record: doctor.Record | None = None
    runs: list[doctor.Comparison] = field(default_factory=list)

    def show(self, format: Format) -> None:
        """Print it to standard output."""
        if format is Format.text:
            _console.out().print(to_rich(self.report, record=self.record, comparison=self.runs or None))
        elif format is Format.html:
            sys.stdout.write(to_html(self.report, record=self.record, comparison=self.runs or None))
        else:
            told = self.report.to_dict()
            told |= {"treatment": self.record.to_dict()} if self.record is not None else {}
            told |= {"comparisons": [run.to_dict() for run in self.runs]} if self.runs else {}
            # What isn't finite becomes a string, as in the report
            sys.stdout.write(json.dumps(_finite(told), indent=2, allow_nan=False, ensure_ascii=False) + "\n")

    def write(self, path: Path) -> None:
        """Write the HTML report."""
        write_html(path, self.report, record=self.record, comparison=self.runs or None)


def examine(
    case: doctor.Case, *, select: list[str] | None = None, ignore: list[str] | None = None
) -> doctor.Report:
    """The report of a case, or the end of the command with what is wrong with the case."""
    try:
        return doctor.examine(
            case.model,
            case.inputs,
            case.targets,
            loss=case.loss,
            optimizer=case.optimizer,
            scheduler=case.scheduler,
            mask=case.mask,
            independent=case.independent,
            intent=case.intent,
            select=select,
            ignore=ignore,
            name=case.name,
        )
    except Exception as error:
        if not _raised_by_the_model(error):
            if isinstance(error, TypeError | ValueError):
                _exit.fail(str(error))
            raise
        _exit.fail(_what_to_pass(case, error), trace=_target.own_traceback(error))


def train(
    case: doctor.Case, treated: nn.Module, *, steps: int, every: int | None = None, seed: int = 0
) -> doctor.Comparison:
    """Train both models on the same batches under two bars; `every` steps the accuracy is measured."""
    with _progress.bars() as advance:
        return doctor.compare(
            case,
            treated,
            # A pass holds at least one batch
            epochs=steps,
            steps=steps,
            evaluate_every=every or max(1, steps // 20),
            seed=seed,
            progress=advance,
        )


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {key: _finite(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return str(value) if isinstance(value, float) and value - value != 0 else value


def _raised_by_the_model(error: BaseException) -> bool:
    """`examine` leaves a note on what the model or its loss raised; its own complaints have none."""
    return bool(getattr(error, "__notes__", ()))


def _what_to_pass(case: doctor.Case, error: BaseException) -> str:
    said = _target.summary(error)
    if not any(note.startswith("musigma.graph") for note in error.__notes__):
        called = "loss(output, targets), or loss(output) where there are no targets"
        return f"the loss raised {said}\nCase.loss is called as {called}."
    return (
        f"{type(case.model).__name__} can't run on Case.inputs: {said}\n"
        "Case.inputs is what the model takes: a tensor, a tuple of arguments or a mapping of keywords."
    )
