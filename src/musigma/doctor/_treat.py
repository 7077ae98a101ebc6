"""Mend what was found, on a copy, one treatment after the other, each of them measured again."""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch
from torch import nn

from musigma import graph as _graph
from musigma.doctor import _render
from musigma.doctor._case import Case, Inputs, OptimizerLike
from musigma.doctor._examination import Examination
from musigma.doctor._examine import judged
from musigma.doctor._finding import Finding, Report
from musigma.doctor._rules import list_rules
from musigma.doctor._treatments import NotApplicable, Patient, Treatment, treatments
from musigma.doctor.probes import _calls
from musigma.functional._variances import impossible_variances_pass

__all__ = ["Given", "Record", "treat"]

# Enough for statistics; a treatment may read them several times.
_BATCHES = 64
_WEIGHT = {"error": 100, "warning": 10, "info": 1}


@dataclass(frozen=True)
class Given:
    """One treatment that was tried.

    Args:
        treatment: its name.
        codes: the findings it was given for.
        done: what it did, one sentence.
        kept: whether the treated model was kept; False where it was undone.
        reason: why it was undone, or not possible; "" where it was kept.
        before: code -> evidence of its first finding before.
        after: the same afterwards; a code that is gone is missing.
        details: numbers of the treatment itself.
    """

    treatment: str
    codes: tuple[str, ...]
    done: str
    kept: bool
    reason: str = ""
    before: Mapping[str, Any] = field(default_factory=dict, repr=False)
    after: Mapping[str, Any] = field(default_factory=dict, repr=False)
    details: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def mended(self) -> tuple[str, ...]:
        """The codes that are gone."""
        return tuple(c for c in self.codes if self.kept and c not in self.after)


@dataclass(frozen=True)
class Record:
    """What was done to a model, what it changed, and what was left.

    Args:
        given: the treatments in the order they were tried.
        untreated: every finding that is left, with the reason why nothing mended it.
        before: the report of the model as it was.
        after: the report of the treated model.
    """

    given: tuple[Given, ...]
    untreated: tuple[tuple[Finding, str], ...]
    before: Report
    after: Report

    @property
    def mended(self) -> tuple[str, ...]:
        """The codes that were found before and are gone."""
        return tuple(c for c in self.before.codes if c not in self.after.codes)

    def to_dict(self) -> dict[str, Any]:
        """The record as plain JSON types, without the two reports' measurements."""
        return {
            "given": [
                {
                    "treatment": g.treatment,
                    "codes": list(g.codes),
                    "done": g.done,
                    "kept": g.kept,
                    "reason": g.reason,
                    "before": _render.jsonable(g.before),
                    "after": _render.jsonable(g.after),
                    "details": _render.jsonable(g.details),
                }
                for g in self.given
            ],
            "untreated": [{**f.to_dict(), "reason": reason} for f, reason in self.untreated],
            "mended": list(self.mended),
            "before": list(self.before.codes),
            "after": list(self.after.codes),
        }

    def __str__(self) -> str:
        return _render.plain_record(self)

    def __rich__(self) -> Any:
        return _render.rich_record(self)


def treat(
    model: nn.Module,
    report: Report,
    example: Inputs | None = None,
    *,
    select: Iterable[str] | None = None,
    data: Iterable[Any] | None = None,
    seed: int = 0,
) -> tuple[nn.Module, Record]:
    """Mend a copy of a model as far as that can be done automatically, and say what was done.

    Treatments are given one after the other: data first, then structure, weights, the output layer, running
    statistics. After each the model is examined again; one that mends nothing, makes something else worse, or
    changes a function that it promised to keep is undone, and the record says so.

    Args:
        model: what `report` was made of; left as it is.
        report: from `examine`.
        example: inputs to examine on; those of the report by default.
        select: treat only these codes (or beginnings of codes); everything where None.
        data: `(inputs, targets)` batches, or a loader of them, that statistics are taken from; the report's
            batch by default. At most 64 batches are kept.
        seed: what random numbers start from; every parameter has a stream of its own name.

    Returns:
        the treated copy (the model's own mode), and the record.

    Raises:
        TypeError: the model is no module, the report no `Report`, `select` a bare string.
        ValueError: the report doesn't know its inputs (it was read from a file) and no example is given.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from musigma.doctor import examine, treat
        >>> x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0)) * 5 + 20
        >>> net = nn.Linear(4, 2)
        >>> treated, record = treat(net, examine(net, x))
        >>> record.mended
        ('INP101',)
    """
    case = _case(model, report, example)
    if isinstance(select, str):
        raise TypeError(f"select must be a collection of codes; write [{select!r}]")
    wanted = None if select is None else tuple(c.upper() for c in select)
    batches = _batches(case, data, seed)
    course = _Course(case, Report((), {}) if example is not None else report, batches, seed)
    with impossible_variances_pass():
        for treatment in treatments():
            course.give(treatment, wanted)
        return course.finish(model, report)


