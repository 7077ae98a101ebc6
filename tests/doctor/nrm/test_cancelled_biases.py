"""NRM301: a bias is reported exactly where it doesn't reach the output."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import musigma as ms
from musigma.doctor import examine
from musigma.doctor._examination import Examination


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def biases(model: nn.Module, x: Any, **options: Any) -> set[str]:
    found = examine(model, x, select=["NRM301"], **options)
    return {name for finding in found for name in finding.where}


def stack(*layers: nn.Module) -> nn.Sequential:
    """The layers, and a head that tells the outputs of a norm apart."""
    return nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(3, bias=False))


class Functional(nn.Module):
    """No norm module anywhere: own buffers, own bias, torch's two spellings of the function."""

    def __init__(self, spelled: str) -> None:
        super().__init__()
        self.spelled = spelled
        self.weight = nn.Parameter(normal(6, 4))
        self.shift = nn.Parameter(normal(6))
        self.register_buffer("average", torch.zeros(6))
        self.register_buffer("spread", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        z = x @ self.weight.T + self.shift
        if self.spelled == "torch":
            return torch.batch_norm(z, None, None, self.average, self.spread, True, 0.1, 1e-5, False)
        call = F.batch_norm if self.spelled == "functional" else ms.functional.batch_norm
        return call(z, self.average, self.spread, training=self.training)


class Sequence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(4, 6), nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.fc(x).transpose(1, 2)).mean(2)


IMAGES = (4, 3, 8, 8)
CANCELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], set[str]]] = {
    "linear": (lambda: stack(nn.Linear(4, 6), nn.BatchNorm1d(6)), (8, 4), {"0.bias"}),
    "conv1d": (lambda: stack(nn.Conv1d(3, 6, 3), nn.BatchNorm1d(6)), (8, 3, 9), {"0.bias"}),
    "conv2d": (lambda: stack(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)), IMAGES, {"0.bias"}),
    "conv3d": (lambda: stack(nn.Conv3d(3, 6, 3), nn.BatchNorm3d(6)), (4, 3, 5, 5, 5), {"0.bias"}),
    "transposed": (lambda: stack(nn.ConvTranspose2d(3, 6, 3), nn.BatchNorm2d(6)), IMAGES, {"0.bias"}),
    "grouped": (lambda: stack(nn.Conv2d(3, 6, 3, groups=3), nn.BatchNorm2d(6)), IMAGES, {"0.bias"}),
    "musigma": (lambda: stack(nn.Conv2d(3, 6, 3), ms.nn.BatchNorm2d(6)), IMAGES, {"0.bias"}),
    "instance norm": (lambda: stack(nn.Conv2d(3, 6, 3), nn.InstanceNorm2d(6)), IMAGES, {"0.bias"}),
    "one channel a group": (lambda: stack(nn.Conv2d(3, 6, 3), nn.GroupNorm(6, 6)), IMAGES, {"0.bias"}),
    "layer norm over positions": (
        lambda: stack(nn.Conv2d(3, 6, 3), nn.LayerNorm((6, 6))),
        IMAGES,
        {"0.bias"},
    ),
    "flattened": (lambda: stack(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.BatchNorm1d(72)), IMAGES, {"0.bias"}),
    "max pooling": (
        lambda: stack(nn.Conv2d(3, 6, 3), nn.MaxPool2d(2), nn.BatchNorm2d(6)),
        IMAGES,
        {"0.bias"},
    ),
    "pooled away": (
        lambda: stack(nn.Conv2d(3, 6, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.BatchNorm1d(6)),
        IMAGES,
        {"0.bias"},
    ),
    "inactive dropout": (
        lambda: stack(nn.Linear(4, 6), nn.Dropout(0.0), nn.BatchNorm1d(6)),
        (8, 4),
        {"0.bias"},
    ),
    "transposed sequence": (Sequence, (8, 5, 4), {"fc.bias"}),
    "layer norm's own bias": (lambda: stack(nn.LayerNorm(4), nn.BatchNorm1d(4)), (8, 4), {"0.bias"}),
    "functional": (lambda: Functional("functional"), (8, 4), {"shift"}),
    "torch": (lambda: Functional("torch"), (8, 4), {"shift"}),
    "musigma.functional": (lambda: Functional("musigma"), (8, 4), {"shift"}),
    "nested": (
        lambda: nn.Sequential(stack(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)))),
        (8, 4),
        {"0.0.0.bias"},
    ),
}


@pytest.mark.parametrize("name", CANCELS)
def test_bias_that_a_norm_subtracts_again(name: str) -> None:
    make, shape, expected = CANCELS[name]
    model, x = make(), normal(*shape)
    model(x)
    assert biases(model, x) == expected


@pytest.mark.parametrize("name", CANCELS)
def test_reported_biases_really_change_nothing(name: str) -> None:
    make, shape, _ = CANCELS[name]
    model, x = make(), normal(*shape)
    model(x)
    model, x = model.double(), x.double()
    moved = copy.deepcopy(model)
    with torch.no_grad():
        for bias in biases(model, x):
            moved.get_parameter(bias).add_(normal(*moved.get_parameter(bias).shape).double())
    # float64, values of order 1, a few dozen operations each
    torch.testing.assert_close(moved(x), model(x), rtol=0, atol=1e-12)


