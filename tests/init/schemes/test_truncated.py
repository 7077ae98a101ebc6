"""Truncated normals: no outliers, nothing on a bound, and the standard deviation that was asked for."""

from __future__ import annotations

import math

import pytest
import torch

from musigma.init import SCHEMES, truncated_normal_, variance_scaling_
from musigma.statistics import Moments, moments

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def seen(w: torch.Tensor) -> Moments:
    return moments(w.double(), None)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_far_bounds_in_absolute_units_make_no_outliers(dtype: torch.dtype) -> None:
    """C80: std 0.02 between ±2 gave 1000-sigma outliers and a spike at the lower bound."""
    w = truncated_normal_(
        torch.empty(2000, 1000, dtype=dtype),
        std=0.02,
        low=-2.0,
        high=2.0,
        bounds="absolute",
        generator=torch.Generator().manual_seed(0),
    )
    m = seen(w)
    assert abs(m.mean.item()) < 1e-4  # the case's own numbers, 7 standard errors
    assert m.std().item() == pytest.approx(0.02, rel=0.01)
    assert not (w.abs() == 2).any()
    # P(|z| > 6) = 2e-9: among 2 million draws 1 in 250.
    assert w.double().abs().max().item() / 0.02 < 6


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cut", [0.5, 1.0, 2.0, 3.0])
def test_nothing_on_or_past_a_bound_and_the_std_before_and_after(dtype: torch.dtype, cut: float) -> None:
    """C80: N(0, 1) cut at 2 has std 0.8796; std_of says which one is meant."""
    z = 2 * math.exp(-cut * cut / 2) / math.sqrt(2 * math.pi)
    shrink = math.sqrt(1 - cut * z / math.erf(cut / math.sqrt(2)))
    for std_of, expected in (("parent", shrink), ("realised", 1.0)):
        w = truncated_normal_(
            torch.empty(100_000, dtype=dtype),
            low=-cut,
            high=cut,
            std_of=std_of,
            generator=torch.Generator().manual_seed(1),
        )
        law = SCHEMES["truncated_normal"].law(
            (100_000,), options={"low": -cut, "high": cut, "std_of": std_of}
        )
        assert law.std == pytest.approx(expected, rel=1e-12)
        # In bfloat16 what rounds inwards at the bounds costs at most its spacing there, 2⁻⁸.
        error = 5 * expected * math.sqrt((law.kurtosis - 1) / 4 / 100_000) + torch.finfo(dtype).eps / 4
        assert seen(w).std().item() == pytest.approx(expected, abs=error)
        assert w.double().abs().max() < law.high
    assert shrink == pytest.approx(0.8796, abs=5e-5) or cut != 2.0


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_bounds_between_two_numbers_of_the_dtype(dtype: torch.dtype) -> None:
    eps = torch.finfo(dtype).eps
    low, high = 1 - eps / 3, 1 + eps / 3
    w = truncated_normal_(torch.empty(50, dtype=dtype), mean=1.0, std=eps, low=low, high=high, **ABSOLUTE)
    assert bool((w == 1).all())
    with pytest.raises(ValueError, match="has no number strictly between"):
        truncated_normal_(
            torch.full((50,), 7.0, dtype=dtype), mean=1.0, std=eps, low=1.0, high=1 + eps / 2, **ABSOLUTE
        )


ABSOLUTE = {"bounds": "absolute", "std_of": "parent"}


@pytest.mark.parametrize("bounds", [(-1.0, 1.0), (-0.5, 2.0), (0.2, 0.9), (1.0, 1.5)])
@pytest.mark.parametrize("share", [0.05, 0.5, 0.9, 0.999])
def test_realised_std_within_absolute_bounds_is_exact(bounds: tuple[float, float], share: float) -> None:
    low, high = bounds
    target = share * (high - low) / math.sqrt(12)
    options = {"std": target, "low": low, "high": high, "bounds": "absolute", "mean": (low + high) / 2}
    law = SCHEMES["truncated_normal"].law((1,), options=options)
    assert law.std == pytest.approx(target, rel=1e-9)
    assert law.mean == pytest.approx((low + high) / 2, abs=1e-12)
    w = truncated_normal_(torch.empty(100_000), generator=torch.Generator().manual_seed(2), **options)
    error = 5 * target * math.sqrt((law.kurtosis - 1) / 4 / 100_000)
    assert seen(w).std().item() == pytest.approx(target, abs=error)


