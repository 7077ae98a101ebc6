"""Critical points: where they lie, what is said where there are none, and that nets really keep them."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from musigma.init.meanfield import chi, critical, slope, variance_map
from musigma.init.meanfield._activations import ACTIVATIONS

NAMES = sorted(set(ACTIVATIONS) - {"threshold"})


@pytest.mark.parametrize("name", NAMES)
def test_the_point_does_what_it_says(name: str) -> None:
    point = critical(name)
    q = point.std**2
    after = variance_map(name, q, weight_var=point.weight_var, bias_var=point.bias_var)
    assert after == pytest.approx(q, rel=1e-7)
    assert point.bias_var >= 0
    assert chi(name, var=q, weight_var=point.weight_var) == pytest.approx(point.chi, rel=1e-7)
    assert slope(name, var=q, weight_var=point.weight_var) == pytest.approx(point.slope, rel=1e-7, abs=1e-9)
    assert (point.chi == 1.0) is point.reachable
    assert bool(point.note) is not (point.reachable and point.stable)


@pytest.mark.parametrize("activation", ["relu", "leaky_relu", "linear", torch.abs, nn.PReLU(init=0.3)])
def test_kin_of_relu_are_critical_at_every_scale(activation: object) -> None:
    point = critical(activation)  # type: ignore[arg-type]
    assert (point.std, point.bias_var, point.chi) == (1.0, 0.0, 1.0)
    assert point.slope == pytest.approx(1.0, rel=1e-9)
    assert point.stable
    assert point.reachable
    wide = critical(activation, std=40.0)  # type: ignore[arg-type]
    assert wide.weight_var == pytest.approx(point.weight_var, rel=1e-9)


@pytest.mark.parametrize(
    ("name", "least", "most"), [("gelu", 2.0, 3.0), ("silu", 4.0, 5.0), ("mish", 1.5, 2.0)]
)
def test_bumps_below_zero_need_a_large_std(name: str, least: float, most: float) -> None:
    """At std 1 gelu's, silu's and mish's variance maps let a deviation grow over 50 layers."""
    point = critical(name)
    assert least <= point.std <= most
    assert point.slope < 1
    assert 0 < point.bias_var < 0.06 * point.std**2
    assert not critical(name, std=1.0).stable


@pytest.mark.parametrize(("name", "grown"), [("gelu", 26), ("silu", 114), ("mish", 2.2)])
def test_deviations_grow_at_std_one_as_published(name: str, grown: float) -> None:
    assert critical(name, std=1.0).slope ** 50 == pytest.approx(grown, rel=0.02)


@pytest.mark.parametrize("name", ["sigmoid", "hardsigmoid", "softplus", "hardshrink"])
def test_what_cannot_be_critical_says_so_and_suggests_a_norm(name: str) -> None:
    point = critical(name)
    assert not point.reachable
    assert point.bias_var == 0.0
    assert "put a norm" in point.note
    assert critical("sigmoid", std=8.0).reachable
    assert critical("sigmoid", std=8.0).weight_var == pytest.approx(121, abs=1)


def test_what_passes_no_gradient_says_so() -> None:
    point = critical(torch.sign)
    assert point.chi == 0.0
    assert "no gradient passes sign" in point.note
    with pytest.raises(ValueError, match="must pass something on"):
        critical(lambda z: 0 * z)


def test_what_is_infinitely_steep_says_so() -> None:
    """√|z|'s slope has no mean square: no weights keep a gradient, though every signal is kept."""
    point = critical(lambda z: z.abs().sqrt())
    assert (point.chi, point.reachable, point.stable) == (math.inf, False, False)
    assert "infinitely steep" in point.note
    assert point.weight_var == pytest.approx(math.sqrt(math.pi / 2), rel=1e-9)


@pytest.mark.parametrize("activation", [torch.log, lambda z: torch.exp(z * z)])
def test_what_has_no_expectation_is_refused(activation: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with pytest.raises(ValueError, match="must be finite with a finite square"):
        critical(activation)


def test_very_deep_nets_stay_nearer_to_linear() -> None:
    stds = [critical("tanh", depth=d).std for d in (50, 1000, 10_000)]
    assert stds == sorted(stds, reverse=True)
    assert critical("gelu", depth=10_000).stable


def test_shallow_nets_may_stay_nearer_to_one() -> None:
    shallow, deep = critical("gelu", depth=3), critical("gelu", depth=400)
    assert shallow.std < critical("gelu").std <= deep.std
    assert critical("gelu", std=1.0, depth=2).stable


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="std must be positive"):
        critical("relu", std=0.0)
    with pytest.raises(ValueError, match="at least 1 layer, got 0"):
        critical("relu", depth=0)


def test_hundreds_of_layers_ask_once() -> None:
    """Names, modules of one kind and one callable are computed once: a loop over layers is cheap."""
    calls = 0

    def counted(z: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return F.silu(z)

    critical(counted)
    first = calls
    for _ in range(200):
        critical(counted)
        critical(nn.GELU())
    # Each asks for a few values only, to see whether the function is still the same one.
    assert calls - first <= 200 * 6
