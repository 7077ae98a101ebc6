"""Moments around a pivot: what is added up over a data set, and when it says that a feature is constant."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from musigma.nn._standardize import split_integers
from musigma.statistics import Moments, moments

EPS = torch.finfo(torch.float64).eps
# The longest plain sum: blocks of at most this many values a feature are added up, then merged.
BLOCK = 2**20


@dataclass(frozen=True, eq=False)
class Tally:
    """The moments of x − pivot, per feature, and what is needed to judge them.

    The pivot is a value of the data, held in two float64 parts so that a 64-bit integer fits. Deviations from
    it carry only their own rounding error, whatever the mean; a column of equal values has deviations, and so
    a variance, of exactly 0; and merging compares deviations instead of large means (a plain float64 merge
    is off by 5e-9 in the variance at a mean of 10⁸ standard deviations).

    Args:
        high, low: the two parts of the pivot, (features,); 0 where nothing has been seen.
        centered: the moments of x − pivot, (features,).
        terms: how many values entered, (features,), int64; the count of `centered` is their total weight.
        positions: how many values were offered, missing ones included.
        resolution: eps of the coarsest floating type seen; 0 for integers, which are exact.
    """

    high: Tensor
    low: Tensor
    centered: Moments
    terms: Tensor
    positions: int
    resolution: float

    @classmethod
    def empty(cls, features: int) -> Tally:
        """Nothing seen yet: the identity of merging."""
        zero = torch.zeros(features, dtype=torch.float64)
        return cls(zero, zero, Moments(zero, zero, zero), torch.zeros(features, dtype=torch.int64), 0, 0.0)

    def __add__(self, other: Tally) -> Tally:
        """Both sets together, around self's pivots (other's where self has seen nothing)."""
        mine = self.centered.count > 0
        high, low = torch.where(mine, self.high, other.high), torch.where(mine, self.low, other.low)
        return Tally(
            high,
            low,
            self._around(high, low) + other._around(high, low),
            self.terms + other.terms,
            self.positions + other.positions,
            max(self.resolution, other.resolution),
        )

    def _around(self, high: Tensor, low: Tensor) -> Moments:
        m = self.centered
        moved = m.mean + ((self.high - high) + (self.low - low))
        return Moments(m.count, torch.where(m.count > 0, moved, 0.0), m.m2)

    @property
    def moments(self) -> Moments:
        """Count, mean and M2 of the values themselves; the mean rounded to float64."""
        m = self.centered
        return Moments(m.count, self.high + (self.low + m.mean), m.m2)

    def center(self) -> tuple[Tensor, Tensor]:
        """The mean as two float64 numbers, the first its rounded value; NaN where nothing has been seen."""
        seen = self.centered.count > 0
        rest = self.low + self.centered.mean
        mean = self.high + rest
        # two-sum (Knuth): what rounding `mean` lost
        back = mean - self.high
        tail = (self.high - (mean - back)) + (rest - back)
        return torch.where(seen, mean, torch.nan), torch.where(seen, tail, 0.0)

    def constant(self) -> Tensor:
        """Which features can't be told from a constant: var ≤ n·ε·var + (min(n, BLOCK)·ε·mean)² + (½ ulp)².

        * n·ε·var bounds the relative error of our sum of n squares (Higham 2002, section 4.2).
        * The column itself was computed in float64 before we saw it, and a constant that is the sum of up to
          n rounded terms is off by up to n·ε·mean (the term of scikit-learn's PR #19788, whose verdict it
          keeps). Our deviations are free of that error, so n is capped: uncapped, 10⁹ honest values with a
          mean of 10⁷ standard deviations would count as constant.
        * A constant stored in a type with spacing ulp lands on at most two neighbouring numbers, so its
          standard deviation is at most ½ ulp, whatever the share of either.

        Integers are exact: only equal ones are constant. No term is an absolute threshold.
        """
        m = self.centered
        var = m.var()
        terms = self.terms.to(torch.float64)
        mean = (self.high + (self.low + m.mean)).abs()
        ulp = self.resolution * torch.exp2(torch.frexp(mean).exponent.to(torch.float64) - 1)
        computed = terms.clamp(max=BLOCK) * EPS * mean if self.resolution else torch.zeros_like(mean)
        return var <= terms * EPS * var + computed.square() + (ulp / 2).square()


def tally(x: Tensor, weight: Tensor | None) -> Tally:
    """The tally of one block.

    Args:
        x: (values, features), any real type. NaN is missing.
        weight: (values, features), boolean or float64, all at least 0; what has weight 0 is not looked at.

    Raises:
        OverflowError: the deviations of a feature, or their squares, overflow float64. Its only argument
            is the tensor of such features.
    """
    features = x.shape[1]
    keep = torch.ones((), dtype=torch.bool, device=x.device) if weight is None else weight != 0
    positions = x.numel() if weight is None else int(keep.sum())
    if positions == 0:
        return Tally.empty(features)
    if x.is_floating_point():
        present = keep & ~x.isnan()
        if weight is not None or not present.all():
            weight = present if weight is None or weight.dtype == torch.bool else weight * present
    if x.dtype in (torch.int64, torch.uint64):
        high, low = split_integers(x)
    else:
        high, low = x.to(torch.float64), None
    pivot, pivot_low = _first(high, weight), torch.zeros(features, dtype=torch.float64, device=x.device)
    deviations = high - pivot
    if low is not None:
        pivot_low = _first(low, weight)
        deviations = deviations + (low - pivot_low)
    m = moments(deviations, 0, mask=weight)
    terms = torch.full((), len(x), device=x.device) if weight is None else (weight != 0).sum(0)
    if not (m.mean.isfinite() & m.m2.isfinite()).all():
        raise OverflowError((~(m.mean.isfinite() & m.m2.isfinite())).cpu())
    empty = torch.zeros(features, dtype=torch.float64)
    count = m.count.cpu() + empty
    return Tally(
        torch.where(count > 0, pivot.cpu(), 0.0),
        torch.where(count > 0, pivot_low.cpu(), 0.0),
        Moments(count, m.mean.cpu(), m.m2.cpu()),
        terms.cpu() + torch.zeros(features, dtype=torch.int64),
        positions,
        torch.finfo(x.dtype).eps if x.is_floating_point() else 0.0,
    )


def _first(values: Tensor, weight: Tensor | None) -> Tensor:
    """The first value of each feature that takes part: (features,)."""
    if weight is None:
        return values[0]
    return values.gather(0, (weight != 0).to(torch.uint8).argmax(0, keepdim=True))[0]


def label(flat: int, shape: tuple[int, ...], columns: list[str] | None) -> str:
    """What a message calls one feature: its column's name, or its place along the axes kept."""
    if columns is not None:
        return f"column {columns[flat]!r}"
    if len(shape) <= 1:
        return f"feature {flat}"
    place = []
    for size in reversed(shape):
        flat, at = divmod(flat, size)
        place.append(at)
    return f"feature {tuple(reversed(place))}"


def labels(which: Tensor, shape: tuple[int, ...], columns: list[str] | None) -> str:
    """The features marked in `which`, the first five by name."""
    flat = which.reshape(-1).nonzero().reshape(-1).tolist()
    shown = ", ".join(label(i, shape, columns) for i in flat[:5])
    return shown if len(flat) <= 5 else f"{shown} and {len(flat) - 5} more"


def feature_count(shape: tuple[int, ...]) -> int:
    """The number of statistics for these kept sizes; 1 for none."""
    return math.prod(shape)
