"""Where deep nets come to rest, against published points and closed forms."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from musigma.init.meanfield import (
    chi,
    correlation_map,
    critical_weight_var,
    depth_scales,
    fixed_point,
    slope,
    variance_map,
)


@pytest.mark.parametrize(
    ("activation", "weight_var", "bias_var"),
    [("tanh", 1.3, 0.05), ("tanh", 4.0, 0.0), ("erf", 2.5, 0.1), ("gelu", 1.9, 0.3), ("sigmoid", 5.0, 0.0)],
)
def test_a_fixed_point_is_kept(activation: str, weight_var: float, bias_var: float) -> None:
    phi = torch.erf if activation == "erf" else activation
    q = fixed_point(phi, weight_var=weight_var, bias_var=bias_var)
    assert variance_map(phi, q, weight_var=weight_var, bias_var=bias_var) == pytest.approx(q, rel=1e-8)


def test_the_map_itself_goes_there() -> None:
    q = 1.0
    for _ in range(200):
        q = variance_map("tanh", q, weight_var=2.0, bias_var=0.02)
    assert fixed_point("tanh", weight_var=2.0, bias_var=0.02) == pytest.approx(q, rel=1e-8)


def test_signals_that_die_out_explode_or_never_move() -> None:
    assert fixed_point("relu", weight_var=1.9) == 0.0
    assert fixed_point("relu", weight_var=2.1) == math.inf
    assert fixed_point("relu", weight_var=2.0, start=0.37) == 0.37
    assert fixed_point("tanh", weight_var=1.0) == 0.0  # as 1/(2l), and no faster
    assert fixed_point("relu", weight_var=0.0, bias_var=0.3) == pytest.approx(0.3, rel=1e-8)


def test_of_several_points_the_one_the_signal_moves_to_counts() -> None:
    """gelu at σw² = 3.5, σb² = 0 has q* between dying out and exploding; either side of it goes its way."""
    low = fixed_point("gelu", weight_var=3.0, start=1e-3)
    high = fixed_point("gelu", weight_var=3.0, start=3.0)
    assert low == 0.0
    assert high == math.inf


class TestPublished:
    def test_ten_thousand_layers(self) -> None:
        """Xiao et al. 2018 train their tanh nets at (σw², σb²) = (1.05, 2.01e-5): on the critical line."""
        # They give three digits.
        assert critical_weight_var("tanh", 2.01e-5) == pytest.approx(1.05, rel=1e-3)

    def test_schoenholz_order_to_chaos_at_a_twentieth(self) -> None:
        """Schoenholz et al. 2017: for σb² = 0.05 tanh's transition lies at σw² = 1.76."""
        assert critical_weight_var("tanh", 0.05) == pytest.approx(1.76, abs=0.005)

    @pytest.mark.parametrize(("activation", "weight_var"), [("relu", 2.0), ("linear", 1.0), ("tanh", 1.0)])
    def test_without_biases(self, activation: str, weight_var: float) -> None:
        """He 2015, Saxe 2014, and Poole 2016: σw = 1 is where tanh's chaos begins without biases."""
        assert critical_weight_var(activation) == pytest.approx(weight_var, rel=1e-9)

    def test_poole_chaos_decorrelates(self) -> None:
        """Poole et al. 2016: above the line c = 1 is unstable, and two inputs come to rest at some c* < 1."""
        q = fixed_point("tanh", weight_var=16.0, bias_var=0.09)
        assert chi("tanh", var=q, weight_var=16.0) > 1
        c = 0.999
        for _ in range(60):
            c = correlation_map("tanh", c, var=q, weight_var=16.0, bias_var=0.09)
        assert 0.0 < c < 0.2
        again = correlation_map("tanh", c, var=q, weight_var=16.0, bias_var=0.09)
        assert again == pytest.approx(c, abs=1e-6)


