"""BatchNorm makes gradients grow at a rate no weight variance changes (Yang et al. 2019)."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from musigma.init.meanfield import batch_norm_growth
from musigma.init.meanfield._activations import ACTIVATIONS
from musigma.statistics import moments


def test_relu_grows_by_pi_over_pi_minus_one() -> None:
    assert batch_norm_growth("relu") == pytest.approx(math.pi / (math.pi - 1), rel=1e-10)


def test_a_linear_net_does_not_grow() -> None:
    assert batch_norm_growth("linear") == pytest.approx(1.0, rel=1e-10)


@pytest.mark.parametrize("batch", [4, 5, 16, 1000])
def test_a_linear_net_of_a_finite_batch(batch: int) -> None:
    """(B − 2)/(B − 3), by the rule of 2048 equal shares an axis: its error is what remains."""
    assert batch_norm_growth("linear", batch=batch) == pytest.approx((batch - 2) / (batch - 3), rel=2e-3)


@pytest.mark.parametrize("name", sorted(set(ACTIVATIONS) - {"threshold", "identity"}))
def test_nothing_grows_less_than_a_linear_net(name: str) -> None:
    """E[φ'²] = Σ k·aₖ² ≥ Σ aₖ² = Var φ; a jump's derivative is missing from the left side."""
    if name != "hardshrink":
        assert batch_norm_growth(name) > 1.0


@pytest.mark.parametrize("name", ["relu", "tanh", "gelu"])
def test_large_batches_approach_the_limit(name: str) -> None:
    limit = batch_norm_growth(name)
    gaps = [abs(batch_norm_growth(name, batch=b) / limit - 1) for b in (64, 640)]
    assert gaps[1] < 0.15 * gaps[0]


@pytest.mark.parametrize(("name", "batch"), [("relu", 16), ("tanh", 16), ("relu", 64)])
def test_nets_grow_as_computed(name: str, batch: int) -> None:
    """Ten wide layers of linear → BatchNorm → φ: the gradient's variance from layer to layer."""
    width, depth, g = 768, 10, torch.Generator().manual_seed(0)
    phi = ACTIVATIONS[name]
    x: Tensor = torch.randn(batch, width, generator=g)
    pre: list[Tensor] = []
    for _ in range(depth):
        z = (x @ torch.randn(width, width, generator=g) * 0.7).requires_grad_()
        z.retain_grad()
        pre.append(z)
        x = phi(F.batch_norm(z, None, None, training=True, eps=1e-12))
    x.backward(torch.randn(x.shape, generator=g))
    sizes = [moments(z.grad.square(), None).mean.log().item() for z in pre if z.grad is not None]
    # The first layers' batch has not come to its symmetric state yet, the last one's gradient neither.
    growth = (sizes[2] - sizes[depth - 2]) / (depth - 4)
    # Each of 768 units has its own r² with (B − 1) degrees of freedom: a few per cent a layer.
    assert math.exp(growth) == pytest.approx(batch_norm_growth(name, batch=batch), rel=0.04)


def test_bad_batches_and_constants_are_refused() -> None:
    with pytest.raises(ValueError, match="batch must be at least 4, got 3"):
        batch_norm_growth("relu", batch=3)
    with pytest.raises(ValueError, match="gives one value only"):
        batch_norm_growth(lambda z: torch.full_like(z, 2.0))
