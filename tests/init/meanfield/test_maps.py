"""The maps of variance, correlation and gradient against closed forms, at kinks, jumps and the ends."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from musigma.init.meanfield import chi, correlation_map, slope, variance_map

VARS = [1e-6, 0.3, 1.0, 7.0, 1e4]
CORRELATIONS = [-1.0, -0.999999, -0.7, 0.0, 0.3, 0.9, 0.9999, 0.99999999, 1.0]


def bell(z: float) -> float:
    return math.exp(-z * z / 2) / math.sqrt(2 * math.pi)


def upper(z: float) -> float:
    return math.erfc(z / math.sqrt(2)) / 2


class TestRelu:
    """The arc-cosine kernels of degree 1 and 0 (Cho & Saul 2009)."""

    @pytest.mark.parametrize("var", VARS)
    def test_variance_gradient_and_slope_are_halves(self, var: float) -> None:
        assert variance_map("relu", var, weight_var=1.5, bias_var=0.2) == pytest.approx(
            0.75 * var + 0.2, rel=1e-11
        )
        assert chi("relu", var=var, weight_var=1.5) == pytest.approx(0.75, rel=1e-11)
        assert slope("relu", var=var, weight_var=1.5) == pytest.approx(0.75, rel=1e-10)

    @pytest.mark.parametrize("var", [0.01, 1.0, 30.0])
    @pytest.mark.parametrize("c", CORRELATIONS)
    def test_correlation_is_the_arc_cosine_kernel(self, c: float, var: float) -> None:
        angle = math.acos(c)
        kernel = (math.sin(angle) + (math.pi - angle) * c) / math.pi
        # acos loses half of its digits near ±1.
        assert correlation_map("relu", c, var=var, weight_var=2.0) == pytest.approx(kernel, abs=3e-10)

    def test_biases_pull_inputs_together(self) -> None:
        got = correlation_map("relu", 0.0, var=1.0, weight_var=2.0, bias_var=1.0)
        assert got == pytest.approx((1 / math.pi + 1) / 2, rel=1e-10)


class TestErf:
    """The exact maps of erf (Williams 1997): E[φφ] = 2/π·asin(2cq/(1 + 2q))."""

    @pytest.mark.parametrize("var", VARS)
    def test_variance_gradient_and_slope(self, var: float) -> None:
        assert variance_map(torch.erf, var, weight_var=1.0) == pytest.approx(
            2 / math.pi * math.asin(2 * var / (1 + 2 * var)), rel=1e-9
        )
        assert chi(torch.erf, var=var, weight_var=1.0) == pytest.approx(
            4 / math.pi / math.sqrt(1 + 4 * var), rel=1e-9
        )
        # d/dq of the above. At large q it is a small difference of large terms: those are of order 1/q.
        exact = 4 / math.pi / ((1 + 2 * var) * math.sqrt(1 + 4 * var))
        assert slope(torch.erf, var=var, weight_var=1.0) == pytest.approx(exact, rel=1e-8, abs=1e-10 / var)

    @pytest.mark.parametrize("var", [0.3, 1.0, 40.0])
    @pytest.mark.parametrize("c", CORRELATIONS)
    def test_correlation(self, c: float, var: float) -> None:
        kernel = math.asin(2 * var / (1 + 2 * var) * c) / math.asin(2 * var / (1 + 2 * var))
        assert correlation_map(torch.erf, c, var=var, weight_var=1.3) == pytest.approx(kernel, abs=1e-10)


class TestJumps:
    """A sign's correlation is the angle; its gradient is nothing, and its variance never moves."""

    @pytest.mark.parametrize("c", CORRELATIONS)
    def test_sign_correlates_by_angle(self, c: float) -> None:
        # Near 1 the answer falls as √(1 − c): what rounding leaves of the jump's place is magnified.
        assert correlation_map(torch.sign, c, var=2.0, weight_var=1.0) == pytest.approx(
            2 / math.pi * math.asin(c), abs=1e-8
        )

    def test_sign_passes_no_gradient_and_forgets_the_variance(self) -> None:
        assert chi(torch.sign, var=1.0, weight_var=3.0) == 0.0
        assert slope(torch.sign, var=1.0, weight_var=3.0) == pytest.approx(0.0, abs=1e-12)

    def test_a_step_that_autograd_cannot_follow_has_infinite_chi(self) -> None:
        def step(z: Tensor) -> Tensor:
            return (z > 0.3).double()

        assert chi(step, var=1.0, weight_var=1.0) == math.inf
        # q' = P(√q z > 0.3), and its derivative in q.
        assert slope(step, var=1.0, weight_var=1.0) == pytest.approx(0.15 * bell(0.3), rel=1e-10)

    def test_hardshrink_counts_its_jumps_in_the_slope_and_not_in_the_gradient(self) -> None:
        assert chi("hardshrink", var=1.0, weight_var=1.0) == pytest.approx(2 * upper(0.5), rel=1e-10)
        h = 1e-4
        above, below = (variance_map("hardshrink", 1 + s, weight_var=1.0) for s in (h, -h))
        assert slope("hardshrink", var=1.0, weight_var=1.0) == pytest.approx(
            (above - below) / (2 * h), rel=1e-6
        )
        assert slope("hardshrink", var=1.0, weight_var=1.0) > 2 * upper(0.5)


@pytest.mark.parametrize("var", VARS)
@pytest.mark.parametrize("c", [-0.8, 0.0, 0.999])
def test_a_linear_layer_changes_nothing(c: float, var: float) -> None:
    assert variance_map("linear", var, weight_var=1.0) == pytest.approx(var, rel=1e-11)
    assert chi("linear", var=var, weight_var=1.0) == pytest.approx(1.0, rel=1e-11)
    assert slope("linear", var=var, weight_var=1.0) == pytest.approx(1.0, rel=1e-9)
    assert correlation_map("linear", c, var=var, weight_var=1.0) == pytest.approx(c, abs=1e-10)


