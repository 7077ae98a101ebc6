"""Units that are off for every example: behind norms and dropout, and however the rectifier is written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from nets import normal
from torch import Tensor, nn

import musigma as ms
from musigma.doctor import Finding, examine, treat

Fun = Callable[[Tensor], Tensor]


class Apply(nn.Module):
    def __init__(self, function: Fun) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


RECTIFIERS: dict[str, nn.Module] = {
    "ReLU": nn.ReLU(),
    "inplace": nn.ReLU(inplace=True),
    "ReLU6": nn.ReLU6(),
    "relu6": Apply(F.relu6),
    "Hardtanh": nn.Hardtanh(0.0, 4.0),
    "Threshold": nn.Threshold(0.0, 0.0),
    "clamp": Apply(lambda h: h.clamp(min=0)),
    "clamp_min": Apply(lambda h: h.clamp_min(0.0)),
    "clamp both": Apply(lambda h: torch.clamp(h, 0, 6)),
    "maximum": Apply(lambda h: torch.maximum(h, torch.zeros_like(h))),
    "maximum of zeros": Apply(lambda h: torch.maximum(torch.zeros(()), h)),
    "where": Apply(lambda h: torch.where(h > 0, h, 0.0)),
    "mask": Apply(lambda h: h * (h > 0)),
}  # fmt: skip


def found(net: nn.Module, x: Tensor) -> list[Finding]:
    return list(examine(net, x, select=["INI209"]).by_code("INI209"))


def layer(bias: float, off: int = 50) -> nn.Linear:
    torch.manual_seed(0)
    made = nn.Linear(8, 64)
    with torch.no_grad():
        made.bias[:off] = bias
    return made


@pytest.mark.parametrize("name", RECTIFIERS)
def test_dead_units_however_the_rectifier_is_written(name: str) -> None:
    torch.manual_seed(1)
    sick = nn.Sequential(layer(-50.0, 64), RECTIFIERS[name], nn.Linear(64, 3))
    (finding,) = found(sick, normal(64, 8))
    assert finding.where == ("0.weight", "0.bias")
    assert finding.severity == "error"
    assert finding.evidence["dead"] == 64
    assert not found(nn.Sequential(layer(0.0), RECTIFIERS[name], nn.Linear(64, 3)), normal(64, 8))


@pytest.mark.parametrize(
    "function",
    [
        lambda h: h.clamp(min=-1),
        lambda h: h.clamp(max=0),
        lambda h: torch.maximum(h, -torch.ones_like(h)),
        lambda h: F.hardtanh(h),
        lambda h: torch.where(h > 0, h, -1.0),
        lambda h: h * (h.flip(1) > 0),
    ],
    ids=["clamp -1", "clamp max", "maximum -1", "hardtanh", "where -1", "foreign mask"],
)
def test_other_clipping_is_no_rectifier(function: Fun) -> None:
    net = nn.Sequential(layer(-50.0, 64), Apply(function), nn.Linear(64, 3))
    assert not found(net, normal(64, 8))


NORMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "BatchNorm1d": (lambda: nn.BatchNorm1d(64), (8,)),
    "musigma BatchNorm1d": (lambda: ms.nn.BatchNorm1d(64), (8,)),
    "LayerNorm": (lambda: nn.LayerNorm(64), (8,)),
    "LayerNorm on tokens": (lambda: nn.LayerNorm(64), (5, 8)),
    "GroupNorm": (lambda: nn.GroupNorm(8, 64), (8,)),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(64), (8, 6, 6)),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(64, affine=True), (8, 6, 6)),
}


def normed(name: str, bias: float, *behind: nn.Module, off: int = 50) -> tuple[nn.Sequential, Tensor]:
    make, shape = NORMS[name]
    torch.manual_seed(0)
    first = nn.Linear(8, 64) if len(shape) < 3 else nn.Conv2d(8, 64, 3)
    norm = make()
    with torch.no_grad():
        norm.bias[:off] = bias
    head = nn.Linear(64, 3) if len(shape) < 3 else nn.Conv2d(64, 3, 1)
    return nn.Sequential(first, norm, *(behind or (nn.ReLU(),)), head), normal(64, *shape)


@pytest.mark.parametrize("off", [20, 50, 64])
@pytest.mark.parametrize("name", NORMS)
def test_dead_units_behind_a_norm_name_its_bias(name: str, off: int) -> None:
    net, x = normed(name, -50.0, off=off)
    (finding,) = found(net, x)
    assert finding.where == ("1.bias",)
    assert finding.evidence["dead"] == off
    assert "its bias is -50" in finding.message
    assert (finding.severity == "error") == (off == 64)


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_as_it_starts_kills_nothing(name: str) -> None:
    assert not found(*normed(name, 0.0))
    assert not found(*normed(name, -0.5, off=64))


def test_dead_units_behind_a_norm_that_is_fused_with_its_activation() -> None:
    torch.manual_seed(0)
    norm = ms.nn.NormAct(nn.BatchNorm1d(64), nn.ReLU())
    net = nn.Sequential(nn.Linear(8, 64), norm, nn.Linear(64, 3))
    assert not found(net, normal(64, 8))
    name = next(n for n, p in net.named_parameters() if n.startswith("1.") and n.endswith("bias"))
    nn.init.constant_(net.get_parameter(name), -50.0)
    (finding,) = found(net, normal(64, 8))
    assert finding.where == (name,)


def test_dead_units_of_a_norm_whose_weight_is_zero_name_its_weight() -> None:
    net, x = normed("BatchNorm1d", 0.0)
    nn.init.zeros_(net[1].weight)
    (finding,) = found(net, x)
    assert finding.where == ("1.weight",)


def test_a_norm_without_a_part_in_it_isn_t_blamed() -> None:
    net = nn.Sequential(layer(-50.0, 64), nn.RMSNorm(64), nn.ReLU(), nn.Linear(64, 3))
    (finding,) = found(net, normal(64, 8))
    assert finding.where == ("0.weight", "0.bias")


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dead_units_behind_dropout(p: float) -> None:
    for bias in (0.0, -50.0):
        net = nn.Sequential(layer(bias), nn.Dropout(p), nn.ReLU(), nn.Linear(64, 3))
        assert bool(found(net, normal(64, 8))) == bool(bias)


@pytest.mark.parametrize("examples", [2, 3, 8])
def test_what_dropout_zeroes_in_every_example_by_chance_isn_t_dead(examples: int) -> None:
    for seed in range(5):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(8, 256), nn.Dropout(0.5), nn.ReLU(), nn.Linear(256, 3))
        assert not found(net, normal(examples, 8, seed=seed))


def test_dead_units_behind_norm_and_dropout_and_views() -> None:
    net, x = normed("BatchNorm1d", -50.0, nn.Dropout(0.2), nn.Unflatten(1, (8, 8)), nn.Flatten(), nn.ReLU())
    (finding,) = found(net, x)
    assert finding.where == ("1.bias",)


@pytest.mark.parametrize("name", ["BatchNorm1d", "LayerNorm", "BatchNorm2d"])
def test_the_treatment_puts_the_norm_back_and_draws_nothing(name: str) -> None:
    net, x = normed(name, -50.0)
    model, record = treat(net, examine(net, x, select=["INI209"]))
    assert "INI209" in record.mended
    assert not model[1].bias.any()
    assert torch.equal(model[0].weight, net[0].weight)
