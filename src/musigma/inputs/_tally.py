"""Moments around a pivot: what is added up over a data set, and when it says that a feature is constant."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from musigma.nn._standardize import split_integers
from musigma.statistics import Moments, moments

EPS = torch.finfo(torch.float64).eps
# What a formula that should give one value may be off by, in ε: each of its operations rounds by ½, so 16 of
# them. A feature that varies by no more takes some 16 values next to each other, and is noise or nearly so.
ROUNDINGS = 8


@dataclass(frozen=True, eq=False)
class Tally:
    """The moments of x − pivot, per feature, and what is needed to judge them.

    The pivot is a value of the data, held in two float64 parts so that a 64-bit integer fits. Deviations from
    it carry only their own rounding error, whatever the mean; a column of equal values has deviations, and so
    a variance, of exactly 0; and merging compares deviations instead of large means (a plain float64 merge
    is off by 5e-9 in the variance at a mean of 10⁸ standard deviations). Where squares would leave float64
    (deviations below 1e-120 or above 1e120), the unit is not 1 but a power of two.

    Args:
        high, low: the two parts of the pivot, (features,); 0 where nothing has been seen.
        unit: what deviations are counted in, (features,).
        moments: those of (x − pivot) / unit, (features,).
        terms: how many values entered, (features,), int64; the count of the moments is their total weight.
        positions: how many values were offered, missing ones included.
        resolution: eps of the coarsest floating type seen; 0 for integers, which are exact.
    """

    high: Tensor
    low: Tensor
    unit: Tensor
    moments: Moments
    terms: Tensor
    positions: int
    resolution: float

    @classmethod
    def empty(cls, features: int) -> Tally:
        """Nothing seen yet: the identity of merging."""
        # on the CPU like every tally, whatever the default device
        zero = torch.zeros(features, dtype=torch.float64, device="cpu")
        none = torch.zeros(features, dtype=torch.int64, device="cpu")
        return cls(zero, zero, torch.ones_like(zero), Moments(zero, zero, zero), none, 0, 0.0)

    def __add__(self, other: Tally) -> Tally:
        """Both sets together, around self's pivots (other's where self has seen nothing).

        Raises:
            OverflowError: two values of a feature are further apart than float64 reaches. Its only argument
                is the tensor of such features.
        """
        mine = self.moments.count > 0
        high, low = torch.where(mine, self.high, other.high), torch.where(mine, self.low, other.low)
        means = [part._mean_around(high, low) for part in (self, other)]
        spreads = [part.moments.m2.sqrt() * part.unit for part in (self, other)]
        unit = _unit(torch.stack([*means, *spreads]).abs().amax(0))
        merged = []
        for part, mean in zip((self, other), means, strict=True):
            ratio = torch.where(part.moments.m2 > 0, part.unit / unit, 0.0)
            merged.append(Moments(part.moments.count, mean / unit, part.moments.m2 * ratio.square()))
        total = Moments.merge(merged)
        _require_finite(total)
        return Tally(
            high,
            low,
            unit,
            total,
            self.terms + other.terms,
            self.positions + other.positions,
            max(self.resolution, other.resolution),
        )

    def _mean_around(self, high: Tensor, low: Tensor) -> Tensor:
        """The mean of x − (high + low); 0 where nothing has been seen."""
        moved = self.moments.mean * self.unit + ((self.high - high) + (self.low - low))
        return torch.where(self.moments.count > 0, moved, 0.0)

    def var(self) -> Tensor:
        """The biased variance, NaN where nothing has been seen."""
        return self.moments.var() * self.unit.square()

    def std(self) -> Tensor:
        """The biased standard deviation: right also where the variance leaves float64."""
        return self.moments.std() * self.unit

    def center(self) -> tuple[Tensor, Tensor]:
        """The mean as two float64 numbers, the first its rounded value; NaN where nothing has been seen."""
        rest = self.low + self.moments.mean * self.unit
        mean = self.high + rest
        # two-sum (Knuth): what rounding `mean` lost
        back = mean - self.high
        tail = (self.high - (mean - back)) + (rest - back)
        seen = self.moments.count > 0
        return torch.where(seen, mean, torch.nan), torch.where(seen, tail, 0.0)

    def constant(self) -> Tensor:
        """Which features can't be told from a constant: σ² ≤ n·ε·σ² + (ROUNDINGS·ε·mean)² + (½ ulp)².

        * n·ε·σ² bounds the error of our sum of n squares (Higham 2002, section 4.2).
        * A column of float64 was computed in it before we saw it, by a formula whose every operation is off
          by up to ½·ε·mean: 0.1, 0.3/3 and 1 − 0.9 are three numbers.
        * A constant stored in a type with spacing ulp lands on at most two neighbouring numbers, so its
          standard deviation is at most ½ ulp, whatever the share of either.

        None but the first, a part of σ² itself, grows with n: deviations from the pivot are exact, however
        large the mean. (A mean that is summed in float64 is off by up to n·ε·mean, and scikit-learn takes
        that for its bound: a million time stamps in milliseconds, 10¹² ± 100, are constant by it.)

        Integers are exact: only equal ones are constant. No term is an absolute threshold.
        """
        if self.resolution == 0:
            return (self.moments.m2 == 0) & (self.terms > 0)
        terms = self.terms.to(torch.float64)
        mean = self.center()[0].abs()
        half_ulp = self.resolution / 2 * _power_of_two(mean)
        computed = ROUNDINGS * EPS * mean
        return self.std() * (1 - terms * EPS).clamp(min=0).sqrt() <= torch.hypot(computed, half_ulp)


def tally(x: Tensor, weight: Tensor | None) -> Tally:
    """The tally of one block.

    Args:
        x: (values, features), any real type. NaN is missing.
        weight: (values, features), boolean or float64, all at least 0; what has weight 0 is not looked at.

    Raises:
        OverflowError: as in merging.
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
    _require_finite(m)
    terms = torch.full_like(pivot, len(x)) if weight is None else (weight != 0).sum(0)
    seen = terms > 0
    return Tally(
        high=torch.where(seen, pivot, 0.0).cpu(),
        low=torch.where(seen, pivot_low, 0.0).cpu(),
        unit=unit.cpu(),
        moments=Moments(m.count.expand_as(pivot), m.mean, m.m2).to("cpu"),
        terms=terms.to("cpu", torch.int64),
        positions=positions,
        resolution=torch.finfo(x.dtype).eps if floating else 0.0,
    )


