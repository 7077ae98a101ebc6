"""What was trained is left in peace."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import musigma as ms


def train(model: nn.Module, steps: int, shape: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, *shape, generator=generator)
    y = (x.flatten(1)[:, :4].sum(1) > 0).long()
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for step in range(steps):
        batch = slice(step * 64 % 256, step * 64 % 256 + 64)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
    return x[:32]


MODELS = {
    "mlp": (
        lambda: nn.Sequential(
            nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2)
        ),
        (16,),
        True,
    ),
    "cnn": (
        lambda: nn.Sequential(
            nn.Conv1d(1, 32, 3),
            nn.BatchNorm1d(32),
            nn.ReLU(),
            nn.Conv1d(32, 32, 3),
            nn.BatchNorm1d(32),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * 12, 2),
        ),
        (1, 16),
        True,
    ),
    # Six entries a tensor fit any law: nothing is said either way.
    "tiny": (lambda: nn.Sequential(nn.Linear(16, 3), nn.Tanh(), nn.Linear(3, 2)), (16,), None),
}


@pytest.mark.parametrize("steps", [0, 3, 100])
@pytest.mark.parametrize("name", MODELS)
def test_no_alarm(name: str, steps: int) -> None:
    build, shape, told = MODELS[name]
    model = build()
    x = train(model, steps, shape)
    for audit in (ms.init.audit(model), ms.init.audit(model, x)):
        assert not audit
        if steps == 100 and told:
            assert audit.trained
            assert "trained" in str(audit)
        if steps == 0:
            assert not audit.trained


def test_a_trained_model_with_a_new_head_that_nothing_wrote() -> None:
    model = MODELS["mlp"][0]()
    x = train(model, 100, (16,))
    with torch.no_grad():
        model[4].weight.fill_(float("nan"))
        model[2].weight.zero_()
    assert [(f.tensor, f.code) for f in ms.init.audit(model, x)] == [
        ("2.weight", "unwritten"),
        ("4.weight", "unwritten"),
    ]
