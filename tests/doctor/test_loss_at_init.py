"""A fresh net that does better than it can: a loss that is none, or targets among the inputs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from nets import labels, normal
from torch import Tensor, nn

from musigma.doctor import Finding, examine, treat

Loss = Any


def found(net: nn.Module, x: Tensor, y: Tensor, loss: Loss, **options: Any) -> list[Finding]:
    return list(examine(net, x, y, loss=loss, select=["INI210"], **options).by_code("INI210"))


def net(*behind: nn.Module, classes: int = 5, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, classes), *behind)


@pytest.mark.parametrize("classes", [2, 5, 100])
@pytest.mark.parametrize("examples", [16, 63, 256])
@pytest.mark.parametrize("last", [(), (nn.Softmax(dim=1),)], ids=["raw", "softmax"])
def test_a_negative_log_likelihood_of_what_is_no_logarithm(
    last: tuple[nn.Module, ...], examples: int, classes: int
) -> None:
    x, y = normal(examples, 16), labels(examples, classes)
    (finding,) = found(net(*last, classes=classes), x, y, nn.NLLLoss())
    assert "log_softmax" in finding.message
    assert finding.evidence["answers"] == ("softmax" if last else "raw")
    assert finding.evidence["loss"] < finding.evidence["chance"] == pytest.approx(math.log(classes))
    assert not found(net(nn.LogSoftmax(dim=1), classes=classes), x, y, nn.NLLLoss())
    assert not found(net(classes=classes), x, y, nn.CrossEntropyLoss())


def test_a_negative_log_likelihood_of_raw_maps() -> None:
    torch.manual_seed(0)
    maps = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1))
    x, y = normal(16, 3, 8, 8), labels(16 * 36, 4).reshape(16, 6, 6)
    assert found(maps, x, y, nn.NLLLoss())
    assert not found(maps, x, y, nn.CrossEntropyLoss())


class Leaky(nn.Module):
    """Hands the first columns of its input to its output."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.classes = nn.Linear(16 + classes, 32), nn.Linear(32, classes), classes

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.first(x))) + 8 * x[:, : self.classes]


@pytest.mark.parametrize("classes", [2, 10])
def test_targets_among_the_inputs(classes: int) -> None:
    y = labels(128, classes)
    x = torch.cat([F.one_hot(y, classes).float(), normal(128, 16)], 1)
    (finding,) = found(Leaky(classes), x, y, nn.CrossEntropyLoss())
    assert "leaked" in finding.message
    x[:, :classes] = 0
    assert not found(Leaky(classes), x, y, nn.CrossEntropyLoss())


@pytest.mark.parametrize("share", [0.5, 0.9, 0.99, 1.0])
@pytest.mark.parametrize("head", [0.0, 1.0, 3.0])
def test_a_bias_that_suits_frequent_classes_is_no_leak(share: float, head: float) -> None:
    y = (torch.arange(200) >= share * 200).long()
    model = net(classes=2)
    with torch.no_grad():
        model[2].bias.copy_(torch.tensor([head, 0.0]))
    assert not found(model, normal(200, 16), y, nn.CrossEntropyLoss())
    binary = net(nn.Flatten(0), classes=1)
    with torch.no_grad():
        binary[2].bias.fill_(-head)
    assert not found(binary, normal(200, 16), y.float(), nn.BCEWithLogitsLoss())


@pytest.mark.parametrize("classes", [2, 3, 6, 10])
def test_classes_that_a_random_net_tells_apart_by_luck_are_no_leak(classes: int) -> None:
    """Tight clusters: every one gets its own answer, for two classes the right ones every other time."""
    y = labels(128, classes)
    for seed in range(12):
        centres = normal(classes, 16, seed=seed) * 1.5
        model = net(classes=classes, seed=seed)
        for layer in model[::2]:
            nn.init.kaiming_normal_(layer.weight)
        x = centres[y] + 0.1 * normal(128, 16, seed=seed + 100)
        assert not [f for f in found(model, x, y, nn.CrossEntropyLoss()) if "leaked" in f.message]


def test_a_net_that_hands_its_input_on_may_start_at_a_small_error() -> None:
    class Restore(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return x + 0.1 * self.layer(x)

    x = normal(128, 16)
    assert not found(Restore(), x, x, nn.MSELoss())


@pytest.mark.parametrize(
    ("last", "loss"),
    [((), nn.CrossEntropyLoss()), ((nn.LogSoftmax(dim=1),), nn.NLLLoss())],
    ids=["cross entropy", "likelihood"],
)
def test_a_fitted_net_may_be_below_chance(last: tuple[nn.Module, ...], loss: Loss) -> None:
    model, x = net(*last, classes=8), normal(256, 16)
    y = x[:, :8].argmax(1)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(150):
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
    optimizer.zero_grad()
    assert loss(model(x), y) < 0.4 * math.log(8)
    assert not found(model, x, y, loss)


@pytest.mark.parametrize("intent", ["inference", "finetune"])
def test_a_pretrained_net_may_be_below_chance(intent: Any) -> None:
    assert not found(net(), normal(64, 16), labels(64, 5), nn.NLLLoss(), intent=intent)


def test_no_treatment_for_a_loss_that_is_none() -> None:
    model, x, y = net(), normal(64, 16), labels(64, 5)
    _, record = treat(model, examine(model, x, y, loss=nn.NLLLoss(), select=["INI210"]))
    assert [(g.kept, "below chance" in g.reason) for g in record.given if "INI210" in g.codes] == [
        (False, True)
    ]
