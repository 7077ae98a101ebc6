"""Models that are fine: not one of the rules about norms has anything to say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import musigma as ms
from musigma.doctor import examine


@pytest.fixture(scope="module")
def digits() -> tuple[Tensor, Tensor]:
    """scikit-learn's handwritten digits, standardized."""
    datasets = pytest.importorskip("sklearn.datasets")
    data = datasets.load_digits()
    x = torch.tensor(data.data, dtype=torch.float32)
    return ms.inputs.Standardizer().fit(x).layer()(x), torch.tensor(data.target)


def plain(p: float = 0.0) -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 64, bias=False),
        nn.BatchNorm1d(64),
        nn.ReLU(),
        nn.Dropout(p),
        nn.Linear(64, 32, bias=False),
        nn.BatchNorm1d(32),
        nn.ReLU(),
        nn.Dropout(p),
        nn.Linear(32, 10),
    )


def after_the_activation() -> nn.Module:
    layers = [nn.Linear(64, 64), nn.ReLU(), nn.BatchNorm1d(64), nn.Linear(64, 32), nn.ReLU()]
    return nn.Sequential(*layers, nn.BatchNorm1d(32), nn.Linear(32, 10))


def convolutional() -> nn.Module:
    def block(c: int, d: int) -> list[nn.Module]:
        return [nn.Conv2d(c, d, 3, padding=1, bias=False), ms.nn.BatchNorm2d(d), nn.ReLU()]

    body = [*block(1, 16), *block(16, 32), nn.MaxPool2d(2), *block(32, 32)]
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), *body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)
    )


class Residual(nn.Module):
    """Pre-activation blocks: no BatchNorm directly behind a bias, except through the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(64, 64), nn.Linear(64, 10)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x.unflatten(1, (8, 8))).mean(1))


NETS: dict[str, Callable[[], nn.Module]] = {
    "plain": plain,
    "with dropout": lambda: plain(0.3),
    "after the activation": after_the_activation,
    "convolutional": convolutional,
    "residual": Residual,
    "transformer": Transformer,
}


def trained(
    make: Callable[[], nn.Module], digits: tuple[Tensor, Tensor], steps: int
) -> tuple[nn.Module, Tensor, Tensor]:
    x, y = digits
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(steps):
        rows = torch.randint(0, 1500, (32,))
        optimizer.zero_grad()
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    return model, x, y


def codes(model: nn.Module, x: Tensor, y: Tensor, intent: Any, **options: Any) -> tuple[str, ...]:
    return examine(model, x, y, loss=F.cross_entropy, intent=intent, select=["NRM"], **options).codes


@pytest.mark.parametrize("steps", [0, 5, 80])
@pytest.mark.parametrize("name", NETS)
def test_nothing_to_say_at_any_stage(name: str, steps: int, digits: tuple[Tensor, Tensor]) -> None:
    model, x, y = trained(NETS[name], digits, steps)
    assert codes(model, x[1500:1564], y[1500:1564], None) == ()
    assert codes(model, x[:16], y[:16], "finetune" if steps else "train") == ()
    if steps >= 80:
        assert codes(model.eval(), x[1500:1564], y[1500:1564], "inference", independent=True) == ()


def test_frozen_backbone_with_a_new_head(digits: tuple[Tensor, Tensor]) -> None:
    model, x, y = trained(plain, digits, 80)
    backbone = ms.nn.FrozenBatchNorm1d.convert(model[:-1].requires_grad_(False))
    tuned = nn.Sequential(backbone, nn.Linear(32, 16, bias=False), nn.BatchNorm1d(16), nn.Linear(16, 10))
    assert codes(tuned, x[:64], y[:64], "finetune") == ()


def test_zero_weights_of_the_last_norm_in_a_branch() -> None:
    """Zero-γ: a healthy start."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.norm = nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8)
            nn.init.zeros_(self.norm.weight)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.norm(self.fc(x))

    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(Block(), Block(), nn.Linear(8, 10))
    assert codes(model, x, torch.arange(64) % 10, "train") == ()
