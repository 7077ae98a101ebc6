"""Expectations of a product over two correlated normals."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from musigma.init.meanfield._quadrature import gauss, settle

# Beyond 9 standard deviations lie 1e-18 of the mass: less than the sums resolve.
_EDGE = 9.0
# z₁ = a·u + b·v with both u and v at the edge, and a² + b² = var.
REACH = math.sqrt(2) * _EDGE
_PANELS = 9
_OUTER_TOLERANCE = 1e-10
_AT_ONCE = 64


def expect_product(
    function: Callable[[Tensor], Tensor], edges: Tensor, var: float, c: float, label: str
) -> float:
    """E[φ(z₁)φ(z₂)] for z₁, z₂ ~ N(0, var) with correlation c.

    With u, v independent, z = a·u ± b·v, a² = var(1+c)/2, b² = var(1−c)/2. The factor that varies less
    goes outside: over the other the kinks are smoothed away.

    Args:
        function: φ, (n,) float64 points → (n,) values.
        edges: φ's `partition` for this variance and `REACH`.
        var: variance of both.
        c: their correlation, −1 to 1.
        label: what to call φ in messages.

    Returns:
        The expectation, to about nine digits of E[φ²].

    Raises:
        ValueError: the sum does not settle.

    Example:
        >>> ends = torch.linspace(-13.0, 13.0, 53, dtype=torch.float64)
        >>> product = expect_product(torch.relu, ends, 1.0, 0.0, "relu")
        >>> round(product * 2 * math.pi, 8)      # E[φ]² = 1/(2π)
        1.0

    References:
        Poole et al. 2016, eq. 5.
    """
    along, across = math.sqrt(var * (1 + c) / 2), math.sqrt(var * (1 - c) / 2)
    sign = 1.0
    if along < across:  # z₂ = −(across·v − along·u): the roles change, and z₂'s sign
        along, across, sign = across, along, -1.0

    def given(v: Tensor) -> Tensor:
        some = (across * v).split(_AT_ONCE)
        return torch.cat([_given(function, edges, along, shifts, sign) for shifts in some])[None]

    if across == 0.0:
        return given(torch.zeros(1, dtype=torch.float64, device="cpu")).item()
    # With the same sign v and −v only swap z₁ and z₂.
    start, count = (0.0, _PANELS) if sign > 0 else (-_EDGE, 2 * _PANELS)
    ends = torch.linspace(start, _EDGE, count + 1, dtype=torch.float64, device="cpu")
    total = settle(
        lambda low, high: gauss(given, low, high),
        ends[:-1],
        ends[1:],
        f"the product of two {label} of correlation {c:g}",
        panel_tolerance=_OUTER_TOLERANCE,
    ).item()
    return 2 * total if sign > 0 else total


def _given(
    function: Callable[[Tensor], Tensor], edges: Tensor, std: float, shifts: Tensor, sign: float
) -> Tensor:
    """(n,): E[φ(std·u + shift)·φ(sign·(std·u − shift))] for each shift."""
    shift = shifts[:, None]
    ends = torch.cat([edges - shift, sign * edges + shift], dim=1) / std
    ends = ends.clamp(-_EDGE, _EDGE).sort(dim=1).values  # (n, panels + 1)
    low, high = ends[:, :-1].flatten(), ends[:, 1:].flatten()
    real = high > low
    row = torch.arange(len(shifts), device="cpu")[:, None].expand(-1, ends.shape[1] - 1).flatten()[real]

    def product(t: Tensor) -> Tensor:
        z, s = std * t, shifts[row].repeat_interleave(len(t) // len(row))
        return (function(z + s) * function(sign * (z - s)))[None]

    panels = gauss(product, low[real], high[real])[0]
    return torch.zeros(len(shifts), dtype=torch.float64, device="cpu").index_add_(0, row, panels)
