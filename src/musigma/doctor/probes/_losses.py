"""Which loss it is that was given, recognised by its value, and what a net that knows nothing would get."""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from musigma.doctor.probes import _calls
from musigma.statistics import moments

__all__ = ["Chance", "chance_of"]

# Two formulas for one loss agree to a few roundings of float32.
_SAME = 1e-4


@dataclass(frozen=True)
class Chance:
    """What the given loss is for a net that has learned nothing.

    Args:
        kind: "cross_entropy", "binary_cross_entropy" or "mean_squared_error", recognised because the plain
            function gives the same number on this batch: weighted and smoothed losses are none of them.
        value: ln C for C classes, ln 2 for two, the variance of the targets for squared errors.
        classes: C, or None.
        error: standard error of the batch's mean loss.
    """

    kind: str
    value: float
    classes: int | None
    error: float


def chance_of(output: Any, targets: Any, loss: float) -> Chance | None:
    """Recognise a loss by its value on one batch; None for any that is not plain.

    Args:
        output: what the model returned.
        targets: what the loss was given.
        loss: its value.
    """
    outputs, wanted = _calls.floating_outputs(output), _calls.tensors_in(targets)
    if not outputs or len(wanted) != 1 or not math.isfinite(loss):
        return None
    y, t = outputs[0].detach().float(), wanted[0].detach()
    for recognise in (_cross_entropy, _binary, _squared):
        found = recognise(y, t, loss)
        if found is not None:
            return found
    return None


def _close(each: Tensor, loss: float) -> bool:
    value = float(each.mean())
    return abs(value - loss) <= _SAME * max(abs(loss), abs(value), 1e-3)


def _error(each: Tensor) -> float:
    # Examples are the independent draws; positions of one example are averaged first.
    per_example = each.double().reshape(len(each), -1).mean(1)
    m = moments(per_example, 0)
    return float(m.std(correction=1)) / len(each) ** 0.5 if len(each) > 1 else float("inf")


def _cross_entropy(y: Tensor, t: Tensor, loss: float) -> Chance | None:
    if y.ndim < 2 or t.is_floating_point() or t.dtype is torch.bool or not t.numel() or int(t.min()) < 0:
        return None
    # Classes on axis 1, as torch wants them, or last, as sequence models have them before they flatten.
    for logits in (y, y.movedim(-1, 1)):
        classes = logits.shape[1]
        if classes < 2 or t.shape != (logits.shape[0], *logits.shape[2:]) or int(t.max()) >= classes:
            continue
        for function in (F.cross_entropy, F.nll_loss):
            each = function(logits, t.long(), reduction="none")
            if _close(each, loss):
                return Chance("cross_entropy", math.log(classes), classes, _error(each))
    return None


def _binary(y: Tensor, t: Tensor, loss: float) -> Chance | None:
    if t.shape != y.shape or not bool(((t == 0) | (t == 1)).all()):
        return None
    t = t.float()
    candidates = [F.binary_cross_entropy_with_logits(y, t, reduction="none")]
    if bool(((y >= 0) & (y <= 1)).all()):
        candidates.append(F.binary_cross_entropy(y, t, reduction="none"))
    for each in candidates:
        if _close(each, loss):
            return Chance("binary_cross_entropy", math.log(2), 2, _error(each))
    return None


def _squared(y: Tensor, t: Tensor, loss: float) -> Chance | None:
    if t.shape != y.shape or not t.is_floating_point():
        return None
    each = (y - t.float()).square()
    if not _close(each, loss):
        return None
    over_examples = moments(t, 0)
    return Chance("mean_squared_error", float(over_examples.var().mean()), None, _error(each))
