"""A signal as a plan sees it: what one unit holds, drawn many times over.

Mean-field theory says that the outputs of a wide layer are normal with zero mean, and independent from
unit to unit; all that is to be known is their covariance between places and examples. Between two such
layers anything may happen to a unit: an activation, a product with another unit, a skip connection. So a
signal is kept as draws: an elementwise op is the op itself, on the draws, and a weight layer replaces
them by normal ones of the covariance that it makes. Moments of any order, also of sums of dependent
signals, come out right without a formula for each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

HERE, PLACE, EXAMPLE = range(3)
"""Rows of a signal: a unit at a place of an example, at another place, at that place of another example."""

_ROWS: Final = 3


@dataclass(frozen=True)
class Signal:
    """Draws of what a unit holds.

    Attributes:
        values: (3, n) float64; the same unit at one place, at another place, in another example.
        measured: what of it was measured on the example, and why; empty if theory gave it.
        share: for a softmax's output, E[Σ p²] over what it averages: 1 over the effective number of places.
        cross: for a softmax's output, E[Σ p p'] of two places.
        drift: (n,) by how much the first row changes if all layers before, being of finite width, miss
            their variance by one standard deviation; None for not at all.
    """

    values: Tensor
    measured: str = ""
    share: float = 0.0
    cross: float = 0.0
    drift: Tensor | None = None

    @property
    def mean(self) -> float:
        """E[x]."""
        return float(self.values[HERE].mean())

    @property
    def second(self) -> float:
        """E[x²]."""
        return float(self.values[HERE].square().mean())

    @property
    def covariance(self) -> Tensor:
        """(3, 3) second moments E[xᵢxⱼ] between places and examples."""
        return second_moments(self.values)

    @property
    def log_drift(self) -> float:
        """By how much log E[x²] changes with the drift."""
        if self.drift is None:
            return 0.0
        return 2 * float((self.values[HERE] * self.drift).mean()) / max(self.second, 1e-300)

    def like(self, values: Tensor, drift: Tensor | None = None) -> Signal:
        """The same history with other values, whose size drifts in proportion if nothing else is said."""
        if drift is None and self.drift is not None:
            drift = values[HERE] * (self.log_drift / 2)
        return replace(self, values=values, share=0.0, cross=0.0, drift=drift)

    def noise(self, examples: float, places: float) -> float:
        """The variance of the mean of x² over examples and places, relative, for one unit."""
        x = self.values.square()
        x = x - x[HERE].mean()
        c = (x[HERE] * x).mean(-1)
        here, place, example = c.clamp_min(0.0).tolist()
        share, inside = 1 / max(examples, 1.0), 1 / max(places, 1.0)
        mean = share * (inside * here + (1 - inside) * place) + (1 - share) * example
        return mean / max(self.second**2, 1e-300)


class Draws:
    """Where the draws of signals come from: the same for the same key.

    Args:
        count: draws per signal.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        # Midpoints of equal shares: the moments of one draw are those of the normal law to 1e-4, and its
        # second one exactly.
        share = (torch.arange(count, dtype=torch.float64, device="cpu") + 0.5) / count
        normal = torch.special.ndtri(share)
        self._normal = normal / normal.square().mean().sqrt()
        self._uniform = share

    def generator(self, key: int) -> torch.Generator:
        """A generator of one key."""
        return torch.Generator("cpu").manual_seed(key)

    def normal(self, covariance: Tensor, key: int) -> Tensor:
        """(3, n) normal draws of zero mean and a given covariance, exact in the first row."""
        generator = self.generator(key)
        rows = torch.stack(
            [self._normal[torch.randperm(self.count, generator=generator)] for _ in range(_ROWS)]
        )
        # Written out: a matrix product of three rows would wake all threads.
        root = _root(covariance)
        first = root[0][0] * rows[0]
        second = root[1][0] * rows[0] + root[1][1] * rows[1]
        third = root[2][0] * rows[0] + root[2][1] * rows[1] + root[2][2] * rows[2]
        return torch.stack([first, second, third])

    def plain(self, second: float, key: int, correlation: float = 0.0) -> Tensor:
        """Normal draws of a given second moment, with one correlation between all rows."""
        eye = torch.eye(_ROWS, dtype=torch.float64, device="cpu")
        return self.normal(second * (eye + correlation * (1 - eye)), key)

    def angles(self, key: int) -> Tensor:
        """(3, n) angles, uniform over the circle, the same in all rows."""
        order = torch.randperm(self.count, generator=self.generator(key))
        return (2 * math.pi * self._uniform[order]).expand(_ROWS, -1)

    def shuffled(self, values: Tensor, key: int) -> Tensor:
        """Draws of other units of the same signal: rows stay together."""
        return values[:, torch.randperm(self.count, generator=self.generator(key))]

    def mixed(self, parts: list[Tensor], shares: list[float], key: int) -> Tensor:
        """Draws of which a share comes from each part."""
        bounds = torch.tensor(shares, dtype=torch.float64, device="cpu").cumsum(0)
        place = self._uniform[torch.randperm(self.count, generator=self.generator(key))]
        which = torch.searchsorted(bounds / bounds[-1], place).clamp(max=len(parts) - 1)
        return torch.stack(parts).gather(0, which.expand(1, _ROWS, -1)).squeeze(0)


def second_moments(values: Tensor) -> Tensor:
    """E[xᵢxⱼ] of every two rows."""
    return (values[:, None] * values[None]).mean(-1)


def _root(covariance: Tensor) -> list[list[float]]:
    """The lower triangular root of a covariance, also of a singular one."""
    a = covariance.tolist()
    root = [[0.0] * _ROWS for _ in range(_ROWS)]
    for i in range(_ROWS):
        for j in range(i + 1):
            rest = a[i][j] - sum(root[i][k] * root[j][k] for k in range(j))
            if i == j:
                root[i][i] = math.sqrt(max(rest, 0.0))
            else:
                # A row that is a combination of others has nothing of its own but rounding.
                root[i][j] = rest / root[j][j] if root[j][j] > 1e-7 * math.sqrt(max(a[j][j], 0.0)) else 0.0
    return root
