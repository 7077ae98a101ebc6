"""Take normalizations out of a trained network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

import musigma.nn as layers
from musigma.graph import unwrap
from musigma.surgery._certificate import Certificate
from musigma.surgery._layers import (
    FROZEN,
    KNOWN_BATCH_NORMS,
    KNOWN_INSTANCE_NORMS,
    Where,
    chosen,
    duplicate,
    is_norm,
    materialized,
    own_behaviour,
    paths_of,
    tied,
    turn_into,
)
from musigma.surgery._seen import shapes_seen
from musigma.surgery.converting._convert import calibration_data
from musigma.surgery.converting._fit import Fit, Joint, paired
from musigma.surgery.converting._identity import IN_TRAINING, distances_from_identity
from musigma.surgery.converting._insert import SUFFIX
from musigma.surgery.converting._judged import judged

_KNOWN = (
    *KNOWN_BATCH_NORMS,
    *KNOWN_INSTANCE_NORMS,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    layers.LayerNorm,
    layers.LayerNorm1d,
    layers.LayerNorm2d,
    layers.LayerNorm3d,
    layers.GroupNorm,
    layers.RMSNorm,
    FROZEN,
    layers.FrozenBatchNorm1d,
    layers.FrozenBatchNorm2d,
    layers.FrozenBatchNorm3d,
)


def remove(
    model: nn.Module,
    example: Any,
    *,
    where: Where = None,
    loader: Any = None,
    max_batches: int | None = None,
) -> tuple[nn.Module, Certificate]:
    """Take normalizations out of a trained network, which goes on computing what it did in evaluation.

        weight, bias = argmin Σ (norm(x) − weight · x − bias)²,   of each channel

    A norm that gives back what it got (as `insert` leaves it) goes without a trace. Any other leaves a
    `musigma.nn.Affine`, the scale and shift that come closest to it on the data: what a norm by running
    statistics is in evaluation, exactly, for any input; for norms of examples the certificate says what is
    left over. (`fold` then moves a scale and shift into the layers around.)

    Args:
        model: a trained module; left as it is.
        example: what the model is called with.
        where: names or patterns of layers, or a function of name and layer; all normalizations if None.
        loader: what to measure on: batches as in `recalibrate`, kept in memory. The example if None.
        max_batches: read only so many.

    Returns:
        a copy without the norms, and the certificate with the difference of its outputs in evaluation. It
        has no bound unless the removal is exact.

    Raises:
        ValueError: `where` names no normalization, or no batches.
        CertificateError: the removal was to be exact, and is not; nothing was changed.

    Example:
        >>> import torch, musigma as ms
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3)).eval()
        >>> plain, certificate = ms.surgery.remove(net, torch.randn(16, 4))
        >>> plain[1]
        Affine((3,), dim=1, bias=True)

    References:
        Heimersheim 2024, "You can remove GPT2's LayerNorm by fine-tuning".
    """
    before = duplicate(unwrap(materialized(model, example)))
    data = calibration_data(before, example, loader, max_batches)
    norms: dict[str, Any] = chosen(before, where, is_norm)
    shapes = shapes_seen(before, norms, data)
    distances = distances_from_identity(before, norms, data)
    after = duplicate(before)
    changed: list[str] = []
    refused: list[str] = []
    exact = True
    for name in [*shapes, *(n for n in norms if n not in shapes)]:
        norm = norms[name]
        reason = _why_not(before, norm, name in shapes)
        if reason is not None:
            refused.append(f"{paths_of(before, norm)}: {reason}")
            continue
        said = f"{paths_of(before, norm)}: {type(norm).__name__}"
        if distances[name] <= 1:
            turn_into(after.get_submodule(name), nn.Identity())
            changed.append(f"{said} gave back what it got, and is gone")
            continue
        fixed = _by_fixed_statistics(norm)
        fit = _exact(norm) if fixed else _fitted(before, after, name, data)
        exact = exact and fixed
        turn_into(after.get_submodule(name), _affine(norm, fit))
        how = (
            "which it is in evaluation"
            if fixed
            else f"calibrated on {fit.examples} examples; {fit.error:.2g} sd of its outputs are left over"
        )
        changed.append(f"{said} -> Affine, {how}")
    for name in shapes:
        _take_out(after, name)
    certificate = judged(
        "remove",
        before,
        after,
        data,
        changed=changed,
        refused=refused,
        exact=exact,
        anywhere=exact,
        notes=(IN_TRAINING.replace("an Identity", "what is left"),),
    )
    return after, certificate


def _why_not(model: nn.Module, norm: Any, reached: bool) -> str | None:
    if not reached:
        return "the data do not reach it"
    return own_behaviour(norm, _KNOWN) or tied(model, norm)


def _by_fixed_statistics(norm: Any) -> bool:
    known = (_BatchNorm, _InstanceNorm, FROZEN)
    return isinstance(norm, known) and getattr(norm, "running_mean", None) is not None


def _exact(norm: Any) -> Fit:
    """(x − mean) / √(var + eps) · weight + bias as one scale and one shift."""
    rstd = (norm.running_var.double() + norm.eps).rsqrt()
    scale = rstd if norm.weight is None else rstd * norm.weight.detach().double()
    shift = -norm.running_mean.double() * scale
    return Fit(scale, shift if norm.bias is None else shift + norm.bias.detach().double(), 0.0, 0)


def _fitted(before: nn.Module, after: nn.Module, name: str, data: Sequence[Any]) -> Fit:
    joint = Joint()
    norm = before.get_submodule(name)
    for y, x in paired(before, after, name, data):
        features = {d % y.dim() for d in _feature_dims(norm)}
        joint.add(y, x, [d for d in range(y.dim()) if d not in features])
    return joint.fit()


def _feature_dims(norm: Any) -> tuple[int, ...]:
    """Where the features stand that have a weight each."""
    last = isinstance(norm, nn.LayerNorm | nn.RMSNorm)
    if last and not isinstance(norm, layers.LayerNorm1d | layers.LayerNorm2d | layers.LayerNorm3d):
        return tuple(range(-len(norm.normalized_shape), 0))
    return (1,)


def _affine(norm: Any, fit: Fit) -> nn.Module:
    own = next((t for t in (*norm.parameters(), *norm.buffers()) if t.is_floating_point()), None)
    new = layers.Affine(
        tuple(fit.weight.shape),
        _feature_dims(norm)[0],
        device=fit.weight.device,
        dtype=torch.get_default_dtype() if own is None else own.dtype,
    )
    with torch.no_grad():
        new.weight.copy_(fit.weight)
        assert new.bias is not None
        new.bias.copy_(fit.bias)
    for name in ("weight", "bias"):
        before = getattr(norm, name, None)
        getattr(new, name).requires_grad_(before is None or before.requires_grad)
    return new


def _take_out(model: nn.Module, name: str) -> None:
    """What `insert` put in goes altogether, and the layer before gets its place back."""
    path, _, slot = name.rpartition(".")
    parent = model.get_submodule(path)
    if type(parent) is not nn.Sequential or not isinstance(parent._modules.get(slot), nn.Identity):
        return
    if slot.endswith(SUFFIX):
        del parent._modules[slot]
    elif slot == "norm" and list(parent._modules) == ["layer", "norm"]:
        outer, _, name_there = path.rpartition(".")
        model.get_submodule(outer)._modules[name_there] = parent._modules["layer"]
