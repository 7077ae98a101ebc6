"""Count, mean and M2: the triple that can be merged, and everything that is read off it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Bool, Real, Shaped
from torch import Tensor

from musigma import ops
from musigma.statistics._ranks import merged


@dataclass(frozen=True, eq=False)
class Moments:
    """The number of values in a set, their mean, and M2, the sum of squared deviations from that mean.

    Two triples merge exactly as if their sets had been one (Chan, Golub & LeVeque):

        δ = mean₂ − mean₁,   mean = mean₁ + δ · n₂/n,   M2 = M2₁ + M2₂ + δ² · n₁·n₂/n,   n = n₁ + n₂

    so the same object serves a batch, a data set read in pieces, the ranks of a job, a mask, and a running
    average. Many sets are kept at once, one per element of `mean`. The empty set is (0, 0, 0): merging it
    changes nothing, and its variance is NaN.

    Args:
        count: the number (with weights: the total weight) of each set; the shape of `mean`, or 0-dim.
        mean: the mean of each set, float64 (float32 on a device without float64).
        m2: the sum of squared deviations, in units of x², the shape of `mean`.

    Example:
        >>> import torch, musigma as ms
        >>> m = ms.moments(torch.tensor([1.0, 2.0, 3.0]), dim=0)
        >>> m.mean.item(), round(m.var().item(), 4), round(m.var(correction=1).item(), 4)
        (2.0, 0.6667, 1.0)

    References:
        Chan, Golub & LeVeque 1983, "Algorithms for computing the sample variance", eq. 2.1.
    """

    count: Tensor
    mean: Tensor
    m2: Tensor

    def __post_init__(self) -> None:
        if self.mean.shape != self.m2.shape or self.count.shape not in ((), self.mean.shape):
            raise ValueError(
                "mean and m2 must have one shape, and count the same or none; got count "
                f"{tuple(self.count.shape)}, mean {tuple(self.mean.shape)}, m2 {tuple(self.m2.shape)}"
            )

    def var(self, correction: float = 0) -> Tensor:
        """M2 / (count − correction): biased by default (1/n), unbiased with correction 1.

        Args:
            correction: what is taken off the count (Bessel's 1, or 0).

        Returns:
            the variance, in units of x²; NaN where the count does not exceed the correction.
        """
        freedom = self.count - correction
        return self.m2 / torch.where(freedom > 0, freedom, torch.nan)

    def std(self, correction: float = 0) -> Tensor:
        """√var, in units of x."""
        return self.var(correction).sqrt()

    def rstd(self, eps: float = 0.0) -> Tensor:
        """1/√(var + eps), with the biased variance: what a normalization layer multiplies by."""
        return (self.var() + eps).rsqrt()

    def __add__(self, other: Moments) -> Moments:
        """The moments of both sets together."""
        if not isinstance(other, Moments):
            return NotImplemented
        if self.mean.shape != other.mean.shape:
            raise ValueError(
                "only moments of the same sets can be merged: their shapes are "
                f"{tuple(self.mean.shape)} and {tuple(other.mean.shape)}"
            )
        count = self.count + other.count
        # 0/0 for two empty sets: their share is 0, and the empty set comes out.
        share = other.count / torch.where(count > 0, count, 1.0)
        delta = other.mean - self.mean
        return Moments(
            count, self.mean + delta * share, self.m2 + other.m2 + delta.square() * self.count * share
        )

    @classmethod
    def merge(cls, parts: Iterable[Moments]) -> Moments:
        """The moments of all parts together, merged in the order given.

        Args:
            parts: at least one triple, all of one shape; read once, one at a time.

        Returns:
            their moments; the same order gives the same bits.

        Raises:
            ValueError: no parts.
        """
        parts = iter(parts)
        start = next(parts, None)
        if start is None:
            raise ValueError("merging needs at least one part; got none")
        return reduce(cls.__add__, parts, start)

    def all_reduce(self, group: dist.ProcessGroup | None = None) -> Moments:
        """The moments of all ranks' sets together, on every rank; differentiable.

        M2 does not add up over ranks (17.8 where 522 is right, for two sets at ±5), so the triples are
        gathered and merged in rank order: every rank gets the same bits, whatever the counts, zero included.
        Without an initialized process group this is the identity.

        Every rank has to make the call. On the CPU, ranks that don't meet in it get an error that says where
        each of them is, at once where they have met in different calls, else when the group's timeout ends.

        Args:
            group: the process group; the default one if None.

        Returns:
            the merged moments, on every rank.

        Raises:
            RuntimeError: the ranks make different calls, or one of them does not come or has left.
        """
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) == 1:
            return self
        count = self.count.expand_as(self.mean).to(self.mean.dtype)
        return Moments(*merged((count, self.mean, self.m2), _merge, group))

    def detach(self) -> Moments:
        """The same numbers, outside autograd."""
        return Moments(self.count.detach(), self.mean.detach(), self.m2.detach())

    def to(self, *args: Any, **kwargs: Any) -> Moments:
        """The three tensors through ``Tensor.to``."""
        return Moments(*(t.to(*args, **kwargs) for t in (self.count, self.mean, self.m2)))


def _merge(triples: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    every = Moments.merge(Moments(*triple) for triple in triples)
    return every.count, every.mean, every.m2


def moments(
    x: Shaped[Tensor, "*shape"],
    dim: int | Sequence[int] | None = None,
    *,
    mask: Bool[Tensor, "..."] | Real[Tensor, "..."] | None = None,
    keepdim: bool = False,
) -> Moments:
    """Count, mean and M2 of x over `dim`, exact for any scale and offset that float64 can hold.

        mean = Σ w·x / Σ w,   M2 = Σ w·(x − mean)²

    with w the mask (1 without one). Two passes around a value of the set, in float64: no E[x²] − E[x]², no
    overflow of integers or half types, and a set of equal values has M2 exactly 0.

    Args:
        x: any shape; floating point, integer or boolean.
        dim: the dims to reduce, all of them for None.
        mask: boolean (True keeps) or non-negative weights, broadcastable to x. What it drops may be NaN.
        keepdim: keep the reduced dims with size 1.

    Returns:
        `Moments` over the remaining dims; gradients flow through `mean` and `m2`.

    Raises:
        TypeError: x is complex, or it or the mask is no tensor.
        IndexError: a dim does not exist.
        ValueError: a dim stands twice, a weight is negative, infinite or NaN, or the mask does not broadcast.

    Example:
        >>> import torch, musigma as ms
        >>> x = torch.tensor([[1.0, 2.0], [3.0, float("nan")]])
        >>> m = ms.moments(x, dim=0, mask=~x.isnan())
        >>> m.count.tolist(), m.mean.tolist(), m.m2.tolist()
        ([2.0, 1.0], [2.0, 2.0], [2.0, 0.0])

    References:
        Chan, Golub & LeVeque 1983, "Algorithms for computing the sample variance".
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"moments are of a tensor, got {type(x).__name__}; make it one: torch.as_tensor(x)")
    if mask is not None and not isinstance(mask, Tensor):
        raise TypeError(
            f"the mask must be a tensor, got {type(mask).__name__}; make it one: torch.as_tensor(mask)"
        )
    dims = list(range(x.dim())) if dim is None else [dim] if isinstance(dim, int) else list(dim)
    if x.is_quantized:
        raise TypeError("moments are of numbers, got a quantized tensor; dequantize it first")
    if mask is not None and mask.dtype is not torch.bool:
        _require_weights(mask)
    count, mean, m2 = ops.moments(x, dims, mask)
    if keepdim:
        gone = {d % x.dim() for d in dims}
        shape = [1 if d in gone else s for d, s in enumerate(x.shape)]
        count = count if mask is None else count.reshape(shape)
        mean, m2 = mean.reshape(shape), m2.reshape(shape)
    return Moments(count, mean, m2)


def _require_weights(mask: Tensor) -> None:
    if torch.compiler.is_compiling() or mask.is_meta or torch._C._are_functorch_transforms_active():
        return  # a value that can't be looked at here
    bad = ~((mask >= 0) & mask.isfinite())
    if bad.any():
        where = bad.nonzero()[0].tolist()
        raise ValueError(
            f"weights must be finite and not negative or NaN; got {mask[tuple(where)].item()} at {where}"
        )
