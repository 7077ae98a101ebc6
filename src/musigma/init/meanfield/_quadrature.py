"""Expectations under a normal distribution, right at kinks and jumps."""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

# exp(−t²/2) is below the smallest normal float64 beyond 37.6.
_EDGE = 37.0
# Where the density is; elsewhere the panels start five times as wide.
_CORE, _CORE_WIDTH, _TAIL_WIDTH = 8.0, 0.25, 1.25
_POINTS = 10
# What one panel may add to the relative error: a few hundred panels stay far below the goal of 1e-9.
_PANEL_TOLERANCE = 1e-13
# Past this many open panels it is noise (a float32 activation) or a divergence that is being resolved.
_MOST_PANELS = 1 << 15
_MOST_BISECTIONS = 60
# The error at which the result is refused.
_TOLERANCE = 1e-7


def expect(function: Callable[[Tensor], Tensor], mean: float, std: float, label: str) -> Tensor:
    """E[f(z)] for z ~ N(mean, std²) and a function f with several values.

    Gauss–Hermite rules assume a polynomial and converge slowly at kinks (ReLU: 1e-3 at 30 points). Here
    the line is cut into panels; a panel whose ten-point Gauss–Legendre rule disagrees with the sum over
    its halves is cut again, so that the panels close in on kinks and jumps wherever they lie.

    Args:
        function: (n,) float64 points → (k, n) values.
        mean: mean of z.
        std: standard deviation of z, positive.
        label: what to call the function in messages.

    Returns:
        (k,) expectations, to a relative error of about 1e-10 for piecewise smooth functions.

    Raises:
        ValueError: a value isn't finite, or the sum does not settle.

    Example:
        >>> expect(lambda z: z.square()[None], 0.0, 2.0, "square").round(decimals=9)
        tensor([4.], dtype=torch.float64)

    References:
        Gander & Gautschi 2000, Adaptive quadrature revisited.
    """

    def integrate(low: Tensor, high: Tensor) -> Tensor:
        return _gauss(lambda t: _finite(function(mean + std * t), mean + std * t, label), low, high)

    low, high = _panels(mean, std)
    rough = integrate(low, high)
    total = torch.zeros_like(rough[:, 0])
    # An odd function's panels cancel: errors are judged against the sum of their sizes.
    error, size = torch.zeros_like(total), torch.zeros_like(total)
    for _ in range(_MOST_BISECTIONS):
        middle = (low + high) / 2
        left, right = integrate(low, middle), integrate(middle, high)
        fine = left + right
        gap = (fine - rough).abs()
        scale = size + fine.abs().sum(-1)
        open_ = (gap > _PANEL_TOLERANCE * scale[:, None]).any(0)
        if int(open_.sum()) > _MOST_PANELS:
            break
        total, error = total + fine[:, ~open_].sum(-1), error + gap[:, ~open_].sum(-1)
        size = size + fine[:, ~open_].abs().sum(-1)
        low, high = torch.cat([low[open_], middle[open_]]), torch.cat([middle[open_], high[open_]])
        rough = torch.cat([left[:, open_], right[:, open_]], dim=-1)
        gap = gap[:, open_]
        if not len(low):
            return total
    total, error, size = total + rough.sum(-1), error + gap.sum(-1), size + rough.abs().sum(-1)
    if bool((error > _TOLERANCE * size).any()):
        raise ValueError(
            f"the expectation of {label} under N({mean:g}, {std:g}²) must be finite, but the sum is still "
            f"off by {error.max().item():.1g} of {total.abs().max().item():.3g} after {_MOST_BISECTIONS} "
            f"bisections; has it a pole?"
        )
    return total


def _gauss(function: Callable[[Tensor], Tensor], low: Tensor, high: Tensor) -> Tensor:
    """(k, panels): ∫ f(t) e^(−t²/2)/√(2π) dt over each panel, by one Gauss–Legendre rule."""
    nodes, weights = (torch.from_numpy(a) for a in np.polynomial.legendre.leggauss(_POINTS))
    half = (high - low) / 2
    t = (low + half)[:, None] + half[:, None] * nodes
    density = torch.exp(-t.square() / 2) / math.sqrt(2 * math.pi)
    return (function(t.flatten()).view(-1, *t.shape) * density * weights).sum(-1) * half


def _panels(mean: float, std: float) -> tuple[Tensor, Tensor]:
    core = torch.arange(-_CORE, _CORE + _CORE_WIDTH / 2, _CORE_WIDTH, dtype=torch.float64, device="cpu")
    tail = torch.linspace(
        _CORE, _EDGE, round((_EDGE - _CORE) / _TAIL_WIDTH) + 1, dtype=torch.float64, device="cpu"
    )[1:]
    # Activations bend where z is of order 1. Under a wide density that is a needle no rule would see:
    # panels that halve towards z = 0, down to 1/16, lead to it.
    halvings = torch.arange(1, max(1, math.ceil(math.log2(std)) + 4), dtype=torch.float64, device="cpu")
    ladder = std * torch.exp2(-halvings)
    bends = (torch.cat([-ladder, torch.zeros(1, dtype=torch.float64, device="cpu"), ladder]) - mean) / std
    edges = torch.cat([-tail.flip(0), core, tail, bends[bends.abs() < _EDGE]]).unique()
    return edges[:-1], edges[1:]


def _finite(values: Tensor, z: Tensor, label: str) -> Tensor:
    bad = ~torch.isfinite(values).all(0)
    if bool(bad.any()):
        at = z[bad]
        nearest = at[at.abs().argmin()].item()
        raise ValueError(
            f"{label} must be finite with a finite square everywhere, but is not at z = {nearest:g}; "
            f"limit its domain or its growth"
        )
    return values