def test_a_std_the_interval_cannot_hold_is_refused() -> None:
    w = torch.full((3,), 7.0)
    with pytest.raises(ValueError, match=r"below that of the uniform distribution on \[-1, 1\], 0.57735"):
        truncated_normal_(w, std=0.6, low=-1.0, high=1.0, bounds="absolute")
    assert bool((w == 7).all())


@pytest.mark.parametrize("low", [0.0, 3.0, 8.0, 20.0, 36.0])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_tails_are_drawn_in_both_directions(low: float, sign: float) -> None:
    """Where the distribution function is 1 to the last digit, inverting it gives infinities."""
    ends = (low, math.inf) if sign > 0 else (-math.inf, -low)
    options = {"low": ends[0], "high": ends[1], "std_of": "parent"}
    law = SCHEMES["truncated_normal"].law((1,), options=options)
    # Mills' ratio: the mean of the tail is ϕ(a)/(1 − Φ(a)).
    mills = math.exp(-low * low / 2) / math.sqrt(2 * math.pi) / (math.erfc(low / math.sqrt(2)) / 2)
    assert law.mean == pytest.approx(sign * mills, rel=1e-10)
    w = truncated_normal_(
        torch.empty(50_000, dtype=torch.float64), generator=torch.Generator().manual_seed(3), **options
    )
    assert bool(w.isfinite().all())
    assert bool((sign * w > low).all())
    assert seen(w).mean.item() == pytest.approx(law.mean, abs=5 * law.std / math.sqrt(50_000))
    assert seen(w).std().item() == pytest.approx(law.std, rel=5 * math.sqrt((law.kurtosis - 1) / 4 / 50_000))


def test_the_whole_distribution_is_right() -> None:
    """Kolmogorov–Smirnov against the distribution function, for a skewed interval."""
    n, low, high = 20_000, -0.3, 1.7
    w = truncated_normal_(
        torch.empty(n, dtype=torch.float64),
        low=low,
        high=high,
        std_of="parent",
        generator=torch.Generator().manual_seed(4),
    )
    ends = torch.special.ndtr(torch.tensor([low, high], dtype=torch.float64))
    cdf = (torch.special.ndtr(w.sort().values) - ends[0]) / (ends[1] - ends[0])
    gap = (cdf - (torch.arange(n) + 0.5) / n).abs().max().item()
    # P(√n·D > 2.2) = 2·exp(−2·2.2²) = 1e-4.
    assert gap < 2.2 / math.sqrt(n)


def test_chunks_are_independent() -> None:
    """Draws longer than one chunk (2²⁰) neither repeat nor leave entries unset."""
    w = truncated_normal_(torch.empty(3, 1 << 19), generator=torch.Generator().manual_seed(5)).flatten()
    assert not w.isnan().any()
    a, b = w[: 1 << 19], w[1 << 20 :]
    assert not torch.equal(a, b)
    assert abs((a * b).mean().item()) < 5 / math.sqrt(1 << 19)


def test_variance_scaling_keeps_its_variance_in_every_distribution() -> None:
    for distribution in ("normal", "uniform", "truncated_normal"):
        w = variance_scaling_(
            torch.empty(300, 200),
            scale=2.0,
            distribution=distribution,
            generator=torch.Generator().manual_seed(6),
        )
        assert seen(w).var().item() == pytest.approx(2 / 200, rel=5 * math.sqrt(2 / 60_000))
