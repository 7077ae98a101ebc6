"""Statistics of a batch on their way to the running ones: where they come from and how they are taken in."""

from __future__ import annotations

import torch
from torch import Tensor

from musigma.functional._parameters import compute_dtype
from musigma.ops import leaves_home, running_arithmetic_, running_update_, transforms_active

__all__ = ["Statistics", "from_torch", "landing", "transforms_active", "update"]

Statistics = tuple[Tensor, Tensor, Tensor]
"""count, mean and M2 of a batch, per channel."""


def landing(x: Tensor) -> tuple[Tensor, Tensor]:
    """Two fresh running statistics for torch's kernel to leave its own in.

    Given momentum 1 it writes the batch's mean and unbiased variance there and nothing of what they held.
    So the kernel never touches the layer's buffers: what reaches those is decided in one place, `update`.
    """
    channels, dtype = x.shape[1], compute_dtype(x)
    return x.new_zeros(channels, dtype=dtype), x.new_zeros(channels, dtype=dtype)


def from_torch(mean: Tensor, unbiased_var: Tensor, count: int) -> Statistics:
    """What torch's kernel left behind, as (count, mean, M2) in float64, which adds no rounding of its own."""
    dtype = torch.float32 if mean.device.type == "mps" else torch.float64
    m2 = unbiased_var.to(dtype) * (count - 1)
    return torch.full((), count, dtype=dtype, device=mean.device), mean.to(dtype), m2


def update(
    running_mean: Tensor,
    running_var: Tensor,
    num_batches_tracked: Tensor | None,
    batch: Statistics,
    momentum: float | None,
) -> None:
    """Take a batch's statistics into the running ones, in place; an exported program needs no op of ours."""
    count, mean, m2 = (t.detach() for t in batch)
    op = running_arithmetic_ if leaves_home() else running_update_
    op(running_mean, running_var, num_batches_tracked, count, mean, m2, momentum)
