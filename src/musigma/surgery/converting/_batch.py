"""BatchNorm to GroupNorm, LayerNorm or InstanceNorm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from musigma.surgery._certificate import Certificate
from musigma.surgery._layers import (
    KNOWN_BATCH_NORMS,
    LAZY,
    Where,
    chosen,
    duplicate,
    is_lazy,
    own_behaviour,
    paths_of,
    tied,
    turn_into,
)
from musigma.surgery._seen import shapes_seen
from musigma.surgery.converting._fit import Fit, Joint, paired
from musigma.surgery.converting._judged import judged
from musigma.surgery.converting._kinds import make, why_not


def from_batch_norm(
    model: nn.Module, data: Sequence[Any], target: str, groups: int | None, where: Where
) -> tuple[nn.Module, Certificate]:
    """A copy in which BatchNorms are of another kind, one after the other."""
    norms: dict[str, Any] = chosen(model, where, lambda m: isinstance(m, _BatchNorm))
    shapes = shapes_seen(model, norms, data)
    reasons = {
        name: _why_not(model, norm, shapes.get(name, []), target, groups) for name, norm in norms.items()
    }
    after = duplicate(model)
    changed: list[str] = []
    for name in (name for name in shapes if reasons[name] is None):  # in the order in which they ran
        old = norms[name]
        new = make(target, old, old.num_features, shapes[name], groups)
        new.train(old.training)
        fit = _fitted(model, after, name, new, data)
        _write(new, fit, old)
        turn_into(after.get_submodule(name), new)
        changed.append(
            f"{paths_of(model, old)}: {type(old).__name__} -> {_said(new)}, calibrated on {fit.examples} "
            f"examples; {fit.error:.2g} sd of its outputs are left over"
        )
    refused = [f"{paths_of(model, norms[name])}: {reason}" for name, reason in reasons.items() if reason]
    return after, judged("convert", model, after, data, changed=changed, refused=refused, exact=not changed)


def _why_not(
    model: nn.Module, norm: Any, shapes: Sequence[tuple[int, ...]], target: str, groups: int | None
) -> str | None:
    if is_lazy(norm):
        return LAZY
    if (reason := own_behaviour(norm, KNOWN_BATCH_NORMS)) is not None:
        return reason
    if (reason := tied(model, norm)) is not None:
        return reason
    if not shapes:
        return "the data do not reach it"
    return why_not(target, norm.num_features, shapes, groups)


def _fitted(before: nn.Module, after: nn.Module, name: str, new: nn.Module, data: Sequence[Any]) -> Fit:
    """Least squares of what the old layer gave by the new layer of what reaches it now."""
    joint = Joint()
    with torch.no_grad():
        for y, x in paired(before, after, name, data):
            z = new(x)  # its weight is 1 and its bias 0 still
            joint.add(y, z, [d for d in range(y.dim()) if d != 1])
    return joint.fit()


def _write(new: Any, fit: Fit, old: Any) -> None:
    values: tuple[tuple[str, Tensor], ...] = (("weight", fit.weight), ("bias", fit.bias))
    with torch.no_grad():
        for name, value in values:
            parameter = getattr(new, name)
            parameter.copy_(value)
            if (before := getattr(old, name)) is not None:
                parameter.requires_grad_(before.requires_grad)


def _said(new: nn.Module) -> str:
    name = type(new).__name__
    return f"{name} of {new.num_groups} groups" if isinstance(new, nn.GroupNorm) else name
