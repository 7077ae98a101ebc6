"""Entries so far out that the law of all others can't have drawn them."""

import math
from dataclasses import dataclass
from statistics import NormalDist

import torch

from musigma.init.auditing._facts import Facts
from musigma.init.auditing._interval import critical_z

_QUARTILE = NormalDist().inv_cdf(0.75)
# A normal tensor exceeds the bound that is made for this rate once in a million.
_RATE = 1e-6
# Training gives heavy tails without a gap; here nothing lies between the bulk and a third of the farthest.
_GAP = 3.0


@dataclass(frozen=True)
class Outliers:
    """Entries beyond a gap.

    Attributes:
        count: how many.
        sigma: standard deviation of all others, by their quartiles.
        limit: in these, what none of them should exceed.
        farthest: in these, how far the farthest is out.

    Example:
        >>> Outliers(1, 0.02, 7.0, 100.0).farthest
        100.0
    """

    count: int
    sigma: float
    limit: float
    farthest: float


def outliers_of(facts: Facts) -> Outliers | None:
    """The outliers of a tensor whose bulk is normal.

    Args:
        facts: the tensor.

    Returns:
        What was found; None if all entries belong together.

    Example:
        >>> from torch import nn
        >>> from musigma.init.auditing._facts import read
        >>> outliers_of(read(nn.Linear(64, 64))[0][0]) is None
        True

    References:
        pytorch/pytorch#155588.
    """
    x = facts.sample
    middle, quarter = float(x[len(x) // 2]), len(x) // 4
    sigma = float(x[-quarter - 1] - x[quarter]) / (2 * _QUARTILE)
    # The quartiles of a hundred entries are off by 12 % each: half on top is four of these errors.
    limit = (1.5 if len(x) < 1000 else 1.1) * critical_z(_RATE, facts.count)
    farthest = max(facts.high - middle, middle - facts.low)
    if not sigma > 0 or farthest < _GAP * limit * sigma or not _bulk_is_normal(facts, middle, sigma):
        return None
    off = (facts.values.double() - middle).abs()
    beyond = off > limit * sigma
    if bool((beyond & (off < farthest / _GAP)).any()):
        return None
    return Outliers(int(beyond.sum()), sigma, limit, farthest / sigma)


def _bulk_is_normal(facts: Facts, middle: float, sigma: float) -> bool:
    x = facts.sample
    inner = x[(x - middle).abs() <= 5 * sigma]
    steps = torch.arange(1, len(inner) + 1, dtype=torch.float64) / len(inner)
    distance = float((torch.special.ndtr((inner - middle) / sigma) - steps).abs().max())
    # Middle and quartiles are taken from the sample: their errors add to that of the distribution.
    return len(inner) > 0.98 * len(x) and distance < 2 * math.sqrt(math.log(2 / _RATE) / (2 * len(inner)))
