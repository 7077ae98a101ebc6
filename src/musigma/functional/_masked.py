"""Statistics of some of the values only: what a mask keeps enters them, and all are normalized by them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from musigma.functional._parameters import compute_dtype
from musigma.ops import affine
from musigma.statistics import Moments, moments


def check_mask(x: Tensor, mask: Tensor) -> None:
    """The mask broadcasts to x."""
    fits = mask.dim() <= x.dim() and all(
        m in (1, s) for m, s in zip(reversed(mask.shape), reversed(x.shape), strict=False)
    )
    if not fits:
        raise ValueError(
            f"the mask must broadcast to the input: {tuple(mask.shape)} against {tuple(x.shape)}; padding of "
            "(n, c, length) input is masked by (n, 1, length)"
        )


def normalized_rows(x: Tensor, mask: Tensor, rows: tuple[int, ...], eps: float, *, center: bool) -> Tensor:
    """x̂ in x's shape and `compute_dtype`, by what the mask keeps of each row.

    Args:
        x: any shape that ``reshape(*rows, -1)`` makes rows of.
        mask: broadcastable to x.
        rows: the shape of the rows; they are what is left of each reshaped.
        eps: added to the variance.
        center: whether the mean is subtracted (RMSNorm's is not).
    """
    count = math.prod(rows)
    shape = (1, count, x.numel() // max(1, count))
    flat = mask.expand(x.shape).reshape(shape)
    mean, var = _usable(moments(x.reshape(shape[1:]), -1, mask=flat[0]), center)
    values = x.to(compute_dtype(x)).reshape(shape)
    return affine(values, mean, var, None, None, eps, None, None, flat).reshape(x.shape)


def normalized_groups(
    x: Tensor,
    mask: Tensor,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    activation: str | None,
) -> tuple[Tensor, Moments]:
    """y of a GroupNorm, and the moments (n, groups) of what the mask keeps of each group.

    Every channel of every example is a channel of one affine, which so takes weight, bias and activation in.
    """
    examples, channels = x.shape[:2]
    full = mask.expand(x.shape)
    shape = (examples, groups, x.numel() // max(1, examples * groups))
    kept = moments(x.reshape(shape), -1, mask=full.reshape(shape))
    mean, var = (s.repeat_interleave(channels // groups, -1).flatten() for s in _usable(kept, center=True))
    shape = (1, examples * channels, math.prod(x.shape[2:]))
    weight, bias = (v if v is None else v.repeat(examples) for v in (weight, bias))
    y = affine(x.reshape(shape), mean, var, weight, bias, eps, None, activation, full.reshape(shape))
    return y.reshape(x.shape), kept


def _usable(kept: Moments, center: bool) -> tuple[Tensor, Tensor]:
    """Mean and variance to normalize by.

    A set of which nothing is kept has no statistics: it is only scaled, by 1/√(1 + eps). (A NaN that is
    chosen against still reaches the gradients, so none is made.)
    """
    full = kept.count > 0
    mean, var = kept.mean, Moments(torch.where(full, kept.count, 1.0), kept.mean, kept.m2).var()
    if not center:
        mean, var = torch.zeros_like(mean), var + mean.square()
    return mean, torch.where(full, var, 1.0)
