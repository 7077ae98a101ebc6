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
    is off by 5e-9 in the variance at a mean of 10⁸ standard deviations). M2 is kept as its root, since the
    squares of float64 numbers below 1e-154 or above 1e154 are none.

    Args:
        high, low: the two parts of the pivot, (features,); 0 where nothing has been seen.
        count: the total weight of the values, (features,).
        mean: the mean of x − pivot, (features,).
        root: √M2, (features,).
        terms: how many values entered, (features,), int64.
        positions: how many values were offered, missing ones included.
        resolution: eps of the coarsest floating type seen; 0 for integers, which are exact.
    """

    high: Tensor
    low: Tensor
    count: Tensor
    mean: Tensor
    root: Tensor
    terms: Tensor
    positions: int
    resolution: float

    @classmethod
    def empty(cls, features: int) -> Tally:
        """Nothing seen yet: the identity of merging."""
        zero = torch.zeros(features, dtype=torch.float64)
        return cls(zero, zero, zero, zero, zero, torch.zeros(features, dtype=torch.int64), 0, 0.0)

    def __add__(self, other: Tally) -> Tally:
        """Both sets together, around self's pivots (other's where self has seen nothing)."""
        mine = self.count > 0
        high, low = torch.where(mine, self.high, other.high), torch.where(mine, self.low, other.low)
        parts = (self, other)
        means = [part._mean_around(high, low) for part in parts]
        unit = _power_of_two(torch.stack([self.root, other.root, *means]).abs().amax(0))
        merged = Moments.merge(
            Moments(part.count, mean / unit, (part.root / unit).square())
            for part, mean in zip(parts, means, strict=True)
        )
        return Tally(
            high,
            low,
            merged.count,
            merged.mean * unit,
            merged.m2.sqrt() * unit,
            self.terms + other.terms,
            self.positions + other.positions,
            max(self.resolution, other.resolution),
        )

    def _mean_around(self, high: Tensor, low: Tensor) -> Tensor:
        moved = self.mean + ((self.high - high) + (self.low - low))
        return torch.where(self.count > 0, moved, 0.0)

    def std(self) -> Tensor:
        """√(M2 / count), NaN where nothing has been seen."""
        return self.root / torch.where(self.count > 0, self.count, torch.nan).sqrt()

    def center(self) -> tuple[Tensor, Tensor]:
        """The mean as two float64 numbers, the first its rounded value; NaN where nothing has been seen."""
        rest = self.low + self.mean
        mean = self.high + rest
        # two-sum (Knuth): what rounding `mean` lost
        back = mean - self.high
        tail = (self.high - (mean - back)) + (rest - back)
        seen = self.count > 0
        return torch.where(seen, mean, torch.nan), torch.where(seen, tail, 0.0)

    def constant(self) -> Tensor:
        """Which features can't be told from a constant: σ² ≤ n·ε·σ² + (min(n, BLOCK)·ε·mean)² + (½ ulp)².

        * n·ε·σ² bounds the error of our sum of n squares (Higham 2002, section 4.2).
        * The column itself was computed in float64 before we saw it, and a constant that is the sum of up to
          n rounded terms is off by up to n·ε·mean (the term of scikit-learn's PR #19788, whose verdict it
          keeps). Our deviations are free of that error, so n is capped: uncapped, 10⁹ honest values with a
          mean of 10⁷ standard deviations would count as constant.
        * A constant stored in a type with spacing ulp lands on at most two neighbouring numbers, so its
          standard deviation is at most ½ ulp, whatever the share of either.

        Integers are exact: only equal ones are constant. No term is an absolute threshold.
        """
        if self.resolution == 0:
            return (self.root == 0) & (self.count > 0)
        terms = self.terms.to(torch.float64)
        mean = (self.high + (self.low + self.mean)).abs()
        half_ulp = self.resolution / 2 * _power_of_two(mean)
        computed = terms.clamp(max=BLOCK) * EPS * mean
        return self.std() * (1 - terms * EPS).clamp(min=0).sqrt() <= torch.hypot(computed, half_ulp)


def tally(x: Tensor, weight: Tensor | None) -> Tally:
    """The tally of one block.

    Args:
        x: (values, features), any real type. NaN is missing.
        weight: (values, features), boolean or float64, all at least 0; what has weight 0 is not looked at.

    Raises:
        OverflowError: two values of a feature are further apart than float64 reaches. Its only argument is
            the tensor of such features.
    """
    features = x.shape[1]
    positions = x.numel() if weight is None else int((weight != 0).sum())
    if positions == 0:
        return Tally.empty(features)
    floating = x.is_floating_point()
    if floating and (missing := x.isnan()).any():
        weight = ~missing if weight is None else weight * ~missing
    wide = x.dtype in (torch.int64, torch.uint64)
    high, low = split_integers(x) if wide else (x.to(torch.float64), x.new_zeros((), dtype=torch.float64))
    pivot, pivot_low = (_first(part, weight) for part in (high, low.expand_as(high)))
    m, unit = _moments((high - pivot) + (low - pivot_low), weight)
    bad = ~(m.mean.isfinite() & m.m2.isfinite())
    if bad.any():
        raise OverflowError(bad.cpu())
    terms = torch.full_like(pivot, len(x)) if weight is None else (weight != 0).sum(0)
    seen = terms > 0
    return Tally(
        high=torch.where(seen, pivot, 0.0).cpu(),
        low=torch.where(seen, pivot_low, 0.0).cpu(),
        count=m.count.expand_as(pivot).cpu(),
        mean=(m.mean * unit).cpu(),
        root=(m.m2.sqrt() * unit).cpu(),
        terms=terms.to("cpu", torch.int64),
        positions=positions,
        resolution=torch.finfo(x.dtype).eps if floating else 0.0,
    )


def _moments(deviations: Tensor, weight: Tensor | None) -> tuple[Moments, Tensor]:
    """Moments of deviations / unit, the unit a power of two per feature: 1 unless squares leave float64."""
    m = moments(deviations, 0, mask=weight)
    # 2^-900: M2 loses nothing to squares that vanish below 2^-1074, for fewer than 2^120 of them
    safe = m.m2.isfinite() & (m.m2 > 2.0**-900)
    if safe.all():
        return m, torch.ones_like(m.m2)
    kept = deviations if weight is None else torch.where(weight != 0, deviations, 0.0)
    unit = torch.where(safe, 1.0, _power_of_two(kept.abs().amax(0)))
    return moments(deviations / unit, 0, mask=weight), unit


def _power_of_two(x: Tensor) -> Tensor:
    """The largest power of two that is at most |x|; 1 for 0."""
    return torch.where(x == 0, 1.0, torch.exp2(torch.frexp(x).exponent.to(torch.float64) - 1))


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
