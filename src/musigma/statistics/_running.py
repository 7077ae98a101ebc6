"""Running averages of moments, under either convention for momentum."""

from __future__ import annotations

import torch
from torch import Tensor

from musigma import ops
from musigma.statistics._moments import Moments


class Running:
    """A running mean and variance, as BatchNorm keeps them for test time.

        running ← (1 − momentum) · running + momentum · batch          (torch's convention)

    `momentum` is the weight of the *new* value, 0.1 unless told otherwise. Keras and Flax, and the lecture
    notes this library grew from, write the other convention,

        running ← momentum · running + (1 − momentum) · batch

    with 0.9 or 0.99. The notes then call 0.1 typical, which is torch's number in the other formula: taken
    together they would forget nine tenths of the past at every step. `Running.from_keep(0.9)` takes the other
    convention by name, and equals `Running(momentum=0.1)`.

    The mean starts at 0 and the variance at 1, as torch's buffers do; `momentum=None` is the cumulative
    average, in which the start has no weight. The variance taken in is the unbiased one, M2/(n − 1), while
    layers normalize by the biased one. A batch of no values changes nothing; a set whose batch statistics are
    not finite keeps what it had.

    Args:
        momentum: the weight of the new value, from 0 to 1, or None for the cumulative average.

    Raises:
        ValueError: momentum is outside [0, 1].

    Example:
        >>> import torch, musigma as ms
        >>> running = ms.Running(momentum=0.1)
        >>> running.update(ms.moments(torch.tensor([1.0, 2.0, 3.0, 6.0]), dim=0))
        >>> round(running.mean.item(), 4), round(running.var.item(), 4)
        (0.3, 1.3667)

    References:
        Ioffe & Szegedy 2015, algorithm 2; torch.nn.BatchNorm1d.
    """

    def __init__(self, momentum: float | None = 0.1) -> None:
        if momentum is not None and not 0.0 <= momentum <= 1.0:
            raise ValueError(
                f"momentum is the weight of the new value and lies in [0, 1]; got {momentum}. "
                "From the other convention: Running.from_keep"
            )
        self.momentum = momentum
        self._mean: Tensor | None = None
        self._var: Tensor | None = None
        self._tracked: Tensor | None = None

    @classmethod
    def from_keep(cls, keep: float) -> Running:
        """A running average by the weight of the *old* value, Keras' and Flax's `momentum`.

        Args:
            keep: the weight of the old value, from 0 to 1; 0.99 is their default, and 0.9 torch's 0.1.

        Raises:
            ValueError: keep is outside [0, 1].
        """
        if not 0.0 <= keep <= 1.0:
            raise ValueError(f"keep is the weight of the old value and lies in [0, 1]; got {keep}")
        return cls(momentum=1.0 - keep)

    @property
    def mean(self) -> Tensor:
        """The running mean, in the accumulator type."""
        return self._started()[0]

    @property
    def var(self) -> Tensor:
        """The running (unbiased) variance, in the accumulator type."""
        return self._started()[1]

    def update(self, moments: Moments) -> None:
        """Take in the moments of one batch.

        Raises:
            ValueError: the shape differs from that of earlier batches.
        """
        batch = moments.detach()
        if self._mean is None:
            self._mean, self._var = torch.zeros_like(batch.mean), torch.ones_like(batch.mean)
            self._tracked = torch.zeros((), dtype=torch.long, device=batch.mean.device)
        elif self._mean.shape != batch.mean.shape:
            raise ValueError(
                f"every batch must have the shape of the first, {tuple(self._mean.shape)}; "
                f"got {tuple(batch.mean.shape)}"
            )
        ops.running_update_(
            self._mean, self._var, self._tracked, batch.count, batch.mean, batch.m2, self.momentum
        )

    def _started(self) -> tuple[Tensor, Tensor]:
        if self._mean is None or self._var is None:
            raise RuntimeError("nothing has been taken in yet; call update(moments) first")
        return self._mean, self._var

    def __repr__(self) -> str:
        tracked = 0 if self._tracked is None else int(self._tracked)
        return f"Running(momentum={self.momentum}, num_batches_tracked={tracked})"
