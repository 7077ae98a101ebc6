"""LayerNorm to RMSNorm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import musigma.nn as layers
from musigma.graph import Graph, record
from musigma.statistics import moments
from musigma.surgery._certificate import Certificate
from musigma.surgery._layers import Where, chosen, duplicate, own_behaviour, paths_of, tied, turn_into
from musigma.surgery._seen import shapes_seen
from musigma.surgery.converting._fit import Fit, Joint, calls_of, paired
from musigma.surgery.converting._judged import judged

_KNOWN = (nn.LayerNorm, layers.LayerNorm)


def to_rms_norm(model: nn.Module, data: Sequence[Any], where: Where) -> tuple[nn.Module, Certificate]:
    """A copy in which LayerNorms are RMSNorms, one after the other."""
    norms: dict[str, Any] = chosen(model, where, lambda m: isinstance(m, nn.LayerNorm))
    reached = shapes_seen(model, norms, data)
    twin = duplicate(model).eval()
    with torch.no_grad():
        graph = record(twin, data[0])
    after = duplicate(model)
    changed: list[str] = []
    refused: list[str] = []
    all_exact = True
    for name in [*reached, *(n for n in norms if n not in reached)]:
        old = norms[name]
        behind = linears_behind(model, graph, name)
        reason = _why_not(model, old, name in reached, behind)
        if reason is not None:
            refused.append(f"{paths_of(model, old)}: {reason}")
            continue
        exact = _centered_already(after, name, old, data)
        all_exact = all_exact and exact
        fit = None if exact else _fitted(model, after, name, data, intercept=behind is not None)
        _change(after, name, old, behind or (), fit)
        how = (
            "exact: its inputs have mean 0"
            if fit is None
            else f"calibrated on {fit.examples} examples; {fit.error:.2g} sd of its outputs are left over"
        )
        changed.append(f"{paths_of(model, old)}: {type(old).__name__} -> RMSNorm, {how}")
    certificate = judged("convert", model, after, data, changed=changed, refused=refused, exact=all_exact)
    return after, certificate


def linears_behind(model: nn.Module, graph: Graph, name: str) -> tuple[str, ...] | None:
    """The Linears that alone read what a norm gives, and read nothing else; None if others do."""
    norms = graph.node_of(name)
    if not norms or any(node.index in graph.output for node in norms):
        return None
    own = {node.index for node in norms}
    paths: dict[str, None] = {}
    for node in (reader for norm in norms for reader in graph.consumers(norm)):
        layer = _module(model, node.module)
        if (
            node.op != "linear"
            or not isinstance(layer, nn.Linear)
            or type(layer).forward is not nn.Linear.forward
        ):
            return None
        if node.inputs[0] not in own or len(graph.node_of(node.module)) != sum(
            n.inputs[0] in own for n in graph.node_of(node.module)
        ):
            return None
        shared = tied(model, layer)
        if shared is not None and layer.bias is not None:
            return None
        paths[node.module] = None
    return tuple(paths)


def _module(model: nn.Module, path: str) -> nn.Module:
    return model.get_submodule(path)


def _why_not(model: nn.Module, norm: Any, reached: bool, behind: tuple[str, ...] | None) -> str | None:
    if (reason := own_behaviour(norm, _KNOWN)) is not None:
        return reason
    if (reason := tied(model, norm)) is not None:
        return reason
    if not reached:
        return "the data do not reach it"
    biased = norm.bias is not None and bool((norm.bias != 0).any())
    if biased and behind is None:
        return (
            "it has a bias, RMSNorm has none, and what follows is not Linears alone that could take it over"
        )
    return None


def _dims(norm: Any) -> tuple[int, ...]:
    return tuple(range(-len(norm.normalized_shape), 0))


def _centered_already(after: nn.Module, name: str, norm: Any, data: Sequence[Any]) -> bool:
    """Whether the mean of every row is 0, but for the rounding of its values."""
    for batch in data:
        for x in calls_of(after, name, batch, lambda x, _: x):
            rows = moments(x, _dims(norm))
            rms = (rows.var() + rows.mean.square()).sqrt()
            # the mean of values rounded to eps each
            if bool((rows.mean.abs() > torch.finfo(x.dtype).eps * rms).any()):
                return False
    return True


def _fitted(before: nn.Module, after: nn.Module, name: str, data: Sequence[Any], *, intercept: bool) -> Fit:
    old: Any = before.get_submodule(name)
    plain = nn.RMSNorm(old.normalized_shape, old.eps, elementwise_affine=False)
    joint = Joint()
    for y, x in paired(before, after, name, data):
        joint.add(y, plain(x), list(range(y.dim() - len(old.normalized_shape))))
    return joint.fit(intercept=intercept)


def _change(after: nn.Module, name: str, old: Any, behind: Sequence[str], fit: Fit | None) -> None:
    space: Any = layers if type(old).__module__.startswith("musigma") else nn
    weight: Tensor | None = old.weight if fit is None else fit.weight
    bias: Tensor | None = old.bias if fit is None else fit.bias
    held: Any = after.get_submodule(name)
    like = next(iter(after.parameters())) if old.weight is None else old.weight
    new = space.RMSNorm(
        old.normalized_shape, old.eps, weight is not None, device=like.device, dtype=like.dtype
    )
    with torch.no_grad():
        if weight is not None:
            new.weight.copy_(weight)
            new.weight.requires_grad_(old.weight is None or old.weight.requires_grad)
        if bias is not None and bool((bias != 0).any()):
            for path in behind:
                _add_to_bias(after.get_submodule(path), bias.detach())
    turn_into(held, new)


def _add_to_bias(linear: nn.Module, bias: Tensor) -> None:
    """W(z + b) + c = Wz + (c + Wb)."""
    assert isinstance(linear, nn.Linear)
    shift = linear.weight.double() @ bias.double().flatten()
    if linear.bias is None:
        linear.bias = nn.Parameter(shift.to(linear.weight.dtype), linear.weight.requires_grad)
    else:
        linear.bias.copy_(linear.bias.double() + shift)
