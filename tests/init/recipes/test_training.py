"""Very deep networks train with the recipes made for them, and not without."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import musigma as ms

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def digits() -> tuple[Tensor, Tensor]:
    data = pytest.importorskip("sklearn.datasets").load_digits()
    x = torch.tensor(data.data, dtype=torch.float32)
    m = ms.moments(x, None)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return ((x - m.mean) / m.std()).float()[order], torch.tensor(data.target)[order]


class Block(nn.Module):
    def __init__(self, width: int, scaled: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)
        self.scale = nn.Parameter(torch.ones(())) if scaled else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(torch.relu(self.a(x)))
        return x + (y if self.scale is None else self.scale * y)


def resnet(blocks: int, scaled: bool, width: int = 32) -> nn.Sequential:
    body = [Block(width, scaled) for _ in range(blocks)]
    return nn.Sequential(nn.Linear(64, width), *body, nn.ReLU(), nn.Linear(width, 10))


@pytest.mark.parametrize(
    ("scheme", "lr", "least"), [("fixup", 0.02, 0.8), ("skipinit", 0.005, 0.6), ("he_normal", 0.005, None)]
)
def test_a_thousand_layers_without_norm(scheme: str, lr: float, least: float | None) -> None:
    """500 branches of two layers, 40 steps of 64 digits: measured accuracy 0.87 and 0.70; He's is nan."""
    x, y = digits()
    net = resnet(500, scheme == "skipinit")
    ms.init.initialize(net, x[:64], scheme=scheme, verify=False)
    optimizer = torch.optim.SGD(net.parameters(), lr, momentum=0.9)
    losses = []
    for step in range(40):
        at = step * 64 % 1472
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x[at : at + 64]), y[at : at + 64])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        right = (net(x[1500:]).argmax(1) == y[1500:]).double().mean().item()
    if least is None:
        assert not math.isfinite(losses[-1])
    else:
        assert losses[0] == pytest.approx(math.log(10), abs=0.05)
        assert right > least


class Attend(nn.Module):
    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.o(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Post-norm: norm(ω·x + f(x))."""

    def __init__(self, width: int, alpha: float = 1.0, learned: bool = False, normed: bool = True) -> None:
        super().__init__()
        self.mix, self.up, self.down = Attend(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm1, self.norm2 = (nn.LayerNorm(width) if normed else nn.Identity() for _ in range(2))
        self.omega1, self.omega2 = (nn.Parameter(torch.ones(width)) if learned else alpha for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(self.omega1 * x + self.mix(x))
        return self.norm2(self.omega2 * x + self.down(torch.relu(self.up(x))))


class Reverser(nn.Module):
    """Eight symbols of twelve, to be given back in reverse order."""

    def __init__(self, layers: int, width: int = 16, **options: Any) -> None:
        super().__init__()
        self.symbols, self.places = nn.Embedding(12, width), nn.Embedding(8, width)
        self.body = nn.ModuleList(Layer(width, **options) for _ in range(layers))
        self.head = nn.Linear(width, 12)

    def forward(self, x: Tensor) -> Tensor:
        y = self.symbols(x) + self.places(torch.arange(x.shape[1]))
        for layer in self.body:
            y = layer(y)
        return self.head(y)


def batch(seed: int) -> tuple[Tensor, Tensor]:
    x = torch.randint(12, (32, 8), generator=torch.Generator().manual_seed(seed))
    return x, x.flip(1)


ALPHA = ms.init.deepnorm_constants(32)[0]


@pytest.mark.parametrize(
    ("scheme", "options", "learns"),
    [
        ("xavier_uniform", {}, False),
        ("deepnorm", {"alpha": ALPHA}, True),
        ("t_fixup", {"normed": False}, True),
        ("admin", {"learned": True}, True),
        ("ds_init", {}, True),
    ],
    ids=["xavier", "deepnorm", "t_fixup", "admin", "ds_init"],
)
def test_post_norm_transformers_of_32_layers(scheme: str, options: dict[str, Any], learns: bool) -> None:
    """Without warm-up. Measured after 100 steps: 2.09, 2.17, 2.19, 2.14, and 2.49 (no better than log 12)."""
    net = Reverser(32, **options)
    ms.init.initialize(net, batch(999)[0], scheme=scheme, verify=False)
    optimizer = torch.optim.Adam(net.parameters(), 0.003)
    losses = []
    for step in range(100):
        x, y = batch(step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x).flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    last = sum(losses[-5:]) / 5
    assert (last < math.log(12) - 0.15) if learns else (last > math.log(12) - 0.05)