def _case(model: nn.Module, report: Report, example: Inputs | None) -> Case:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module; got {type(model).__name__}")
    if not isinstance(report, Report):
        raise TypeError(f"report must come from musigma.doctor.examine; got {type(report).__name__}")
    if report.case is None and example is None:
        raise ValueError("the report doesn't hold the batch it was made on; pass example=inputs")
    case = report.case if report.case is not None else Case(model, example if example is not None else ())
    inner = copy.deepcopy(_graph.unwrap(model))
    inputs = case.inputs if example is None else example
    return replace(case, model=inner, inputs=inputs, optimizer=portable(case.optimizer), scheduler=None)


def portable(optimizer: OptimizerLike | None) -> OptimizerLike | None:
    """A factory in place of an optimizer that holds one model's parameters: its class with its defaults."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    kind, defaults = type(optimizer), dict(optimizer.defaults)
    return lambda parameters: kind(parameters, **defaults)  # type: ignore[call-arg]  # every subclass takes its defaults


def _batches(case: Case, data: Iterable[Any] | None, seed: int) -> list[Any]:
    if data is None:
        return [case.inputs]
    pairs = isinstance(case.inputs, torch.Tensor) or case.targets is not None
    with _graph.forked_rng(case.model, seed):  # a loader that shuffles draws
        taken = list(islice(iter(data), _BATCHES))
    if not taken:
        raise ValueError("data must hold at least one batch; got none")
    return [inputs_of(batch, pairs=pairs) for batch in taken]


def inputs_of(batch: Any, *, pairs: bool) -> Any:
    """The inputs of a loader's batch: its first part where it is an (inputs, targets) pair."""
    if isinstance(batch, list | tuple) and len(batch) == 2 and pairs:
        return batch[0]
    return tuple(batch) if isinstance(batch, list) else batch


class _Course:
    """The copy under treatment, with the report of its present state."""

    def __init__(self, case: Case, report: Report, batches: list[Any], seed: int) -> None:
        self._case, self._batches, self._seed = case, batches, seed
        self._exam, self._report = self._examine(case.model)
        self._given: list[Given] = []

    def give(self, treatment: Treatment, wanted: tuple[str, ...] | None) -> None:
        """Try one treatment on what is found now."""
        findings = tuple(
            f for f in self._report
            if f.code in treatment.mends and (wanted is None or f.code.startswith(wanted))
        )  # fmt: skip
        if not findings:
            return
        codes = tuple(dict.fromkeys(f.code for f in findings))
        patient = Patient(copy.deepcopy(self._case.model), self._exam, self._batches, self._seed)
        try:
            applied = treatment.apply(patient, findings)
        except NotApplicable as obstacle:
            self._given.append(Given(treatment.name, codes, "", False, str(obstacle)))
            return
        exam, report = self._examine(applied.model)
        reason = self._objection(treatment, codes, exam, report)
        self._given.append(
            Given(
                treatment.name,
                codes,
                applied.done,
                kept=not reason,
                reason=reason,
                before=_evidence(self._report, codes),
                after=_evidence(report, codes),
                details=applied.details,
            )
        )
        if not reason:
            self._case, self._exam, self._report = replace(self._case, model=applied.model), exam, report

    def finish(self, model: nn.Module, before: Report) -> tuple[nn.Module, Record]:
        """The treated model and the record."""
        tried = {c: g for g in self._given if not g.kept for c in g.codes}
        untreated = tuple((f, self._why(f, tried.get(f.code))) for f in self._report)
        return self._case.model, Record(tuple(self._given), untreated, before, self._report)

    def _why(self, finding: Finding, tried: Given | None) -> str:
        if tried is not None:
            return f"{tried.treatment}: {tried.reason}"
        if finding.treatment is not None:
            return (
                "it was not selected"
                if not any(finding.code in g.codes for g in self._given)
                else "only in part"
            )
        return f"nothing mends it automatically: {finding.fix}"

    def _examine(self, model: nn.Module) -> tuple[Examination, Report]:
        case = replace(self._case, model=model)
        exam = Examination.of(case)
        return exam, judged(exam, case, list_rules())

    def _objection(
        self, treatment: Treatment, codes: tuple[str, ...], exam: Examination, report: Report
    ) -> str:
        new = [c for c in report.codes if c not in self._report.codes]
        if _burden(report) > _burden(self._report):
            return f"undone: it brought {', '.join(new) or 'more findings'}"
        if _burden(report, codes) >= _burden(self._report, codes):
            return f"undone: {', '.join(codes)} stayed as they were"
        if treatment.keeps_function and not _same_function(self._exam, exam):
            return "undone: it changed what the model computes"
        return ""


def _evidence(report: Report, codes: Iterable[str]) -> dict[str, Any]:
    return {c: dict(report.by_code(c)[0].evidence) for c in codes if report.by_code(c)}


def _burden(report: Report, codes: tuple[str, ...] | None = None) -> int:
    return sum(_WEIGHT[f.severity] for f in report if codes is None or f.code in codes)


def _same_function(one: Examination, other: Examination) -> bool:
    pairs = zip(
        _calls.floating_outputs(one.trace.output), _calls.floating_outputs(other.trace.output), strict=True
    )
    # Rounding through a net of a few dozen layers, relative to the largest output.
    return all(
        bool(((a - b).abs() <= 1e-3 * a.abs().amax() + 1e-6).all()) for a, b in pairs if a.shape == b.shape
    )
