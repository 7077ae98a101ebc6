"""Expectations under a normal distribution, right at kinks and jumps."""

import functools
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
# So many open panels whose errors don't shrink are noise (a float32 activation).
_NOISY_PANELS = 512
# Past this many it is a divergence that is being resolved.
_MOST_PANELS = 1 << 15
_MOST_BISECTIONS = 60
# The error at which the result is refused; half precision inside φ leaves 1e-5, its own and no worse.
_TOLERANCE, _NOISY_TOLERANCE = 1e-7, 1e-4


def expect(
    function: Callable[[Tensor], Tensor],
    mean: float,
    std: float,
    label: str,
    *,
    breaks: Tensor | None = None,
) -> Tensor:
    """E[f(z)] for z ~ N(mean, std²) and a function f with several values.

    Gauss–Hermite rules assume a polynomial and converge slowly at kinks (ReLU: 1e-3 at 30 points). Here
    the line is cut into panels; a panel whose ten-point Gauss–Legendre rule disagrees with the sum over
    its halves is cut again, so that the panels close in on kinks and jumps wherever they lie.

    Args:
        function: (n,) float64 points → (k, n) values.
        mean: mean of z.
        std: standard deviation of z, positive.
        label: what to call the function in messages.
        breaks: points z where f or its slope is known to jump: panels that end there need not close in.

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
        return gauss(lambda t: _finite(function(mean + std * t), mean + std * t, label), low, high)

    low, high = _panels(mean, std, breaks)
    return settle(integrate, low, high, f"{label} under N({mean:g}, {std:g}²)")


def settle(
    integrate: Callable[[Tensor, Tensor], Tensor],
    low: Tensor,
    high: Tensor,
    what: str,
    *,
    panel_tolerance: float = _PANEL_TOLERANCE,
) -> Tensor:
    """The sum of a rule over panels, each cut in two until the rule agrees with the sum over its halves.

    Args:
        integrate: (n,) lower and upper ends → (k, n) integrals over the panels.
        low: (n,) lower ends.
        high: (n,) upper ends.
        what: what to call the sum in messages.
        panel_tolerance: what a panel may be off, relative to the sum of the panels' sizes.

    Returns:
        (k,) sums.

    Raises:
        ValueError: the sum does not settle.

    Example:
        >>> ends = torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64)
        >>> settle(lambda a, b: ((b**2 - a**2) / 2)[None], ends[:-1], ends[1:], "∫ t dt")
        tensor([2.], dtype=torch.float64)

    References:
        Gander & Gautschi 2000, Adaptive quadrature revisited.
    """
    rough = integrate(low, high)
    total = torch.zeros_like(rough[:, 0])
    # An odd function's panels cancel: errors are judged against the sum of their sizes.
    error, size = torch.zeros_like(total), torch.zeros_like(total)
    before, noise = torch.full_like(rough, math.inf), False
    for _ in range(_MOST_BISECTIONS):
        middle = (low + high) / 2
        left, right = integrate(low, middle), integrate(middle, high)
        fine = left + right
        gap = (fine - rough).abs()
        scale = size + fine.abs().sum(-1)
        open_ = (gap > panel_tolerance * scale[:, None]).any(0)
        count = int(open_.sum())
        if (noise := is_noise(gap[:, open_], before)) or count > _MOST_PANELS:
            break
        total, error = total + fine[:, ~open_].sum(-1), error + gap[:, ~open_].sum(-1)
        size = size + fine[:, ~open_].abs().sum(-1)
        low, high = torch.cat([low[open_], middle[open_]]), torch.cat([middle[open_], high[open_]])
        rough = torch.cat([left[:, open_], right[:, open_]], dim=-1)
        gap = before = gap[:, open_]
        if not len(low):
            return total
    total, size = total + rough.sum(-1), size + rough.abs().sum(-1)
    # Noise of many panels is independent; what is left of a pole is not.
    error = error + (gap.square().sum(-1).sqrt() if noise else gap.sum(-1))
    if bool((error > (_NOISY_TOLERANCE if noise else _TOLERANCE) * size).any()):
        raise ValueError(
            f"the expectation of {what} must be finite, but the sum is still "
            f"off by {error.max().item():.1g} of {total.abs().max().item():.3g} after {_MOST_BISECTIONS} "
            f"bisections; has it a pole?"
        )
    return total


def is_noise(gaps: Tensor, before: Tensor) -> bool:
    """Whether many panels are off by as much in all as when they were half as many.

    A cut divides a smooth function's error by thousands, a kink's by four and a jump's by two, the last
    two in one panel. Noise is off by the same in all however finely it is cut.

    Args:
        gaps: (k, n) what the open panels are off by.
        before: (k, m) the same one cut earlier.

    Returns:
        True if it is noise.

    Raises:
        Nothing.

    Example:
        >>> is_noise(torch.ones(1, 1024), torch.full((1, 512), 2.0))
        True

    References:
        None.
    """
    return gaps.shape[-1] > _NOISY_PANELS and bool((gaps.sum(-1) > 0.5 * before.sum(-1)).any())


def gauss(function: Callable[[Tensor], Tensor], low: Tensor, high: Tensor, *, flat: bool = False) -> Tensor:
    """(k, panels): ∫ f(t) e^(−t²/2)/√(2π) dt, or flat ∫ f(t) dt, over each panel."""
    nodes, weights = _rule()
    half = (high - low) / 2
    t = (low + half)[:, None] + half[:, None] * nodes
    density = torch.ones_like(t) if flat else torch.exp(-t.square() / 2) / math.sqrt(2 * math.pi)
    return (function(t.flatten()).view(-1, *t.shape) * density * weights).sum(-1) * half


@functools.cache
def _rule() -> tuple[Tensor, Tensor]:
    nodes, weights = np.polynomial.legendre.leggauss(_POINTS)
    return torch.from_numpy(nodes), torch.from_numpy(weights)


def _panels(mean: float, std: float, breaks: Tensor | None) -> tuple[Tensor, Tensor]:
    core = torch.arange(-_CORE, _CORE + _CORE_WIDTH / 2, _CORE_WIDTH, dtype=torch.float64, device="cpu")
    tail = torch.linspace(
        _CORE, _EDGE, round((_EDGE - _CORE) / _TAIL_WIDTH) + 1, dtype=torch.float64, device="cpu"
    )[1:]
    # Activations bend where z is of order 1. Under a wide density that is a needle no rule would see:
    # panels that halve towards z = 0, down to 1/16, lead to it.
    halvings = torch.arange(1, max(1, math.ceil(math.log2(std)) + 4), dtype=torch.float64, device="cpu")
    ladder = std * torch.exp2(-halvings)
    bends = (torch.cat([-ladder, torch.zeros(1, dtype=torch.float64, device="cpu"), ladder]) - mean) / std
    if breaks is not None:
        bends = torch.cat([bends, (breaks - mean) / std])
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
