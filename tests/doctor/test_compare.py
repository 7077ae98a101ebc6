"""Two models train on the same batches, from the same seeds, and neither is changed."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest
import torch
from nets import labels, normal
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from musigma.doctor import Case, compare
from musigma.doctor.report import _training

X, Y = normal(128, 8), labels(128, 4)


def net(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 4)
    )


def case(model: nn.Module, **more: Any) -> Case:
    settings: dict[str, Any] = {
        "loss": nn.CrossEntropyLoss(),
        "optimizer": lambda ps: torch.optim.SGD(ps, lr=0.1),
        "loader": DataLoader(TensorDataset(X, Y), 32, shuffle=True),
        "test": (X, Y),
    }
    return Case(model, X[:32], Y[:32], **(settings | more))


def test_equal_models_train_equally_with_dropout_and_a_shuffled_loader() -> None:
    model = net(0.5)
    result = compare(case(model), copy.deepcopy(model), epochs=3)
    assert result.original.losses == result.treated.losses
    assert result.original.accuracies == result.treated.accuracies
    assert len(result.original.losses) == 12
    assert [step for step, _ in result.original.accuracies] == [0, 4, 8, 12]
    assert result.expected_loss == pytest.approx(math.log(4))


def test_nothing_is_changed() -> None:
    model, other = net(), net(0.5)
    before = [copy.deepcopy(m.state_dict()) for m in (model, other)]
    torch.manual_seed(3)
    state = torch.get_rng_state()
    compare(case(model), other, epochs=2)
    for m, kept in zip((model, other), before, strict=True):
        assert all(torch.equal(v, kept[k]) for k, v in m.state_dict().items())
        assert all(p.grad is None for p in m.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_the_losses_are_those_of_plain_training() -> None:
    model = net()
    loader = [(X[i : i + 32], Y[i : i + 32]) for i in range(0, 128, 32)]
    result = compare(case(model, loader=loader), model, epochs=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert result.original.losses == losses


@pytest.mark.parametrize("shared", [True, False], ids=["instance", "factory"])
def test_each_model_gets_an_optimizer_of_its_own(shared: bool) -> None:
    model = net()
    used = torch.optim.Adam(model.parameters(), lr=0.05)
    nn.functional.cross_entropy(model(X), Y).backward()
    used.step()
    optimizer = used if shared else lambda ps: torch.optim.Adam(ps, lr=0.05)
    result = compare(case(model, optimizer=optimizer), copy.deepcopy(model))
    fresh = compare(case(model, optimizer=lambda ps: torch.optim.Adam(ps, lr=0.05)), model)
    assert result.original.losses == result.treated.losses == fresh.original.losses


def test_steps_and_measurements_can_be_chosen() -> None:
    seen: list[tuple[str, int, int]] = []
    result = compare(
        case(net()), net(), epochs=9, steps=5, evaluate_every=2,
        progress=lambda name, step, total, loss: seen.append((name, step, total)),
    )  # fmt: skip
    assert len(result.treated.losses) == 5
    assert [step for step, _ in result.original.accuracies] == [0, 2, 4, 5]
    assert seen[:2] == [("original", 1, 5), ("treated", 1, 5)]
    assert len(seen) == 10


def test_a_scheduler_factory_steps_once_an_epoch() -> None:
    made = []

    def factory(optimizer: torch.optim.Optimizer) -> Any:
        made.append(torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1))
        return made[-1]

    compare(case(net(), scheduler=factory), net(), epochs=2)
    assert [s.last_epoch for s in made] == [2, 2]


def test_regressions_have_no_accuracy() -> None:
    model = nn.Linear(8, 1)
    result = compare(Case(model, X, loss=nn.MSELoss(), loader=[(X, X[:, :1])], test=(X, X[:, :1])), model)
    assert result.original.accuracies == []
    assert result.expected_loss is None
    assert result.original.steps_to(0.5) is None


@pytest.mark.parametrize("axis", [1, -1])
def test_accuracy_where_positions_have_classes(axis: int) -> None:
    y = labels(32 * 5, 3).reshape(32, 5)
    scores = nn.functional.one_hot(y, 3).float().movedim(-1, axis)
    model = nn.Linear(1, 1)

    class Oracle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return scores[: len(x)] * self.scale

    oracle = Oracle()
    loss = lambda out, t: -out.gather(axis, t.unsqueeze(axis)).mean()  # noqa: E731
    result = compare(
        Case(oracle, normal(32, 1), loss=loss, loader=[(normal(32, 1), y)], test=(normal(32, 1), y)), oracle
    )
    assert [a for _, a in result.original.accuracies] == [1.0, 1.0]
    assert model is not None


def test_the_report_can_draw_it() -> None:
    result = compare(case(net()), net())
    assert isinstance(result, _training.Comparison)
    assert isinstance(result.original, _training.Run)
    assert json.dumps(result.to_dict())
    assert [r.name for r in _training.comparison_rows(result)]


@pytest.mark.parametrize(
    ("more", "options", "said"),
    [
        ({"loader": None}, {}, "give the case a loader"),
        ({"loader": []}, {}, "gave none"),
        ({}, {"epochs": 0}, "epochs must be at least 1; got 0"),
        ({}, {"steps": 0}, "steps must be at least 1; got 0"),
    ],
)
def test_what_can_t_be_compared_is_refused(more: Any, options: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        compare(case(net(), **more), net(), **options)