class Bypass(nn.Module):
    """A linear layer and a norm, with something that keeps its bias alive."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.fc, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.other = nn.Linear(4, 4, bias=False)
        if way == "tied":
            self.other.bias = self.fc.bias

    def forward(self, x: Tensor) -> Any:
        z = self.fc(x)
        match self.way:
            case "skip":
                return self.norm(z) + z
            case "residual sum":
                return self.norm(z + x)
            case "returned":
                return self.norm(z), z
            case "penalty":
                return self.norm(z), self.fc.bias.square().sum()
            case "reused without a norm":
                return self.fc(self.norm(z).relu())
            case "tied":
                return self.other(self.norm(z).relu())
            case "padded pooling":
                pooled = F.avg_pool1d(z[:, :, None].expand(-1, -1, 4), 2, padding=1)
                return self.norm(pooled)
        raise AssertionError(self.way)


COUNTS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "layer norm": (lambda: stack(nn.Linear(4, 6), nn.LayerNorm(6)), (8, 4)),
    "layer norm over channels too": (lambda: stack(nn.Conv2d(3, 6, 3), nn.LayerNorm((6, 6, 6))), IMAGES),
    "channels in a group": (lambda: stack(nn.Conv2d(3, 6, 3), nn.GroupNorm(2, 6)), IMAGES),
    "rms norm": (lambda: stack(nn.Linear(4, 6), nn.RMSNorm(6)), (8, 4)),
    "activation": (lambda: stack(nn.Linear(4, 6), nn.ReLU(), nn.BatchNorm1d(6)), (8, 4)),
    "active dropout": (lambda: stack(nn.Linear(4, 6), nn.Dropout(0.5), nn.BatchNorm1d(6)), (8, 4)),
    "norm over another axis": (lambda: stack(nn.Linear(4, 6), nn.BatchNorm1d(5)), (8, 5, 4)),
    "stored statistics": (lambda: stack(nn.Linear(4, 6), nn.BatchNorm1d(6)).eval(), (8, 4)),
    "frozen": (lambda: stack(nn.Linear(4, 6), ms.nn.FrozenBatchNorm1d(6)), (8, 4)),
    "no bias": (lambda: stack(nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6)), (8, 4)),
    "after the norm": (lambda: stack(nn.BatchNorm1d(4), nn.Linear(4, 6)), (8, 4)),
    **{
        way: (lambda way=way: Bypass(way), (8, 4))
        for way in (
            "skip", "residual sum", "returned", "penalty", "reused without a norm", "tied", "padded pooling",
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("name", COUNTS)
def test_bias_that_counts_is_left_alone(name: str) -> None:
    make, shape = COUNTS[name]
    model, x = make(), normal(*shape)
    model(x)
    assert biases(model, x) == set()


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.fc(self.norm(self.fc(x)).relu()))


def test_layer_that_runs_twice_and_is_cancelled_twice() -> None:
    (finding,) = examine(Shared(), normal(8, 4), select=["NRM301"])
    assert finding.where == ("fc.bias",)
    assert finding.evidence["biases"]["fc.bias"]["norms"] == ["norm", "norm"]


def test_evidence_is_the_measured_gradient() -> None:
    x, y = normal(64, 8), torch.arange(64) % 3
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    (finding,) = examine(model, x, y, loss=F.cross_entropy, select=["NRM301"])
    F.cross_entropy(model(x), y).backward()
    found = finding.evidence["biases"]["0.bias"]
    assert finding.severity == "info"
    assert finding.evidence["wasted"] == found["size"] == 16
    assert found["weight_gradient"] == pytest.approx(model[0].weight.grad.abs().max().item(), rel=1e-5)
    # A sum of 64 terms that cancels: 64 roundings of the largest of them.
    largest = model[0].weight.grad.abs().max().item()
    assert found["gradient"] <= 64 * torch.finfo(torch.float32).eps * largest
    assert found["gradient"] == pytest.approx(model[0].bias.grad.abs().max().item(), abs=1e-7)


def test_frozen_part_of_a_training_model_subtracts_nothing_of_the_batch() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))
    model[1].eval()
    assert biases(model, normal(8, 4), intent="finetune") == set()


def test_model_about_to_train_is_judged_in_train_mode() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2)).eval()
    assert biases(model, normal(8, 4), intent="train") == {"0.bias"}
    assert biases(model, normal(8, 4), intent="inference") == set()
    assert not model.training


@pytest.mark.parametrize("layer", [nn.Linear(4, 6), nn.Conv1d(4, 6, 1)], ids=["linear", "conv"])
def test_whatever_surgery_would_remove_in_train_mode_is_reported(layer: nn.Module) -> None:
    x = normal(8, 4) if isinstance(layer, nn.Linear) else normal(8, 4, 5)
    model = nn.Sequential(layer, nn.BatchNorm1d(6), nn.ReLU())
    exam = Examination(model, x)
    assert {c.name for c in exam.cancelled_biases} == {"0.bias"}
