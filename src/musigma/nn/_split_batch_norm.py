"""BatchNorm over parts of the batch: ghost batches, and auxiliary norms for parts of another kind."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from musigma.nn._batch_norm import BatchNorm1d, BatchNorm2d, BatchNorm3d, _BatchNorm


class _Split(_BatchNorm):
    num_splits: int
    auxiliary: nn.ModuleList | None

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
        num_splits: int = 2,
        auxiliary: bool = False,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype, bias=bias)
        self._split(num_splits, auxiliary)

    def _split(self, num_splits: int, auxiliary: bool) -> None:
        """Take the number of parts, and a copy of the norm as it is for each part but the first."""
        if num_splits < 2:
            raise ValueError(f"num_splits must be at least 2, got {num_splits}; one part is a BatchNorm")
        copies = [_plain_copy(self) for _ in range(num_splits - 1)] if auxiliary else []
        self.num_splits = num_splits
        self.auxiliary = nn.ModuleList(copies) if auxiliary else None

    def forward(
        self,
        input: Tensor,
        *,
        mask: Tensor | None = None,
        add: Tensor | None = None,
        activation: str | None = None,
    ) -> Tensor:
        if not self.training:
            return super().forward(input, mask=mask, add=add, activation=activation)
        n = input.shape[0]
        if n < self.num_splits:
            raise ValueError(
                f"a batch in {self.num_splits} parts must have as many examples at least, got {n}; take "
                "larger batches"
            )
        parts = [_parts(t, n, self.num_splits) for t in (input, mask, add)]
        before = [(buffer, buffer.clone()) for buffer in self.buffers()]
        outputs = []
        try:
            for number, (x, kept, added) in enumerate(zip(*parts, strict=True)):
                assert x is not None
                norm = super().forward
                if number and self.auxiliary is not None:
                    norm = self.auxiliary[number - 1]
                outputs.append(norm(x, mask=kept, add=added, activation=activation))
        except ValueError:  # of a part with one value, when the parts before it were taken in
            for buffer, value in before:
                buffer.copy_(value)
            raise
        return torch.cat(outputs)

    forward.__doc__ = _BatchNorm.forward.__doc__

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, num_splits={self.num_splits}, auxiliary={self.auxiliary is not None}"


def _parts(t: Tensor | None, n: int, num_splits: int) -> list[Tensor | None]:
    """A tensor's parts along the batch; what is for the whole batch, or nothing, is for every part."""
    if t is None or t.dim() == 0 or t.shape[0] != n:
        return [t] * num_splits
    return list(t.tensor_split(num_splits))


def _plain_copy(norm: _Split) -> nn.Module:
    kind = next(k for k in (BatchNorm1d, BatchNorm2d, BatchNorm3d) if isinstance(norm, k))
    plain = kind(
        0, norm.eps, norm.momentum, norm.affine, norm.track_running_stats, bias=norm.bias is not None
    )
    plain.num_features = norm.num_features
    for name, parameter in norm._parameters.items():
        plain._parameters[name] = copy.deepcopy(parameter)
    for name, buffer in norm._buffers.items():
        plain.register_buffer(name, copy.deepcopy(buffer))
    return plain.train(norm.training)


class SplitBatchNorm1d(_Split, BatchNorm1d):
    """BatchNorm that, in training, takes the statistics of parts of the batch, each for itself.

        y = cat(BN(x₁), …, BN(x_k)),   x = cat(x₁, …, x_k) along the batch

    Without `auxiliary` all parts share one norm, and the running statistics take in one part after the
    other: *ghost batches*, the noise of a small batch in a large one. With it the first part goes through
    this norm and part i through a norm of its own, ``auxiliary[i − 2]``, with its own statistics, weight and
    bias: for batches whose parts come from different distributions, such as clean and adversarial images. In
    evaluation everything goes through this norm.

    Args:
        num_features, eps, momentum, affine, track_running_stats, device, dtype, bias: as in `BatchNorm1d`.
        num_splits: k; parts differ by one example where k does not divide the batch.
        auxiliary: whether parts after the first have norms of their own.

    Raises:
        ValueError: fewer than two parts. In the forward: fewer examples than parts.

    Example:
        >>> import torch, musigma as ms
        >>> norm = ms.nn.SplitBatchNorm1d(1, affine=False, num_splits=2)
        >>> norm(torch.tensor([[0.0], [2.0], [10.0], [30.0]])).flatten()
        tensor([-1.0000,  1.0000, -1.0000,  1.0000])

    References:
        Hoffer, Hubara & Soudry 2017, "Train longer, generalize better", on ghost batches; Xie et al. 2020,
        "Adversarial examples improve image recognition", on auxiliary norms.
    """


class SplitBatchNorm2d(_Split, BatchNorm2d):
    """`SplitBatchNorm1d` for (n, c, height, width)."""


class SplitBatchNorm3d(_Split, BatchNorm3d):
    """`SplitBatchNorm1d` for (n, c, depth, height, width)."""