@pytest.mark.parametrize("activation", ["tanh", "gelu", "silu", "elu", "hardswish", "softshrink", "relu6"])
@pytest.mark.parametrize("var", [0.1, 1.0, 9.0])
def test_slope_is_the_derivative_of_the_variance_map(activation: str, var: float) -> None:
    h = 1e-4 * var
    above, below = (variance_map(activation, var + s, weight_var=1.0) for s in (h, -h))
    # Central differences: h²·V'''/6 is 1e-8·V or so.
    assert slope(activation, var=var, weight_var=1.0) == pytest.approx((above - below) / (2 * h), rel=1e-6)


@pytest.mark.parametrize("activation", ["tanh", "gelu", "elu", "sigmoid", "hardtanh"])
def test_chi_is_the_correlation_maps_slope_at_one(activation: str) -> None:
    """(1 − c')/(1 − c) → χ·q/q' as c → 1."""
    q, gap = 0.8, 1e-5
    after = variance_map(activation, q, weight_var=1.7, bias_var=0.1)
    gone = 1 - correlation_map(activation, 1 - gap, var=q, weight_var=1.7, bias_var=0.1)
    # The next order is √gap at kinks: 0.3 %.
    assert gone / gap * after / q == pytest.approx(chi(activation, var=q, weight_var=1.7), rel=5e-3)


@pytest.mark.parametrize(
    ("activation", "same"),
    [
        (lambda z: torch.from_numpy(np.tanh(z.numpy())), "tanh"),  # autograd cannot follow NumPy
        (lambda z: z.detach().tanh(), "tanh"),
        (lambda z: z.float().tanh(), "tanh"),  # float32 inside
        (nn.SiLU(inplace=True), "silu"),
        (F.relu_, "relu"),
        (nn.PReLU(init=0.01), "leaky_relu"),
        (lambda z: z * torch.sigmoid(z), "silu"),
        (lambda z: torch.where(z > 1, 1.0, torch.where(z < -1, -1.0, z)), "hardtanh"),
    ],
)
def test_however_an_activation_is_written_its_derivative_is_found(
    activation: Callable[[Tensor], Tensor], same: str
) -> None:
    # float32's own rounding, and a tenth of the differences' 1e-10.
    assert chi(activation, var=0.7, weight_var=1.0) == pytest.approx(
        chi(same, var=0.7, weight_var=1.0), rel=3e-7
    )


def test_half_precision_inside_costs_its_own_rounding_only() -> None:
    got = chi(lambda z: z.bfloat16().tanh(), var=0.7, weight_var=1.0)
    assert got == pytest.approx(chi("tanh", var=0.7, weight_var=1.0), rel=1e-3)


def test_a_backward_of_the_users_own_is_what_gradients_meet() -> None:
    class Straight(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, z: Tensor) -> Tensor:
            return torch.sign(z)

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:
            return grad

    assert chi(Straight.apply, var=1.0, weight_var=1.0) == pytest.approx(1.0, rel=1e-10)
    assert variance_map(Straight.apply, 1.0, weight_var=1.0) == pytest.approx(1.0, rel=1e-10)


def test_nothing_of_the_callers_changes() -> None:
    module = nn.PReLU()
    state = torch.get_rng_state()
    with torch.no_grad(), torch.inference_mode():
        assert chi(module, var=1.0, weight_var=1.0) == pytest.approx((1 + 0.25**2) / 2, rel=1e-7)
    assert module.weight.grad is None
    assert torch.equal(torch.get_rng_state(), state)


def test_a_slope_that_is_learned_meanwhile_is_seen() -> None:
    """Answers are remembered by value, not by the module that was asked about."""
    module = nn.PReLU()
    chi(module, var=1.0, weight_var=1.0)
    with torch.no_grad():
        module.weight.fill_(0.5)
    assert chi(module, var=1.0, weight_var=1.0) == pytest.approx((1 + 0.5**2) / 2, rel=1e-10)
    factor = [1.0]

    def scaled(z: Tensor) -> Tensor:
        return factor[0] * z

    assert chi(scaled, var=1.0, weight_var=1.0) == pytest.approx(1.0, rel=1e-10)
    factor[0] = 2.0
    assert chi(scaled, var=1.0, weight_var=1.0) == pytest.approx(4.0, rel=1e-10)


def test_variance_zero_is_the_activation_at_zero() -> None:
    assert variance_map("sigmoid", 0.0, weight_var=2.0, bias_var=0.5) == 1.0
    assert chi("sigmoid", var=0.0, weight_var=16.0) == 1.0


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: variance_map("relu", -1.0, weight_var=1.0), "var must be at least 0 and finite, got -1.0"),
        (lambda: variance_map("relu", 1.0, weight_var=math.nan), "weight_var must be at least 0"),
        (lambda: chi("relu", var=math.inf, weight_var=1.0), "var must be at least 0"),
        (lambda: slope("relu", var=0.0, weight_var=1.0), "var must be positive"),
        (lambda: correlation_map("relu", 1.1, var=1.0, weight_var=1.0), "between -1 and 1, got c=1.1"),
        (lambda: correlation_map("relu", 0.1, var=0.0, weight_var=1.0), "var must be positive"),
        (lambda: correlation_map(lambda z: 0 * z, 0.1, var=1.0, weight_var=1.0), "leaves variance 0"),
        (lambda: chi("gleu", var=1.0, weight_var=1.0), "did you mean 'gelu'"),
    ],
)
def test_what_is_no_variance_or_correlation_is_refused(call: Callable[[], float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()