class TestErf:
    """q* solves q = σw²·2/π·asin(2q/(1 + 2q)) + σb²; χ = σw²·4/π/√(1 + 4q)."""

    def test_critical_line(self) -> None:
        for bias_var in (0.01, 0.3):
            weight_var = critical_weight_var(torch.erf, bias_var)
            q = fixed_point(torch.erf, weight_var=weight_var, bias_var=bias_var)
            assert weight_var * 4 / math.pi / math.sqrt(1 + 4 * q) == pytest.approx(1.0, rel=1e-6)

    def test_depth_scales(self) -> None:
        weight_var, bias_var = 0.8, 0.1
        q = fixed_point(torch.erf, weight_var=weight_var, bias_var=bias_var)
        scales = depth_scales(torch.erf, weight_var=weight_var, bias_var=bias_var)
        towards = weight_var * 4 / math.pi / ((1 + 2 * q) * math.sqrt(1 + 4 * q))
        alike = weight_var * 4 / math.pi / math.sqrt(1 + 4 * q)
        assert scales.signal == pytest.approx(-1 / math.log(towards), rel=1e-6)
        assert scales.correlation == pytest.approx(-1 / math.log(alike), rel=1e-6)

    def test_depth_scale_in_chaos(self) -> None:
        """There c* solves c = (σw²·2/π·asin(2qc/(1 + 2q)) + σb²)/q, and the slope is the kernel's."""
        weight_var, bias_var = 6.0, 0.2
        q = fixed_point(torch.erf, weight_var=weight_var, bias_var=bias_var)
        r = 2 * q / (1 + 2 * q)
        c = 0.5
        for _ in range(500):
            c = (weight_var * 2 / math.pi * math.asin(r * c) + bias_var) / q
        slope_there = weight_var * 2 / math.pi * r / math.sqrt(1 - (r * c) ** 2) / q
        scales = depth_scales(torch.erf, weight_var=weight_var, bias_var=bias_var)
        assert scales.correlation == pytest.approx(-1 / math.log(slope_there), rel=1e-5)


def test_scales_diverge_at_the_critical_point_only() -> None:
    assert depth_scales("relu", weight_var=2.0) == (math.inf, math.inf)
    near, nearer = (
        depth_scales("tanh", weight_var=critical_weight_var("tanh", 0.05) * f, bias_var=0.05).correlation
        for f in (0.99, 0.999)
    )
    assert nearer == pytest.approx(10 * near, rel=0.1)
    at = critical_weight_var("tanh", 0.05)
    assert depth_scales("tanh", weight_var=at, bias_var=0.05).correlation > 1e6


def test_scales_are_what_deviations_shrink_by() -> None:
    weight_var, bias_var = 1.3, 0.05
    q = fixed_point("tanh", weight_var=weight_var, bias_var=bias_var)
    scales = depth_scales("tanh", weight_var=weight_var, bias_var=bias_var)
    assert math.exp(-1 / scales.signal) == pytest.approx(
        slope("tanh", var=q, weight_var=weight_var), rel=1e-6
    )
    assert math.exp(-1 / scales.correlation) == pytest.approx(
        chi("tanh", var=q, weight_var=weight_var), rel=1e-6
    )


def test_what_cannot_be_had_is_refused() -> None:
    with pytest.raises(ValueError, match=r"grows without bound at weight_var=2\.1"):
        depth_scales("relu", weight_var=2.1)
    with pytest.raises(ValueError, match=r"no variance up to 10000 is critical for relu with bias_var=0\.1"):
        critical_weight_var("relu", 0.1)
    with pytest.raises(ValueError, match="start must be positive"):
        fixed_point("relu", weight_var=1.0, start=0.0)
    with pytest.raises(ValueError, match="bias_var must be at least 0"):
        critical_weight_var("relu", -0.1)


def test_a_callable_works_everywhere() -> None:
    def own(z: Tensor) -> Tensor:
        return torch.tanh(2 * z)

    assert critical_weight_var(own) == pytest.approx(0.25, rel=1e-9)
    # tanh(2z) is tanh at four times the variance.
    q = fixed_point("tanh", weight_var=4 * 0.7, bias_var=4 * 0.1)
    assert fixed_point(own, weight_var=0.7, bias_var=0.1) == pytest.approx(q / 4, rel=1e-7)
