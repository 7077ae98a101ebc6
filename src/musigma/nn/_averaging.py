"""Averaged copies of a model that has counters among its buffers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Average = Callable[[list[Tensor], list[Tensor], Tensor | int], None]


def ema_multi_avg_fn(decay: float = 0.999) -> Average:
    """What ``torch.optim.swa_utils.AveragedModel`` averages with: an EMA of floats, a copy of integers.

        average ← decay · average + (1 − decay) · value          (floating point)
        average ← value                                           (num_batches_tracked and its like)

    torch's own ``get_ema_multi_avg_fn`` rounds the average of a counter back down at every step, so that with
    ``use_buffers=True`` num_batches_tracked stays at 1.

    Args:
        decay: the weight of the average so far.

    Returns:
        a function for ``AveragedModel(model, multi_avg_fn=..., use_buffers=True)``.

    Raises:
        ValueError: the decay is not in [0, 1].

    Example:
        >>> import torch, musigma as ms
        >>> net = ms.nn.BatchNorm1d(3)
        >>> average = torch.optim.swa_utils.AveragedModel(
        ...     net, multi_avg_fn=ms.nn.ema_multi_avg_fn(0.9), use_buffers=True
        ... )
        >>> for _ in range(10):
        ...     _ = net(torch.randn(16, 3))
        ...     average.update_parameters(net)
        >>> average.module.num_batches_tracked
        tensor(10)

    References:
        Polyak & Juditsky 1992, "Acceleration of stochastic approximation by averaging".
    """
    if not 0.0 <= decay <= 1.0:
        raise ValueError(f"decay must be in [0, 1], the weight of the average so far; got {decay}")

    @torch.no_grad()
    def update(averages: list[Tensor], values: list[Tensor], num_averaged: Tensor | int) -> None:
        if averages[0].is_floating_point() or averages[0].is_complex():
            torch._foreach_lerp_(averages, values, 1 - decay)
        else:
            torch._foreach_copy_(averages, values)

    return update
