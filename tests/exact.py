"""What the norms compute, with every gradient, in extended precision; and errors in the promise's own units.

numpy's long double has 11 more bits than float64 (on x86). A value of each set is subtracted first, which is
exact where it matters, so a mean of a million times the spread costs none of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.longdouble]
EXTENDED = bool(np.finfo(np.longdouble).eps < 1e-18)
"""Whether long double is wide enough to judge float64."""


def exact(t: Tensor) -> Array:
    """The same values, in long double."""
    return t.detach().double().numpy().astype(np.longdouble)


def _erf(x: Array) -> Array:
    return np.vectorize(math.erf, otypes=[np.longdouble])(x)


def _tanh_argument(x: Array) -> tuple[Array, Array]:
    k = np.sqrt(np.longdouble(2) / np.pi)
    return np.tanh(k * (x + 0.044715 * x**3)), k * (1 + 3 * 0.044715 * x**2)


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def _gelu_slope(x: Array) -> Array:
    return (1 + _erf(x / np.sqrt(np.longdouble(2)))) / 2 + x * np.exp(-(x**2) / 2) / np.sqrt(2 * np.pi)


def _gelu_tanh_slope(x: Array) -> Array:
    t, inner = _tanh_argument(x)
    return (1 + t) / 2 + x / 2 * (1 - t**2) * inner


ACTIVATIONS: dict[str | None, tuple[Callable[[Array], Array], Callable[[Array], Array]]] = {
    None: (lambda x: x, np.ones_like),
    "relu": (lambda x: np.maximum(x, 0), lambda x: (x > 0).astype(np.longdouble)),
    "silu": (lambda x: x * _sigmoid(x), lambda x: _sigmoid(x) * (1 + x * (1 - _sigmoid(x)))),
    "gelu": (lambda x: x / 2 * (1 + _erf(x / np.sqrt(np.longdouble(2)))), _gelu_slope),
    "gelu_tanh": (lambda x: x / 2 * (1 + _tanh_argument(x)[0]), _gelu_tanh_slope),
}
"""Name to value and slope."""


@dataclass(frozen=True)
class Sets:
    """How a tensor falls into sets of statistics, and how its parameters lie along it.

    Args:
        shape: the tensor's shape, as seen by the two below (groups have a dim of their own).
        over: the dims that statistics are taken over.
        parameter: weight's and bias's shape, broadcastable to `shape`.
    """

    shape: tuple[int, ...]
    over: tuple[int, ...]
    parameter: tuple[int, ...]

    @staticmethod
    def rows(shape: tuple[int, ...], n_dims: int) -> Sets:
        lead = len(shape) - n_dims
        return Sets(shape, tuple(range(lead, len(shape))), (*[1] * lead, *shape[lead:]))

    @staticmethod
    def channels(shape: tuple[int, ...]) -> Sets:
        return Sets(shape, (0, *range(2, len(shape))), (1, shape[1], *[1] * (len(shape) - 2)))

    @staticmethod
    def groups(shape: tuple[int, ...], groups: int) -> Sets:
        n, c, *positions = shape
        seen = (n, groups, c // groups, *positions)
        return Sets(seen, tuple(range(2, len(seen))), (1, groups, c // groups, *[1] * len(positions)))


@dataclass(frozen=True)
class Norm:
    """One normalization in exact arithmetic: y before and after the activation, and what backward needs."""

    sets: Sets
    normalized: Array
    rstd: Array
    weight: Array
    before: Array
    activation: str | None
    given: bool  # whether the statistics are constants

    @property
    def y(self) -> Array:
        return ACTIVATIONS[self.activation][0](self.before)

    @property
    def largest(self) -> Array:
        """The largest value of every set, before or after the bias, against which values may cancel."""
        values = np.maximum(np.abs(self.before), np.abs(self.normalized * self.weight))
        return values.max(self.sets.over, keepdims=True, initial=0)

    @staticmethod
    def of(
        x: Tensor,
        sets: Sets,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        *,
        center: bool = True,
        statistics: tuple[Tensor, Tensor] | None = None,
        add: Tensor | None = None,
        activation: str | None = None,
    ) -> Norm:
        """`statistics` are a mean and a variance to take instead of the sets' own."""
        values = exact(x).reshape(sets.shape)
        if statistics is not None:
            mean, var = (exact(s).reshape(sets.parameter) for s in statistics)
            d = values - mean
        else:
            first = values[tuple(slice(0, 1) if d in sets.over else slice(None) for d in range(values.ndim))]
            d = values - first if center else values
            if center:
                d = d - d.mean(sets.over, keepdims=True)
            var = (d * d).mean(sets.over, keepdims=True)
        rstd = 1 / np.sqrt(var + np.longdouble(eps))
        w = (
            np.ones(sets.parameter, np.longdouble)
            if weight is None
            else exact(weight).reshape(sets.parameter)
        )
        before = d * rstd * w
        if bias is not None:
            before = before + exact(bias).reshape(sets.parameter)
        if add is not None:
            before = before + exact(add).reshape(sets.shape)
        return Norm(sets, d * rstd, rstd, w, before, activation, statistics is not None)

    def backward(self, dy: Tensor, *, center: bool = True) -> dict[str, tuple[Array, Array]]:
        """Each gradient, and the scale its error is measured by: dx, dweight, dbias, dadd."""
        over, upstream = self.sets.over, exact(dy).reshape(self.sets.shape)
        grad = upstream * ACTIVATIONS[self.activation][1](self.before)
        g = grad * self.weight
        dx = g * self.rstd
        if not self.given:
            mean = g.mean(over, keepdims=True) if center else 0
            dx = self.rstd * (g - mean - self.normalized * (g * self.normalized).mean(over, keepdims=True))
        largest = np.abs(upstream * self.weight).max(initial=0)
        along = tuple(i for i, n in enumerate(self.sets.parameter) if n == 1)
        found = {"dx": (dx, self.rstd * largest), "dadd": (grad, np.abs(upstream).max(initial=0))}
        # √rows · rms of the terms = √(Σ terms²). An activation's slope has an error of its own where it is 0,
        # so terms are measured by what comes in from above, with the slope as 1.
        for name, factor in (("dweight", self.normalized), ("dbias", np.ones_like(grad))):
            total, terms = (grad * factor).sum(along, keepdims=True), upstream * factor
            scale = np.maximum(np.sqrt((terms * terms).sum(along, keepdims=True)), np.abs(total))
            # Few rows may all lie near their mean in one column, whose error is then that of the mean: it is
            # held to what is typical.
            found[name] = total, np.maximum(scale, scale.mean())
        return found


def units_off(got: Tensor, want: Array, scale: Array) -> float:
    """The largest error over its scale, in units in the last place of got's type (0 of nothing)."""
    if not want.size:
        return 0.0
    info: Any = torch.finfo(got.dtype)
    # Below the smallest normal number the unit no longer shrinks.
    unit = np.maximum(scale * info.eps, np.longdouble(info.smallest_normal) * info.eps)
    error = np.abs(exact(got).reshape(want.shape) - want)
    return float((error / unit).max())
