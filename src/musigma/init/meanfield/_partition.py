"""Where a function has to be cut for Gauss–Legendre rules to be exact on the pieces."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from musigma.init.meanfield._quadrature import gauss, is_noise

# A piece that is off by less, relative to the whole, is not cut further.
_TOLERANCE = 1e-13
# At a jump pieces shrink to this width, times the scale, and a sum over them is off by as much.
_FINEST = 2.0**-40
# A rule over a narrow piece is off by rounding, 1e-16 of the values there, or by a share of a jump.
_JUMP = 1e-10
# Kinks are looked for this far out; panels are a quarter wide near 0, where activations bend.
_NEAR, _FAR = 16.0, 1024.0
# More pieces of the finest width than this are no kinks but noise.
_MOST_BREAKS = 64


def partition(function: Callable[[Tensor], Tensor], var: float, reach: float) -> Tensor:
    """Ends of panels on each of which φ under N(0, var) is a polynomial for ten-point rules.

    Args:
        function: φ, (n,) float64 points → (n,) values.
        var: variance of the pre-activation.
        reach: how many standard deviations the panels cover on either side.

    Returns:
        (n,) increasing ends, closing in on kinks and jumps.

    Raises:
        Nothing.

    Example:
        >>> ends = partition(lambda z: (z > 0.3).double(), 1.0, 13.0)
        >>> bool((ends - 0.3).abs().min() < 1e-11)
        True

    References:
        None.
    """
    std = math.sqrt(var)
    core = torch.linspace(-reach, reach, 8 * math.ceil(reach) + 1, dtype=torch.float64, device="cpu")
    # Where activations bend, z of order 1, may be a needle in a wide density: halvings lead to it.
    ladder = reach * torch.exp2(-torch.arange(1.0, 10.0, dtype=torch.float64, device="cpu"))
    edges = torch.cat([core, ladder, -ladder]).unique()

    def rule(low: Tensor, high: Tensor) -> Tensor:
        return gauss(lambda t: function(std * t)[None], low, high)

    allowed = _TOLERANCE * rule(edges[:-1], edges[1:]).abs().sum().clamp_min(1e-300)
    return std * _refine(rule, edges, lambda width, sum_: allowed)


def breaks(pair: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Tensor:
    """Points within ±1024 where φ or φ' jumps, to 1e-11.

    Args:
        pair: (n,) float64 points → φ and φ' there.

    Returns:
        (n,) increasing points; none if there are so many that it must be noise.

    Raises:
        Nothing.

    Example:
        >>> breaks(lambda z: (z.clamp(-1, 2), ((z > -1) & (z < 2)).double())).round(decimals=9)
        tensor([-1.,  2.], dtype=torch.float64)

    References:
        None.
    """
    # A kink at an end would need no cut and stay unseen: none is likely to sit at these.
    near = torch.arange(-_NEAR, _NEAR + 0.125, 0.25, dtype=torch.float64, device="cpu") + 1 / 7
    far = torch.exp2(torch.arange(5.0, 10.5, 0.5, dtype=torch.float64, device="cpu"))
    edges = torch.cat([-far, near, far]).unique()

    def both(z: Tensor) -> Tensor:
        return torch.nan_to_num(torch.stack(pair(z)), 0.0, 0.0, 0.0)

    typical = both(near).abs().amax(-1, keepdim=True).clamp_min(1e-300)

    def allowed(width: Tensor, sum_: Tensor) -> Tensor:
        return _JUMP * (sum_.abs() + 1e-3 * width * typical)

    fine = _refine(lambda low, high: gauss(both, low, high, flat=True), edges, allowed)
    narrow = (fine[1:] - fine[:-1]) < 4 * _FINEST * fine[1:].abs().clamp_min(1.0)
    found = ((fine[1:] + fine[:-1]) / 2)[narrow]
    if not len(found):
        return found
    first = torch.cat([torch.ones(1, dtype=torch.bool, device="cpu"), found[1:] - found[:-1] > 1e-9])
    found = found[first]
    return found if len(found) <= _MOST_BREAKS else found[:0]


def _refine(
    rule: Callable[[Tensor, Tensor], Tensor], edges: Tensor, allowed: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """The edges, and the middles of all pieces on which the rule and the sum over halves disagree.

    `allowed` says by how much they may, given a piece's width and the sum.
    """
    low, high, kept = edges[:-1], edges[1:], [edges]
    rough = rule(low, high)
    before = torch.full_like(rough, math.inf)
    while len(low):
        middle = (low + high) / 2
        left, right = rule(low, middle), rule(middle, high)
        gap = (left + right - rough).abs()
        finest = _FINEST * torch.maximum(low.abs(), high.abs()).clamp_min(1.0)
        cut = (gap > allowed(high - low, left + right)).any(0) & (high - low > finest)
        if is_noise(gap[:, cut], before):
            break
        before = gap[:, cut]
        kept.append(middle[cut])
        low, high = torch.cat([low[cut], middle[cut]]), torch.cat([middle[cut], high[cut]])
        rough = torch.cat([left[:, cut], right[:, cut]], dim=-1)
    return torch.cat(kept).unique()
