"""Statistics of some of the values only: what a mask keeps enters them, and all are normalized by them."""

from __future__ import annotations

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


def normalized_rows(
    x: Tensor, mask: Tensor, rows: tuple[int, ...], eps: float, *, center: bool = True
) -> tuple[Tensor, Moments]:
    """x̂ in x's shape and `compute_dtype`, and the moments of what the mask keeps of each row.

    Args:
        x: any shape that ``reshape(*rows, -1)`` makes rows of.
        mask: broadcastable to x.
        rows: the shape of the rows; they are what is left of each reshaped.
        eps: added to the variance.
        center: whether the mean is subtracted (RMSNorm's is not).
    """
    width = x.numel() // max(1, torch.Size(rows).numel())
    flat = mask.expand(x.shape).reshape(*rows, width)
    kept = moments(x.reshape(*rows, width), -1, mask=flat)
    # A row of which nothing is kept has no statistics: it is only scaled, by 1/√(1 + eps). (A NaN that is
    # chosen against still reaches the gradients, so none is made.)
    full = kept.count > 0
    mean, var = kept.mean, Moments(torch.where(full, kept.count, 1.0), kept.mean, kept.m2).var()
    if not center:
        mean, var = torch.zeros_like(mean), var + mean.square()
    var = torch.where(full, var, 1.0)
    values, flat = x.to(compute_dtype(x)).reshape(1, -1, width), flat.reshape(1, -1, width)
    y = affine(values, mean.flatten(), var.flatten(), None, None, eps, None, None, flat)
    return y.reshape(x.shape), kept
