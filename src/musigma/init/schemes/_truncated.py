"""Normal numbers without the tails."""

import functools
import math

import numpy as np
import torch
from torch import Tensor

from musigma.init.schemes._draw import fill_by_quantile
from musigma.init.schemes._scheme import Law, Sample, Setting, scheme
from musigma.statistics import moments

# Φ(−37.5) is the smallest normal float64: no probability is left farther out.
_FARTHEST = 37.0
_SAMPLES = (
    Sample((60, 50)),
    Sample((100,)),
    Sample((8, 3, 5, 7), {"std": 0.02}),
    Sample((60, 50), {"std": 0.02, "low": -2.0, "high": 2.0, "bounds": "absolute"}),
    Sample((60, 50), {"std": 0.5, "low": -1.0, "high": 1.0, "bounds": "absolute"}),
    Sample((60, 50), {"std_of": "parent"}),
    Sample((60, 50), {"std": 3.0, "low": -1.0, "high": 2.0, "bounds": "absolute", "std_of": "parent"}),
    Sample((60, 50), {"mean": 1.0, "std": 0.3, "low": 0.5, "high": 3.0}),
    Sample((60, 50), {"low": 6.0, "high": math.inf}),
    Sample((60, 50), {"low": -math.inf, "high": math.inf}),
    Sample((4,), {"low": 1.0, "high": 1.0}, error=ValueError),
    Sample((4,), {"std": 0.0}, error=ValueError),
    Sample((4,), {"std": 1.0, "low": -1.0, "high": 1.0, "bounds": "absolute"}, error=ValueError),
    Sample((4,), {"low": 40.0, "high": 41.0}, error=ValueError),
    Sample((4,), {"bounds": "percent"}, error=ValueError),
    Sample((4,), {"std_of": "sample"}, error=ValueError),
)


@functools.lru_cache(maxsize=256)
def _standard_moments(low: float, high: float) -> tuple[float, float, float]:
    """Mean, std and kurtosis of N(0, 1) cut to [low, high]."""
    # The closed forms cancel in the tails and for narrow intervals; a rule over the part that carries
    # all but e^-50 of the mass does not, and 200 points integrate a Gaussian over 20 σ exactly.
    peak = min(max(0.0, low), high)
    reach = math.sqrt(peak**2 + 100.0)
    low, high = max(low, -reach), min(high, reach)
    nodes, weights = (torch.from_numpy(a) for a in np.polynomial.legendre.leggauss(200))
    t = (low + high) / 2 + (high - low) / 2 * nodes
    weights = weights * torch.exp((peak**2 - t.square()) / 2)
    m = moments(t, dim=0, mask=weights)
    fourth = moments(((t - m.mean) / m.std()) ** 4, dim=0, mask=weights).mean
    return m.mean.item(), m.std().item(), fourth.item()


@functools.lru_cache(maxsize=256)
def _parent_std(mean: float, std: float, low: float, high: float) -> float:
    """The σ for which N(mean, σ²) cut to [low, high] has the standard deviation asked for."""
    widest = (high - low) / math.sqrt(12)
    if not std < widest:
        raise ValueError(
            f"std ({std:g}) after truncation must be below that of the uniform distribution on "
            f"[{low:g}, {high:g}], {widest:g}; widen the bounds, or say std_of='parent'"
        )

    def realised(log_sigma: float) -> float:
        sigma = math.exp(log_sigma)
        return sigma * _standard_moments((low - mean) / sigma, (high - mean) / sigma)[1]

    # The realised std grows with σ from 0 to that of the uniform distribution. Bisection on the logarithm.
    below = above = math.log(std)
    while realised(above) < std and above < math.log(std) + 40:
        above += 1.0
    while realised(below) > std:
        below -= 1.0
    for _ in range(50):
        middle = (below + above) / 2
        below, above = (middle, above) if realised(middle) < std else (below, middle)
    return math.exp(above)


def _parent(mean: float, std: float, low: float, high: float, bounds: str, std_of: str) -> tuple[float, ...]:
    """Validated: σ of the parent normal, and the bounds in its σ and in the weight's own units."""
    if bounds not in ("sigmas", "absolute"):
        raise ValueError(f"bounds are counted in 'sigmas' or 'absolute', got {bounds!r}")
    if std_of not in ("realised", "parent"):
        raise ValueError(f"std_of must be 'realised' (after truncation) or 'parent' (before), got {std_of!r}")
    if not (low < high and 0 < std < math.inf and math.isfinite(mean)):
        raise ValueError(
            f"a truncated normal needs low < high, a finite mean and a positive std, got mean={mean}, "
            f"std={std}, low={low}, high={high}; a std of 0 is constant_"
        )
    if bounds == "sigmas":
        _require_reachable(low, high)
        sigma = std / _standard_moments(low, high)[1] if std_of == "realised" else std
        return sigma, low, high, mean + sigma * low, mean + sigma * high
    sigma = _parent_std(mean, std, low, high) if std_of == "realised" else std
    _require_reachable((low - mean) / sigma, (high - mean) / sigma)
    return sigma, (low - mean) / sigma, (high - mean) / sigma, low, high


