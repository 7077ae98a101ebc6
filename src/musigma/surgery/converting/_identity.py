"""Normalizations that give back what they got."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from musigma.surgery._certificate import Certificate
from musigma.surgery._compared import random_like
from musigma.surgery._layers import FROZEN, Where, chosen, duplicate, is_norm, paths_of, turn_into
from musigma.surgery._seen import run_and_listen
from musigma.surgery.converting._judged import judged

_SOURCES: dict[str, tuple[type[nn.Module], ...]] = {
    "batchnorm": (_BatchNorm, FROZEN),
    "layernorm": (nn.LayerNorm,),
}
IN_TRAINING = "in training a BatchNorm normalizes by its batch, and an Identity does not"


def to_identity(
    model: nn.Module, data: Sequence[Any], source: str, where: Where
) -> tuple[nn.Module, Certificate]:
    """A copy in which normalizations that change nothing are Identity."""
    kinds = _SOURCES.get(source)
    norms = chosen(model, where, lambda m: isinstance(m, kinds) if kinds else is_norm(m))
    distances = distances_from_identity(model, norms, data)
    meant = [name for name in norms if distances.get(name, 2.0) <= 1]
    after = duplicate(model)
    for name in meant:
        turn_into(after.get_submodule(name), nn.Identity())
    changed = [
        f"{paths_of(model, norms[n])}: {type(norms[n]).__name__} -> Identity, which it is" for n in meant
    ]
    refused = [
        f"{paths_of(model, norms[name])}: "
        + ("it is no identity" if name in distances else "the data do not reach it")
        for name in norms
        if name not in meant
    ]
    notes = (IN_TRAINING,) if any(isinstance(norms[name], _BatchNorm) for name in meant) else ()
    certificate = judged(
        "convert",
        model,
        after,
        data,
        changed=changed,
        refused=refused,
        exact=True,
        notes=notes,
        anywhere=True,
    )
    return after, certificate


def distances_from_identity(
    model: nn.Module, norms: dict[str, nn.Module], data: Sequence[Any]
) -> dict[str, float]:
    """How far each layer is from giving back its input, in what rounding accounts for: at most 1 if it does.

    Looked at on the data and on random inputs of their shapes: of a norm of examples the data alone say
    nothing of others.
    """
    found: dict[str, float] = {}

    def listen(name: str, x: Tensor, y: Any) -> None:
        if not isinstance(y, Tensor) or y.shape != x.shape or not x.numel():
            distance = float("inf")
        else:
            shift = getattr(norms[name], "bias", None)
            scale = max(float(x.abs().max()), 0.0 if shift is None else float(shift.abs().max()))
            # subtracting, scaling and adding round three times each, and √(var + eps) and its inverse too
            allowed = 16 * torch.finfo(x.dtype).eps * scale
            distance = float((y - x).abs().max()) / allowed if allowed else float(bool((y != x).any())) * 2
        distance = distance if distance == distance else float("inf")
        found[name] = max(found.get(name, 0.0), distance)

    drawn = [_like(batch, random_like(batch)) for batch in data[:1]]
    for batch in [*data, *drawn]:
        run_and_listen(model, norms, batch, listen)
    return found


def _like(batch: Any, drawn: Any) -> Any:
    """The random batch, which is drawn in float64, in the batch's types."""
    flat, spec = torch.utils._pytree.tree_flatten(batch)
    new = torch.utils._pytree.tree_leaves(drawn)
    cast = [n.to(o.dtype) if isinstance(o, Tensor) else o for o, n in zip(flat, new, strict=True)]
    return torch.utils._pytree.tree_unflatten(cast, spec)