def _require_finite(m: Moments) -> None:
    bad = ~(m.mean.isfinite() & m.m2.isfinite())
    if bad.any():
        raise OverflowError(bad.cpu())


def _moments(deviations: Tensor, weight: Tensor | None) -> tuple[Moments, Tensor]:
    """The moments of deviations / unit, and the unit."""
    m = moments(deviations, 0, mask=weight)
    # 2^-900: squares that vanish below 2^-1074 are no part of such an M2, for fewer than 2^120 of them
    safe = m.m2.isfinite() & (m.m2 > 2.0**-900)
    if safe.all():
        return m, torch.ones_like(m.m2)
    kept = deviations if weight is None else torch.where(weight != 0, deviations, 0.0)
    unit = _unit(kept.abs().amax(0))
    return moments(deviations / unit, 0, mask=weight), unit


def _unit(size: Tensor) -> Tensor:
    """A power of two to divide numbers of this size by before they are squared; 1 if none is needed."""
    usual = (size == 0) | ((size > 2.0**-400) & (size < 2.0**400))
    return torch.where(usual, 1.0, _power_of_two(size))


def _power_of_two(x: Tensor) -> Tensor:
    """The largest power of two that is at most |x|."""
    return torch.exp2(torch.frexp(x).exponent.to(torch.float64) - 1)


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
