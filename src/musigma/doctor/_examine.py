"""Examine a model: validate what the caller gave, let every rule judge, keep what reports draw."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from musigma.doctor import _treatments
from musigma.doctor._case import Case, Inputs, Intent, Loss, OptimizerLike, SchedulerLike
from musigma.doctor._examination import Examination
from musigma.doctor._finding import Finding, Report
from musigma.doctor._measurements import measurements
from musigma.doctor._rules import Rule, Symptom, select_rules
from musigma.doctor._validation import validate
from musigma.functional._variances import impossible_variances_pass

__all__ = ["examine", "judged"]


def examine(
    model: nn.Module,
    inputs: Inputs,
    targets: Any = None,
    *,
    loss: Loss | None = None,
    optimizer: OptimizerLike | None = None,
    scheduler: SchedulerLike | None = None,
    mask: Tensor | None = None,
    independent: bool = False,
    intent: Intent | None = None,
    select: Iterable[str] | None = None,
    ignore: Iterable[str] | None = None,
    name: str | None = None,
) -> Report:
    """Measure a model's inputs, weights, activations and gradients on one batch, and say what is wrong.

    A copy is run once forward and once backward, and more only where a rule asks for it. The model, its
    parameters, buffers, gradients, hooks and modes, the inputs and the global random state stay as they are.

    With intent "train" or "finetune" a model in eval mode is examined in train mode; otherwise it is examined
    in the mode it is in. Without `loss` the model's own loss (`output.loss`) is differentiated where there is
    one, and otherwise a fixed random projection Σ r·y / n of its outputs, r standard normal for every single
    element: a plain sum would have an exactly zero gradient behind a centred normalization.

    Args:
        model: any module.
        inputs: one batch, as the model takes it: a tensor, a tuple of arguments or a mapping of keywords. The
            first axis of the first tensor is the batch.
        targets: what `loss` takes as its second argument.
        loss: `loss(output, targets)`, or `loss(output)` without targets; one number.
        optimizer: an optimizer over `model.parameters()`, or a factory `parameters -> optimizer`.
        scheduler: a scheduler over that optimizer, or a factory `optimizer -> scheduler`.
        mask: the real positions, True takes part (or weights), broadcastable to (batch, positions); positions
            are the inputs' axes behind the batch, or behind the channels.
        independent: True says that examples must not influence each other's outputs.
        intent: what the model is about to do: "train", "inference" or "finetune".
        select: codes or prefixes of codes to judge by ("INP", "NRM30", "GRD504"); all where None.
        ignore: codes or prefixes to leave out.
        name: how the report calls the model; its class by default.

    Returns:
        the findings, worst first, with the measurements that reports draw. A rule that needs an argument that
        was not given stays silent and is listed in `report.skipped`.

    Raises:
        TypeError: an argument is of a kind that can't be examined; the model can't be copied.
        ValueError: the batch holds no tensor or no example, the targets are of another batch, the mask
            doesn't fit or has negative or infinite weights, the optimizer holds none of the model's
            parameters, an unknown intent or code.
        Exception: what the model itself raises on this batch, unless a rule explains it.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from musigma.doctor import examine
        >>> generator = torch.Generator().manual_seed(0)
        >>> report = examine(nn.BatchNorm1d(4), torch.randn(64, 4, generator=generator), select=["INP"])
        >>> report.codes
        ()
    """
    chosen = select_rules(select, ignore)
    validate(model, inputs, targets, loss=loss, optimizer=optimizer, mask=mask, intent=intent)
    case = Case(
        model,
        inputs,
        targets,
        loss=loss,
        optimizer=optimizer,
        scheduler=scheduler,
        mask=mask,
        independent=independent,
        intent=intent,
        name=name,
    )
    # Whatever mode the caller is in: gradients are what is measured.
    with torch.inference_mode(False), torch.enable_grad(), impossible_variances_pass():
        return judged(Examination.of(case), case, chosen)


def judged(exam: Examination, case: Case, chosen: Iterable[Rule]) -> Report:
    """What the chosen rules say about an examination.

    Raises:
        Exception: what the model raised, unless a rule explains it.
    """
    given = {
        "targets": case.targets is not None,
        "loss": case.loss is not None or (exam.failure is None and exam.trace.loss_source == "own"),
        "optimizer": case.optimizer is not None,
        "scheduler": case.scheduler is not None,
        "mask": case.mask is not None,
        "independent": case.independent,
        "intent": case.intent is not None,
    }
    skipped: dict[str, str] = {}
    findings: list[Finding] = []
    for rule in chosen:
        missing = [n for n in rule.needs if not given[n]]
        if missing or (exam.failure is not None and not rule.on_failure):
            skipped[rule.code] = f"needs {', '.join(missing)}" if missing else "the model raised"
        else:
            findings += _judge(rule, exam)
    if exam.failure is not None and not findings:
        exam.failure.add_note("raised while musigma.doctor ran a copy of the model on the given batch")
        raise exam.failure
    measured = {} if exam.failure is not None else measurements(exam)
    return Report(tuple(findings), measured, skipped, case.name or type(exam.model).__name__, case)


def _judge(rule: Rule, exam: Examination) -> Iterator[Finding]:
    symptom: Symptom
    for symptom in rule.check(exam):
        yield Finding(
            code=rule.code,
            name=rule.name,
            severity=symptom.severity or rule.severity,
            where=symptom.where,
            message=symptom.message,
            evidence=symptom.evidence,
            fix=symptom.fix,
            treatment=_treatments.treatment_for(rule.code),
        )
