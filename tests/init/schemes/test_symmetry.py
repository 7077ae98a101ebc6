"""Equal weights stay equal: what breaks the symmetry of hidden units and what doesn't."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from musigma.init import (
    apply,
    constant_,
    he_normal_,
    identity_,
    lecun_uniform_,
    normal_hundredth_,
    ones_,
    orthogonal_,
    truncated_normal_,
    uniform_,
    uniform_centered_,
    xavier_normal_,
    zeros_,
)

ALIKE = [zeros_, ones_, functools.partial(constant_, value=0.1)]
DIFFERENT = [
    he_normal_,
    xavier_normal_,
    lecun_uniform_,
    orthogonal_,
    uniform_,
    uniform_centered_,
    normal_hundredth_,
    identity_,
    functools.partial(truncated_normal_, std=0.1),
]


def train(scheme: Callable[..., Tensor], activation: nn.Module, steps: int = 50) -> nn.Sequential:
    """A net with 6 hidden units on a task that needs several of them."""
    net = nn.Sequential(nn.Linear(8, 6), activation, nn.Linear(6, 6), activation, nn.Linear(6, 3)).double()
    apply(net, {"*.weight": scheme, "*.bias": zeros_})
    g = torch.Generator().manual_seed(0)
    x = torch.randn(64, 8, generator=g, dtype=torch.float64)
    y = torch.randint(3, (64,), generator=g)
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    return net


def distinct(w: Tensor) -> int:
    """Number of rows that differ by more than the rounding of a few hundred additions of one size."""
    gaps = torch.cdist(w, w) > 1e-12 * w.abs().max().clamp_min(1)
    seen: list[int] = []
    for i in range(len(w)):
        if all(gaps[i, j] for j in seen):
            seen.append(i)
    return len(seen)


@pytest.mark.parametrize("activation", [nn.Tanh(), nn.ReLU(), nn.Softplus()], ids=str)
@pytest.mark.parametrize("scheme", ALIKE, ids=lambda f: getattr(f, "__name__", "constant_"))
def test_equal_units_stay_copies_of_each_other(scheme: Callable[..., Tensor], activation: nn.Module) -> None:
    net = train(scheme, activation)
    for layer in (net[0], net[2]):
        assert distinct(layer.weight.detach()) == 1
        assert distinct(layer.bias.detach()[:, None]) == 1
        assert distinct(layer.weight.grad) == 1
    if not isinstance(activation, nn.ReLU) and scheme is not zeros_:
        # They did learn, together: the network is one unit wide.
        assert net[2].weight.grad.abs().max() > 0


@pytest.mark.parametrize("activation", [nn.Tanh(), nn.Softplus()], ids=str)
@pytest.mark.parametrize("scheme", DIFFERENT, ids=lambda f: getattr(f, "__name__", "truncated_normal_"))
def test_random_units_become_different_ones(scheme: Callable[..., Tensor], activation: nn.Module) -> None:
    net = train(scheme, activation)
    for layer in (net[0], net[2]):
        assert distinct(layer.weight.detach()) == 6
        assert torch.linalg.matrix_rank(layer.weight.grad) > 1


def test_zeros_pass_no_gradient_down() -> None:
    net = train(zeros_, nn.Tanh(), steps=1)
    assert bool((net[0].weight.grad == 0).all())
    assert bool((net[2].weight.grad == 0).all())
    assert net[4].bias.grad.abs().max() > 0


def test_a_zero_last_layer_alone_is_harmless() -> None:
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).double()
    apply(net, {"0.weight": xavier_normal_, "2.weight": zeros_, "*.bias": zeros_})
    x, y = torch.randn(32, 8, dtype=torch.float64), torch.arange(32) % 3
    for step in range(2):
        net.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        assert net[2].weight.grad.abs().max() > 0
        assert (net[0].weight.grad.abs().max() > 0) == (step == 1)
        with torch.no_grad():
            for p in net.parameters():
                p -= 0.1 * p.grad
    assert distinct(net[0].weight.detach()) == 16