def _require_reachable(low: float, high: float) -> None:
    if low > _FARTHEST or high < -_FARTHEST:
        raise ValueError(
            f"the interval must begin within {_FARTHEST:g} standard deviations of the mean, where a float64 "
            f"probability is not 0, but it is [{low:g}, {high:g}]; move the mean or the bounds"
        )


def _truncated_law(setting: Setting) -> Law:
    options = {k: v for k, v in setting.options.items() if k != "generator"}
    sigma, low, high, first, last = _parent(**options)
    mean, std, kurtosis = _standard_moments(low, high)
    return Law(options["mean"] + sigma * mean, (sigma * std) ** 2, kurtosis, first, last)


def _inside(low: float, high: float, dtype: torch.dtype) -> tuple[float, float]:
    """The least and the greatest number of a dtype strictly between two bounds."""
    first, last = torch.tensor([low, high], dtype=torch.float64, device="cpu").to(dtype)
    if first.item() <= low:
        first = torch.nextafter(first, torch.full_like(first, math.inf))
    if last.item() >= high:
        last = torch.nextafter(last, torch.full_like(last, -math.inf))
    if first > last:
        raise ValueError(f"{dtype} has no number strictly between {low!r} and {high!r}; widen the bounds")
    return first.item(), last.item()


@scheme(
    law=_truncated_law,
    formula="w ~ N(mean, σ²) given low < w < high, σ such that the std is right *after* the cut",
    source="JAX variance_scaling; Robert 1995",
    samples=_SAMPLES,
)
def truncated_normal_(
    w: Tensor,
    *,
    mean: float = 0.0,
    std: float = 1.0,
    low: float = -2.0,
    high: float = 2.0,
    bounds: str = "sigmas",
    std_of: str = "realised",
    generator: torch.Generator | None = None,
) -> Tensor:
    """Write normal numbers cut to an interval, with the standard deviation that was asked for.

    N(0, 1) cut at ±2 has a standard deviation of 0.8796 only. `std` is therefore by default that of the
    numbers written; `torch.nn.init.trunc_normal_` means that of the normal before the cut
    (`std_of="parent"`), and counts bounds in the weight's own units (`bounds="absolute"`), where ±2 at
    std 0.02 cuts nothing at all.

    No value lies on or outside a bound, in any dtype: what would round there is rounded inwards.

    Law: for N(mean, σ²) given low < w < high, α = (low−mean)/σ, β = (high−mean)/σ and Z = Φ(β)−Φ(α):
    mean + σ·(ϕ(α)−ϕ(β))/Z and Var = σ²·(1 + (αϕ(α)−βϕ(β))/Z − ((ϕ(α)−ϕ(β))/Z)²).

    Args:
        w: (*), any floating dtype; computed in float64, then rounded.
        mean: mean of the normal before the cut (and after, if the interval is symmetric about it).
        std: standard deviation, see `std_of`.
        low, high: the interval, see `bounds`; infinities are fine.
        bounds: "sigmas": in standard deviations of the parent normal, counted from the mean (JAX's
            ±2); "absolute": in the units of w (torch's a and b).
        std_of: "realised": `std` holds after truncation; "parent": before.
        generator: source of randomness; default: torch's own.

    Returns:
        w, written in place.

    Raises:
        ValueError: empty interval, std not positive, a realised std that the interval can't hold, an
            interval where a normal has no probability left, unknown `bounds` or `std_of`.

    Example:
        >>> import torch, musigma as ms
        >>> w = ms.init.truncated_normal_(torch.empty(10_000), std=0.02)
        >>> bool(w.abs().max() < 0.0455)                   # 2·0.02/0.8796
        True

    References:
        Robert 1995, Simulation of truncated normal variables; pytorch/pytorch#155588, #145498 (values
        on the bound in half precision); pytorch/torchtitan#2269.
    """
    sigma, alpha, beta, first, last = _parent(mean, std, low, high, bounds, std_of)
    least, greatest = _inside(first, last, w.dtype)
    # Probabilities near 1 have no digits left: work in the lower tail, where they are near 0.
    flip = alpha > 0
    # (torch.special.ndtr is 0 below −8.4; erfc is not.)
    below, above = (math.erfc(-z / math.sqrt(2)) / 2 for z in ((-beta, -alpha) if flip else (alpha, beta)))
    sign = -sigma if flip else sigma
    tiny, last_below_one = torch.finfo(torch.float64).tiny, 1 - 2.0**-53

    def quantile(u: Tensor) -> Tensor:
        p = (below + u * (above - below)).clamp(tiny, last_below_one)
        return (mean + sign * torch.special.ndtri(p)).clamp(least, greatest)

    fill_by_quantile(w, quantile, generator)
    return w
