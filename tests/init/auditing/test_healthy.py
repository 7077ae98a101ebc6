"""Usual models in their usual initializations: an alarm here would be a false one."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import musigma as ms


def fan_out(model: nn.Module) -> nn.Module:
    """What torchvision's networks do."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, 0, 0.01)
    return model


def mobilenet() -> nn.Module:
    layers = [nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU6()]
    for stride in (1, 2):
        layers += [nn.Conv2d(16, 16, 3, stride, 1, groups=16, bias=False), nn.BatchNorm2d(16), nn.ReLU6()]
        layers += [nn.Conv2d(16, 16, 1, bias=False), nn.BatchNorm2d(16)]
    return fan_out(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)))


class ZeroGamma(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 2, 1)
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, 1, 1, bias=False) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(3))
        fan_out(self)
        for norm in self.norms:
            nn.init.zeros_(norm.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.relu(x + norm(conv(x)))
        return x.mean((2, 3))


def dcgan() -> nn.Module:
    layers: list[nn.Module] = []
    for old, new in ((32, 16), (16, 8)):
        layers += [nn.ConvTranspose2d(old, new, 4, 2, 1, bias=False), nn.BatchNorm2d(new), nn.ReLU()]
    model = nn.Sequential(*layers, nn.ConvTranspose2d(8, 3, 4, 2, 1, bias=False), nn.Tanh())
    for module in model:
        if isinstance(module, nn.ConvTranspose2d):
            nn.init.normal_(module.weight, 0, 0.02)
        elif isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight, 1, 0.02)
    return model


def policy() -> nn.Module:
    model = nn.Sequential(nn.Linear(17, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 6))
    for layer, gain in zip(model[::2], (math.sqrt(2), math.sqrt(2), 0.01), strict=True):
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return model


class LanguageModel(nn.Module):
    """An embedding of U[±0.1], tied to the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(60, 24), nn.LSTM(24, 24, 2, batch_first=True)
        self.out = nn.Linear(24, 60)
        self.out.weight = self.embedding.weight
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(self.embedding(x))[0])


class Siren(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 64), *(nn.Linear(64, 64) for _ in range(3))])
        self.out = nn.Linear(64, 1)
        nn.init.uniform_(self.layers[0].weight, -0.5, 0.5)
        for layer in self.layers[1:]:
            nn.init.uniform_(layer.weight, -math.sqrt(6 / 64) / 30, math.sqrt(6 / 64) / 30)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.sin(30 * layer(x))
        return self.out(x)


class AdaptiveNorm(nn.Module):
    """adaLN-Zero: scale, shift and gate of each block, and the output, start at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16, elementwise_affine=False)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.tuning = nn.ModuleList(nn.Linear(16, 48) for _ in range(3))
        self.out = nn.Linear(16, 16)
        for module in (*self.tuning, self.out):
            nn.init.zeros_(module.weight)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        for layer, tune in zip(self.layers, self.tuning, strict=True):
            shift, scale, gate = tune(F.silu(condition)).chunk(3, -1)
            x = x + gate * layer(self.norm(x) * (1 + scale) + shift)
        return self.out(x)


class LowRank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(32, 32).requires_grad_(False)
        self.down, self.up = nn.Linear(32, 4, bias=False), nn.Linear(4, 32, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.up(self.down(x))


class Critics(nn.Module):
    """Two critics, and frozen copies of both."""

    def __init__(self) -> None:
        super().__init__()
        self.critics = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)) for _ in range(2)
        )
        self.targets = copy.deepcopy(self.critics).requires_grad_(False)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [critic(x) for critic in (*self.critics, *self.targets)]


def mlp_of_eight() -> nn.Module:
    """As deep as torch's default is used without harm (NeRF's depth)."""
    return nn.Sequential(
        *(layer for _ in range(7) for layer in (nn.Linear(64, 64), nn.ReLU())), nn.Linear(64, 4)
    )


CASES = {
    "mobilenet": (mobilenet, lambda: torch.randn(4, 3, 16, 16)),
    "zero gamma": (ZeroGamma, lambda: torch.randn(4, 3, 16, 16)),
    "dcgan": (dcgan, lambda: torch.randn(4, 32, 2, 2)),
    "policy": (policy, lambda: torch.randn(16, 17)),
    "language model": (LanguageModel, lambda: torch.randint(0, 60, (3, 8))),
    "siren": (Siren, lambda: torch.rand(32, 2) * 2 - 1),
    "adaptive norm": (AdaptiveNorm, lambda: (torch.randn(4, 16), torch.randn(4, 16))),
    "low rank": (lambda: nn.Sequential(LowRank(), nn.ReLU(), LowRank()), lambda: torch.randn(4, 32)),
    "critics": (Critics, lambda: torch.randn(8, 8)),
    "eight layers": (mlp_of_eight, lambda: torch.randn(32, 64)),
    "raw pixels": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8 * 36, 4)),
        lambda: torch.rand(4, 3, 8, 8) * 255,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_no_alarm(name: str) -> None:
    build, example = CASES[name]
    model = build()
    for audit in (ms.init.audit(model), ms.init.audit(model, example())):
        assert not audit, str(audit)
        assert not audit.trained


@pytest.mark.slow
def test_hundreds_of_layers() -> None:
    layers = [nn.Linear(4, 4) for _ in range(400)]
    for layer in layers:
        nn.init.orthogonal_(layer.weight)
        nn.init.zeros_(layer.bias)
    model = nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh())))
    audit = ms.init.audit(model, torch.randn(4, 4) * 0.01)
    assert not audit, str(audit)
    assert len(audit.tensors) == 800
