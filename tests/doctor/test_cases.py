"""Public failure reports of the area `diagnose`, and C90's part that is the doctor's."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from musigma.doctor import examine


def test_default_init_in_a_deep_relu_stack_c90() -> None:
    """pytorch#15314: Var(W)·fan_in is 1/3, not 2; each layer keeps 1/6; the samples become one."""
    torch.manual_seed(0)
    net = nn.Sequential(*(m for _ in range(20) for m in (nn.Linear(256, 256), nn.ReLU())))
    report = examine(net, torch.randn(512, 256))

    (gain,) = report.by_code("INI202")
    assert len(gain.where) == 20
    for value in gain.evidence["var_times_fan_in"].values():
        assert value == pytest.approx(1 / 3, rel=0.02)  # sd of a variance of 65536 uniform values: 0.35 %
    assert list(gain.evidence["wanted"].values()) == pytest.approx([2.0] * 20)
    assert gain.evidence["factor"] == pytest.approx(1 / 6, rel=0.02)

    (collapse,) = report.by_code("INI207")
    assert collapse.severity == "error"
    assert collapse.evidence["last_between_over_rms"] < 1e-6


def test_he_keeps_a_deep_relu_stack_alive_c90() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*(m for _ in range(20) for m in (nn.Linear(256, 256), nn.ReLU())))
    for layer in net[::2]:
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        nn.init.zeros_(layer.bias)
    assert examine(net, torch.randn(512, 256)).codes == ()


def all_zero(hidden: tuple[int, ...] = (16,)) -> nn.Sequential:
    sizes = (8, *hidden, 21)
    net = nn.Sequential(*(m for a, b in pairwise(sizes) for m in (nn.Linear(a, b), nn.ReLU())))[:-1]
    for p in net.parameters():
        nn.init.zeros_(p)
    return net


@pytest.mark.parametrize("hidden", [(16,), (16, 16), (32, 16, 8)], ids=["c93", "three", "four"])
def test_all_zero_weights_freeze_the_loss_at_ln_c(hidden: tuple[int, ...]) -> None:
    """caffe#3: the loss stays at ln 21 = 3.0445, and only the last bias gets a gradient."""
    net = all_zero(hidden)
    x, y = torch.randn(210, 8, generator=torch.Generator().manual_seed(0)), torch.arange(210) % 21
    report = examine(net, x, y, loss=nn.CrossEntropyLoss())

    (gradient,) = report.by_code("GRD504")
    assert gradient.severity == "error"
    last = len(net) - 1
    assert set(gradient.where) == {n for n, _ in net.named_parameters()} - {f"{last}.bias"}
    assert gradient.evidence["loss"] == pytest.approx(math.log(21), abs=1e-5)
    assert "3.0445" in gradient.message
    assert "ln 21" in gradient.message
    assert set(gradient.evidence["all_zero"]) == {n for n, _ in net.named_parameters()}
    assert "INI201" in report.codes


def test_a_zero_last_layer_alone_is_harmless_c93() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 21))
    nn.init.zeros_(net[2].weight)
    nn.init.zeros_(net[2].bias)
    x, y = torch.randn(210, 8), torch.arange(210) % 21
    for loss in (nn.CrossEntropyLoss(), None):
        assert examine(net, x, y, loss=loss).codes == ()


def test_a_relu_behind_the_last_layer_of_a_regression_c95() -> None:
    """MVCNN-TensorFlow#14: for one seed in three every output is dead from the start."""
    dead = found = 0
    for seed in range(40):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 1), nn.ReLU())
        x = torch.rand(128, 5)
        report = examine(
            net, x, x.sum(1, keepdim=True), loss=nn.MSELoss(), select=["SIG405", "SIG406", "GRD504"]
        )
        born_dead = not net(x).any()
        dead += born_dead
        found += "SIG405" in report.codes
        assert ("SIG406" in report.codes) == born_dead
        if born_dead:
            assert {"SIG405", "GRD504"} <= set(report.codes)
            assert report.by_code("SIG405")[0].where == ("3",)
    assert found == dead > 5


def test_a_relu_behind_the_logits_c95() -> None:
    net = nn.Sequential(nn.Linear(5, 3), nn.ReLU())
    nn.init.constant_(net[0].bias, -5.0)
    x = torch.rand(6, 5, generator=torch.Generator().manual_seed(3))
    report = examine(net, x, torch.zeros(6, dtype=torch.long), loss=nn.CrossEntropyLoss())
    assert {"SIG405", "SIG406", "GRD504"} <= set(report.codes)
    assert "1.0986" in report.by_code("SIG405")[0].message
    assert "relu follows" in report.by_code("SIG405")[0].message


@pytest.mark.parametrize("activation", ["relu", "clamp", "functional", "inplace", "relu6"])
def test_a_rectified_output_is_found_however_it_is_written_c95(activation: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(5, 16), nn.Linear(16, 3)
            self.relu = nn.ReLU(inplace=True)

        def forward(self, x: Tensor) -> Tensor:
            out = self.last(torch.tanh(self.first(x)))
            written = {
                "relu": torch.relu, "functional": F.relu, "inplace": self.relu, "relu6": F.relu6,
                "clamp": lambda t: F.threshold(t, 0.0, 0.0),
            }  # fmt: skip
            return written[activation](out)

    torch.manual_seed(0)
    x = torch.randn(64, 5)
    report = examine(Net(), x, torch.arange(64) % 3, loss=F.cross_entropy)
    assert "SIG406" in report.codes


@pytest.mark.parametrize("norm", ["layer", "group", "batch", "instance"])
def test_the_probe_loss_sees_through_a_centred_norm_c96(norm: str) -> None:
    """pytorch#63541: the sum of a centred norm's output has no gradient; the doctor's probe loss has one."""
    made = {
        "layer": nn.LayerNorm(32), "group": nn.GroupNorm(4, 32), "batch": nn.BatchNorm1d(32),
        "instance": nn.Sequential(nn.Unflatten(1, (4, 8)), nn.InstanceNorm1d(4), nn.Flatten()),
    }  # fmt: skip
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), made[norm])
    report = examine(net, torch.randn(64, 8))
    assert "GRD504" not in report.codes
    norms = {row["name"]: row["gradient_norm"] for row in report.measurements["parameters"]}
    # A sum would leave rounding: 1e-7 beside a mean-reduced loss of this size.
    assert norms["0.weight"] > 1e-3


def test_a_caller_s_sum_behind_a_norm_is_reported_as_it_is_c96() -> None:
    """Who passes the sum gets what it gives: a gradient that is rounding, and no crash."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32, elementwise_affine=False))
    report = examine(net, torch.randn(64, 8), loss=lambda out: out.sum())
    assert report.measurements["loss_source"] == "given"
