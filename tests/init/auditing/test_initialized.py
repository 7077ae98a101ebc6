"""What `initialize` has written, `audit` finds nothing wrong with."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import musigma as ms


class Residual(nn.Module):
    def __init__(self, norm: bool, blocks: int = 6) -> None:
        super().__init__()

        def block() -> nn.Sequential:
            layers = [nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1)]
            return nn.Sequential(*([nn.BatchNorm2d(16)] if norm else []), *layers)

        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.blocks = nn.ModuleList(block() for _ in range(blocks))
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(torch.relu(x).mean((2, 3)))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn = kind(12, 16, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1])


def plain(activation: type[nn.Module]) -> nn.Sequential:
    layers = [layer for _ in range(20) for layer in (nn.Linear(128, 128), activation())]
    return nn.Sequential(*layers, nn.Linear(128, 4))


def generator() -> nn.Module:
    return nn.Sequential(
        nn.ConvTranspose2d(32, 16, 4, stride=2),
        nn.ReLU(),
        nn.ConvTranspose2d(16, 16, 4, stride=2, groups=4),
        nn.ReLU(),
        nn.ConvTranspose2d(16, 3, 3),
    )


def encoder(first: bool) -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=first)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


CASES = {
    **{
        a.__name__: (lambda a=a: plain(a), (32, 128))
        for a in (nn.ReLU, nn.LeakyReLU, nn.ELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Softsign)
    },
    "resnet": (lambda: Residual(norm=False), (4, 3, 8, 8)),
    "resnet with norms": (lambda: Residual(norm=True), (4, 3, 8, 8)),
    "transposed": (generator, (4, 32, 4, 4)),
    "LSTM": (lambda: Recurrent(nn.LSTM), (4, 6, 12)),
    "GRU": (lambda: Recurrent(nn.GRU), (4, 6, 12)),
    "post-norm": (lambda: encoder(False), (4, 5, 32)),
    "pre-norm": (lambda: encoder(True), (4, 5, 32)),
}


@pytest.mark.parametrize("name", CASES)
def test_clean_after_initialize(name: str) -> None:
    build, shape = CASES[name]
    model, x = build(), torch.randn(shape)
    plan = ms.init.initialize(model, x, seed=3)
    audit = ms.init.audit(model, x, plan=plan)
    assert not audit, str(audit)
    assert {audit[entry.tensor].verdict for entry in plan} == {"as planned"}
    assert not ms.init.audit(model, x)
    assert not ms.init.audit(model)


@pytest.mark.parametrize("factor", [0.9, 1.1])
def test_a_tensor_that_misses_its_plan(factor: float) -> None:
    model, x = plain(nn.ReLU), torch.randn(32, 128)
    plan = ms.init.initialize(model, x)
    with torch.no_grad():
        model[4].weight *= factor
        model[6].bias += 0.01
    found = {f.tensor: f for f in ms.init.audit(model, x, plan=plan)}
    assert set(found) == {"4.weight", "6.bias"}
    evidence = found["4.weight"].evidence
    assert evidence["ratio"] == pytest.approx(factor, rel=0.02)
    low, high = evidence["interval"]
    assert low < evidence["expected"] < high
    # √((3 − 1)/(4·128²)) = 0.55 %; a z for 42 tensors, mean and spread, at 1 in 1000 is 4.4
    assert (high - low) / evidence["expected"] == pytest.approx(2 * 4.4 * math.sqrt(0.5) / 128, rel=0.05)


def test_another_models_plan() -> None:
    plan = ms.init.plan(nn.Sequential(nn.Linear(3, 2)), torch.randn(4, 3))
    with pytest.raises(ValueError, match="names none of its tensors"):
        ms.init.audit(nn.Linear(3, 2), plan=plan)
