"""The weight and bias under which a normalization gives back what it got."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from musigma.functional._checks import check_rows
from musigma.functional._rows import RMS_EPS
from musigma.nn._frozen import FrozenBatchNorm
from musigma.nn._layer_norm import ChannelsFirst
from musigma.nn._sync_batch_norm import SyncBatchNorm
from musigma.statistics import moments

Norm = TypeVar("Norm", bound=nn.Module)


@torch.no_grad()
def restore_identity_(layer: Norm, x: Tensor) -> Norm:
    """Set a normalization's weight and bias so that ``layer(x)`` is x again: weight = √(σ² + eps), bias = μ.

    This is the argument of the notes for the two parameters: if not normalizing were best, training could
    find it. Where the statistics belong to channels (BatchNorm) it works for any batch, in evaluation with
    the running statistics for any input at all. Where they belong to examples (LayerNorm, RMSNorm,
    GroupNorm, InstanceNorm) one weight has to serve all of them, so their moments must agree: one row does.

    Args:
        layer: a BatchNorm, LayerNorm, RMSNorm, GroupNorm or InstanceNorm with weight (and, except
            for RMSNorm, bias), torch's or ours; changed in place.
        x: an input of the layer.

    Returns:
        the layer.

    Raises:
        TypeError: the layer is none of these.
        ValueError: it has no weight or bias to set, there is no example, the examples' moments differ, or
            they are not finite.
        RuntimeError: x does not end in the layer's normalized_shape.

        Whatever is raised, nothing is changed.

    Example:
        >>> import torch, musigma as ms
        >>> x = torch.tensor([[1.0, 20.0], [2.0, 30.0], [3.0, 10.0]])
        >>> norm = ms.nn.restore_identity_(ms.nn.BatchNorm1d(2), x)
        >>> torch.allclose(norm(x), x)
        True

    References:
        Ioffe & Szegedy 2015, "Batch Normalization", section 3.
    """
    mean, var = _statistics(layer, x)
    weight, bias = getattr(layer, "weight", None), getattr(layer, "bias", None)
    centered = not isinstance(layer, torch.nn.RMSNorm)
    if weight is None or (centered and bias is None):
        raise ValueError(
            f"{type(layer).__name__} needs {'weight and bias' if centered else 'a weight'} to undo what it "
            "does; build it with them (affine=True, bias=True)"
        )
    eps = RMS_EPS if (given := getattr(layer, "eps", None)) is None else given
    new = [(weight, (var.double() + eps).sqrt().expand_as(weight).to(weight.dtype))]
    if bias is not None:
        new.append((bias, mean.expand_as(bias).to(bias.dtype)))
    for parameter, value in new:
        if not value.isfinite().all():
            raise ValueError(_why_not_finite(layer, x, mean, var, parameter.dtype))
    for parameter, value in new:
        parameter.copy_(value)
    return layer


def _statistics(layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """The mean and variance the layer uses on x; for RMSNorm 0 and the mean square."""
    match layer:
        case FrozenBatchNorm():
            return layer.running_mean, layer.running_var
        case _NormBase() if not layer.training and layer.running_mean is not None:
            assert layer.running_var is not None
            return layer.running_mean, layer.running_var
        case torch.nn.modules.batchnorm._BatchNorm():
            batch = moments(x, [0, *range(2, x.dim())])
            # One rank's batch may be empty; what all of them hold decides for all of them.
            if isinstance(layer, SyncBatchNorm) and (group := layer._group()) is not None:
                batch = batch.all_reduce(group)
            if not (batch.count > 0).all():
                raise ValueError(_nothing_in(x))
            return batch.mean, batch.var()
        case torch.nn.modules.instancenorm._InstanceNorm():
            batched = x.unsqueeze(0) if x.dim() == layer._get_no_batch_dim() else x
            channels = moments(batched, range(2, batched.dim()))
            return _agreed(layer, channels.mean, channels.var(), x)
        case torch.nn.GroupNorm():
            grouped = x.unflatten(1, (layer.num_groups, -1))
            groups = moments(grouped, range(2, grouped.dim()))
            mean, var = _agreed(layer, groups.mean, groups.var(), x)
            repeats = layer.num_channels // layer.num_groups
            return mean.repeat_interleave(repeats), var.repeat_interleave(repeats)
        case torch.nn.RMSNorm():
            check_rows("rms_norm", x, tuple(layer.normalized_shape), None, None, 0.0)
            rows = moments(x, range(-len(layer.normalized_shape), 0))
            square = (rows.var() + rows.mean.square()).flatten()
            return _agreed(layer, torch.zeros_like(square), square, x)
        case torch.nn.LayerNorm():
            last = x.movedim(1, -1) if isinstance(layer, ChannelsFirst) else x
            check_rows("layer_norm", last, tuple(layer.normalized_shape), None, None, 0.0)
            rows = moments(last, range(-len(layer.normalized_shape), 0))
            return _agreed(layer, rows.mean.flatten(), rows.var().flatten(), x)
    raise TypeError(
        "restore_identity_ knows BatchNorm, InstanceNorm, GroupNorm, LayerNorm and RMSNorm, got "
        f"{type(layer).__name__}"
    )


def _agreed(layer: nn.Module, mean: Tensor, var: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The statistics that all examples (dim 0) have in common."""
    if mean.shape[0] == 0:
        raise ValueError(_nothing_in(x))
    if not (mean.isfinite() & var.isfinite()).all():
        raise ValueError(_why_not_finite(layer, x, mean, var, x.dtype))
    std = var.sqrt()
    # Moments that differ by no more than the input's own rounding are one: a few units in its last place.
    close = 8 * torch.finfo(x.dtype).eps * (mean.abs().amax(0) + std.amax(0))
    spread = torch.maximum(mean.amax(0) - mean.amin(0), std.amax(0) - std.amin(0))
    if not (spread <= close).all():
        raise ValueError(
            f"one weight and bias can restore examples of one mean and spread only, and the {mean.shape[0]} "
            f"sets of values that {type(layer).__name__} normalizes here range over means "
            f"{mean.min().item():.4g} to {mean.max().item():.4g} and standard deviations "
            f"{std.min().item():.4g} to {std.max().item():.4g}; give it a single one"
        )
    return mean[0], var[0]


def _nothing_in(x: Tensor) -> str:
    return f"there is no example in an input of shape {tuple(x.shape)}; give it one"


def _why_not_finite(layer: nn.Module, x: Tensor, mean: Tensor, var: Tensor, dtype: torch.dtype) -> str:
    """Where the first number comes from that would make a weight or a bias inf or NaN."""
    name = type(layer).__name__
    if mean is getattr(layer, "running_mean", None):
        bad = (~(mean.isfinite() & var.isfinite() & (var >= 0))).nonzero().flatten().tolist()
        if bad:
            return (
                "the running statistics must be finite and the variances not negative; in channels "
                f"{bad[:8]} of this {name} they are not: recalibrate them"
            )
    elif not (finite := x.isfinite()).all():
        where = (~finite).nonzero()[0].tolist()
        return (
            f"the input must be finite, got {x[tuple(where)].item()} at {where}: weight and bias made of it "
            f"would be too, and this {name} with them"
        )
    return (
        f"means up to {mean.abs().max().item():.4g} and variances up to {var.max().item():.4g} leave "
        f"{dtype}, in which this {name} would have to hold their weight and bias; scale the input down"
    )
