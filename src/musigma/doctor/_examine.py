"""Examine a model: validate what the caller gave, let every rule judge, keep what reports draw."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, get_args

import torch
from torch import Tensor, nn

from musigma.doctor import _treatments
from musigma.doctor._case import Case, Inputs, Intent, Loss, OptimizerLike, SchedulerLike
from musigma.doctor._examination import Examination
from musigma.doctor._finding import Finding, Report
from musigma.doctor._measurements import measurements
from musigma.doctor._rules import Rule, Symptom, select_rules
from musigma.doctor.probes import _calls

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
        mask: the real positions, True takes part, broadcastable to (batch, positions).
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
        ValueError: the batch holds no tensor or no example, the optimizer holds none of the model's
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
    _validate(model, inputs, optimizer, mask, intent)
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
    with torch.inference_mode(False), torch.enable_grad():
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


def _validate(model: Any, inputs: Any, optimizer: Any, mask: Any, intent: Any) -> None:
    if not isinstance(model, nn.Module):
        hint = "; call it: Net()" if isinstance(model, type) else ""
        raise TypeError(f"model must be a torch.nn.Module; got {_kind(model)}{hint}")
    if not isinstance(inputs, Tensor | tuple | Mapping):
        hint = "; make it a tuple of arguments" if isinstance(inputs, list) else ""
        hint = "; use torch.as_tensor" if type(inputs).__module__.startswith(("numpy", "pandas")) else hint
        raise TypeError(
            f"inputs must be a tensor, a tuple of arguments or a mapping; got {_kind(inputs)}{hint}"
        )
    tensors = _calls.tensors_in(inputs)
    if not tensors:
        raise ValueError("inputs must hold at least one tensor; got none")
    empty = [tuple(t.shape) for t in tensors if not t.numel()]
    if len(empty) == len(tensors):
        raise ValueError(f"inputs must hold at least one example; got shapes {empty}")
    if optimizer is not None and not _steps(optimizer):
        raise TypeError(f"optimizer must be an optimizer or a factory of one; got {_kind(optimizer)}")
    if mask is not None and not isinstance(mask, Tensor):
        raise TypeError(f"mask must be a tensor, True where a position is real; got {_kind(mask)}")
    if intent is not None and intent not in get_args(Intent):
        raise ValueError(f"intent must be one of {get_args(Intent)} or None; got {intent!r}")


def _steps(optimizer: Any) -> bool:
    # A bare class is refused: torch's own can't be called without a learning rate being thought of.
    return not isinstance(optimizer, type) and (callable(optimizer) or hasattr(optimizer, "step"))


def _kind(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
