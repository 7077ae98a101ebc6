"""Probes measure what they say: against brute force, Monte Carlo, and numbers computed by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from healthy import HEALTHY
from nets import Block, labels, normal
from torch import Tensor, nn

from musigma.doctor._examination import Examination
from musigma.doctor.probes._layers import LayerMeasure
from musigma.doctor.probes._losses import chance_of
from musigma.doctor.probes._nodes import across_examples, dead_by_chance, flat_fraction
from musigma.doctor.probes._signal import relu_cosine
from musigma.doctor.probes._stacks import drift, find_stacks
from musigma.doctor.probes._step import silent
from musigma.doctor.probes._summary import merged, overall
from musigma.statistics import moments


@pytest.mark.parametrize("shape", [(2, 1), (5, 7), (4, 3, 6), (100, 2)])
def test_the_mean_cosine_is_that_of_all_pairs(shape: tuple[int, ...]) -> None:
    x = normal(*shape).double() + 0.5
    flat = x.flatten(1)
    n = len(flat)
    products = flat @ flat.T
    pairs = (products.sum() - products.diagonal().sum()) / (n * (n - 1))
    between, cosine = across_examples(moments(x, 0))
    # Two ways to sum a few hundred products of order one.
    assert cosine == pytest.approx(float(pairs / products.diagonal().mean()), rel=1e-12)
    assert between == pytest.approx(float(flat.var(0, unbiased=False).mean()), rel=1e-12)


@pytest.mark.parametrize("shape", [(1, 5), (0, 5), (3, 0)])
def test_one_example_or_none_has_no_cosine(shape: tuple[int, ...]) -> None:
    assert all(map(math.isnan, across_examples(moments(torch.zeros(shape), 0))))


def test_equal_examples_have_cosine_one_and_no_variance() -> None:
    between, cosine = across_examples(moments(normal(1, 6).expand(8, 6), 0))
    assert (between, cosine) == (0.0, pytest.approx(1.0, abs=1e-12))


@pytest.mark.parametrize("shape", [(1, 3), (7, 1, 5), (63, 4, 3, 2)])
@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_merged_sets_have_the_moments_of_all_values(shape: tuple[int, ...], offset: float) -> None:
    x = normal(*shape).double() + offset
    per = moments(x, 0)
    for found, wanted in ((merged(per), overall(x)), (merged(per, [0]), moments(x, [0, 1]))):
        assert torch.equal(
            found.count.broadcast_to(found.mean.shape), wanted.count.broadcast_to(wanted.mean.shape)
        )
        assert torch.allclose(found.mean, wanted.mean, rtol=1e-15)
        # Deviations of order 1 from a mean of 1e6 are known to 1e-10.
        assert torch.allclose(found.m2, wanted.m2, rtol=1e-9)


@pytest.mark.parametrize(("c", "next_c"), [(0.0, 0.3183), (0.3183, 0.4937), (1.0, 1.0), (-1.0, 0.0)])
def test_the_relu_map_of_cosines(c: float, next_c: float) -> None:
    assert relu_cosine(c) == pytest.approx(next_c, abs=1e-4)


def test_the_relu_map_reaches_the_published_depths() -> None:
    c, seen = 0.0, {}
    for depth in range(1, 101):
        c = relu_cosine(c)
        seen[depth] = c
    assert [round(seen[d], 4) for d in (5, 10, 100)] == [0.7359, 0.8715, 0.9964]
    # 1 − c → 9π²/2l², reached within a tenth at a hundred layers.
    assert (1 - c) * 100**2 / (9 * math.pi**2 / 2) == pytest.approx(1, rel=0.2)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_unlike_examples_leave_a_unit_off_by_chance_once_in_two_to_the_n(count: int) -> None:
    share = dead_by_chance(normal(4096, count), None)
    # Of 256 mixtures: four standard errors.
    expected = 0.5**count
    assert share == pytest.approx(expected, abs=4 * (expected * (1 - expected) / 256) ** 0.5)


def test_like_examples_leave_half_of_the_units_off() -> None:
    units = normal(512, 1).expand(512, 64)
    assert dead_by_chance(units, None) == pytest.approx(0.5, abs=4 * 0.5 / 16)


def test_a_common_bias_counts_with_a_random_sign() -> None:
    units, bias = normal(512, 64), torch.full((512,), -50.0)
    assert dead_by_chance(units, bias) == pytest.approx(0.5, abs=4 * 0.5 / 16)
    assert dead_by_chance(units, torch.zeros(512)) == 0


def test_flat_parts_of_squashing_functions() -> None:
    y = torch.tensor([-0.999, -0.9, 0.0, 0.9, 0.999])
    assert flat_fraction("tanh", y) == pytest.approx(0.4)
    assert flat_fraction("sigmoid", torch.tensor([0.001, 0.1, 0.5, 0.999])) == pytest.approx(0.5)
    assert math.isnan(flat_fraction("relu", y))


LAYERS: dict[str, tuple[Any, Any]] = {
    "linear": (lambda: nn.Linear(12, 40), lambda: normal(32, 12)),
    "linear on sequences": (lambda: nn.Linear(12, 40, bias=False), lambda: normal(8, 5, 12)),
    "conv": (lambda: nn.Conv2d(4, 40, 3), lambda: normal(16, 4, 7, 9)),
    "padded conv": (lambda: nn.Conv2d(4, 40, 3, padding=1), lambda: normal(16, 4, 5, 5)),
    "strided dilated conv": (lambda: nn.Conv1d(4, 40, 3, stride=2, dilation=2), lambda: normal(16, 4, 21)),
    "grouped conv": (lambda: nn.Conv2d(8, 40, 3, groups=4), lambda: normal(16, 8, 6, 6)),
    "depthwise conv": (lambda: nn.Conv2d(40, 40, 3, groups=40), lambda: normal(16, 40, 6, 6)),
    "same conv": (lambda: nn.Conv2d(4, 40, 3, padding="same"), lambda: normal(16, 4, 5, 5)),
    "transposed conv": (
        lambda: nn.ConvTranspose2d(8, 40, 4, stride=2, padding=1),
        lambda: normal(16, 8, 5, 5),
    ),
    "grouped transposed": (
        lambda: nn.ConvTranspose1d(8, 40, 4, stride=2, groups=2),
        lambda: normal(16, 8, 9),
    ),
    "conv without batch axis": (lambda: nn.Conv2d(4, 40, 3), lambda: normal(4, 9, 9)),
}


def layer_of(net: nn.Module, x: Tensor) -> LayerMeasure:
    (layer,) = Examination(net, x).trace.layers
    return layer


@pytest.mark.parametrize("offset", [0.0, 0.5], ids=["centred", "shifted"])
@pytest.mark.parametrize("name", list(LAYERS))
def test_independent_weights_give_the_second_moment_that_is_predicted(name: str, offset: float) -> None:
    make, data = LAYERS[name]
    torch.manual_seed(0)
    net, x = make(), data() + offset
    produced = []
    for _ in range(40):
        nn.init.normal_(net.weight, mean=0.05, std=0.2)
        produced.append(float(net(x).detach().square().mean()))
    layer = layer_of(net, x)
    # The last draw's own mean and variance differ from the true ones, and 40 draws leave a few percent.
    assert layer.independent == pytest.approx(sum(produced) / len(produced), rel=0.15)
    assert layer.produced == pytest.approx(produced[-1], rel=1e-6)


@pytest.mark.parametrize(
    ("net", "x", "fans", "units"),
    [
        (nn.Linear(12, 40), normal(4, 12), (12, 40), 40),
        (nn.Conv2d(8, 16, 3, groups=4), normal(2, 8, 5, 5), (18, 36), 16),
        (nn.Conv2d(8, 16, 3, stride=2), normal(2, 8, 5, 5), (72, 36), 16),
        (nn.ConvTranspose2d(8, 6, 4, stride=2), normal(2, 8, 5, 5), (32, 96), 6),
        (nn.ConvTranspose2d(8, 6, 4, stride=2, groups=2), normal(2, 8, 5, 5), (16, 48), 6),
    ],
)
def test_fans_count_what_is_summed(net: nn.Module, x: Tensor, fans: tuple[float, float], units: int) -> None:
    layer = layer_of(net, x)
    assert (layer.fan_in, layer.fan_out, layer.units) == (*fans, units)


BINARY = (normal(64, 3) > 0).float()


@pytest.mark.parametrize(
    ("loss", "targets", "output", "kind", "value"),
    [
        (F.cross_entropy, labels(64, 5), normal(64, 5), "cross_entropy", math.log(5)),
        (nn.CrossEntropyLoss(), labels(64, 2), normal(64, 2), "cross_entropy", math.log(2)),
        (F.nll_loss, labels(64, 5), F.log_softmax(normal(64, 5), 1), "cross_entropy", math.log(5)),
        (F.cross_entropy, labels(64, 5).reshape(16, 4), normal(16, 5, 4), "cross_entropy", math.log(5)),
        (
            lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten()),
            labels(64, 5).reshape(16, 4), normal(16, 4, 5), "cross_entropy", math.log(5),
        ),
        (nn.BCEWithLogitsLoss(), BINARY, normal(64, 3), "binary_cross_entropy", math.log(2)),
        (nn.BCELoss(), BINARY, normal(64, 3).sigmoid(), "binary_cross_entropy", math.log(2)),
        (nn.MSELoss(), normal(64, 3) * 2 + 9, normal(64, 3), "mean_squared_error", None),
        (nn.CrossEntropyLoss(label_smoothing=0.1), labels(64, 5), normal(64, 5), None, None),
        (nn.CrossEntropyLoss(weight=torch.arange(1.0, 6.0)), labels(64, 5), normal(64, 5), None, None),
        (nn.CrossEntropyLoss(ignore_index=0), labels(64, 5), normal(64, 5), None, None),
        (nn.CrossEntropyLoss(reduction="sum"), labels(64, 5), normal(64, 5), None, None),
        (nn.SmoothL1Loss(), normal(64, 3), normal(64, 3, seed=1) * 3, None, None),
        (nn.MultiMarginLoss(), labels(64, 5), normal(64, 5), None, None),
    ],
)  # fmt: skip
def test_plain_losses_are_recognised_by_their_value(
    loss: Any, targets: Tensor, output: Tensor, kind: Any, value: Any
) -> None:
    found = chance_of(output, targets, float(loss(output, targets)))
    assert (None if found is None else found.kind) == kind
    if found is not None:
        expected = float(targets.double().var(0, unbiased=False).mean()) if value is None else value
        assert found.value == pytest.approx(expected, rel=1e-9)
        assert found.error > 0


def test_a_drift_counts_what_finite_width_does_by_chance() -> None:
    found = drift(1.0, 0.5**10, [100] * 10)
    assert found is not None
    assert found.factor == pytest.approx(0.5)
    assert found.spread == pytest.approx((10 * 5 / 100) ** 0.5)
    assert found.significant
    narrow = drift(1.0, 0.5**10, [4] * 10)
    assert narrow is not None
    assert not narrow.significant
    assert drift(1.0, 0.0, [4]) is None
    assert drift(1.0, math.nan, [4]) is None


def test_the_width_s_chance_is_that_of_gaussian_relu_nets() -> None:
    """ln‖x‖² of 300 nets of 15 layers and width 64: variance 15·5/64, mean −half of it."""
    generator = torch.Generator().manual_seed(0)
    x = torch.ones(300, 64)
    for _ in range(15):
        w = torch.randn(300, 64, 64, generator=generator) * (2 / 64) ** 0.5
        x = torch.relu(torch.einsum("nij,nj->ni", w, x))
    total = x.double().square().mean(1).log()
    found = drift(1.0, 1.0, [64] * 15)
    assert found is not None
    # Of 300 draws: the standard deviation to 4 %, the mean to 0.06; and 5/n is the leading term in 1/n.
    assert float(total.std()) == pytest.approx(found.spread, rel=0.15)
    assert float(total.mean()) == pytest.approx(found.expected, abs=0.2)


def modules(net: nn.Module, x: Any, **options: Any) -> list[tuple[list[str], bool]]:
    trace = Examination(net, x).trace
    stacks = find_stacks(trace.graph, trace.layers, **options)
    return [([layer.node.module for layer in s.layers], s.head) for s in stacks]


def test_stacks_run_through_what_keeps_the_scale() -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Dropout(0.1),
        nn.Conv2d(4, 4, 2), nn.GELU(), nn.Flatten(), nn.Linear(16, 8), nn.BatchNorm1d(8),
        nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2),
    )  # fmt: skip
    x = normal(8, 3, 8, 8)
    assert modules(net, x) == [(["0", "4", "7"], False), (["9", "11"], True)]
    assert modules(net, x, through_norms=True) == [(["0", "4", "7", "9", "11"], True)]


def test_stacks_end_at_sums() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), Block(8, 8, 1), nn.Flatten(), nn.Linear(8 * 16, 2))
    assert modules(net, normal(4, 3, 4, 4), through_norms=True) == [
        (["0", "1.conv1", "1.conv2"], False),
        (["3"], True),
    ]


@pytest.mark.parametrize(
    ("name", "steps"), [("zero_head", 1), ("rezero", 1), ("fixup", 2), ("adaln_zero", 2), ("lora", 1)]
)
def test_sleeping_parameters_wake_one_after_the_other(name: str, steps: int) -> None:
    torch.manual_seed(0)
    case = HEALTHY[name]()
    exam = Examination(case.model, case.inputs, case.targets, loss=case.loss)
    trainable = [n for n, p in exam.parameters.items() if p.requires_grad]
    assert silent(exam.trace, trainable)
    assert exam.settled.count == steps
    assert not silent(exam.settled.after, trainable)


def test_running_statistics_are_reported_as_they_were() -> None:
    net = nn.Sequential(nn.BatchNorm1d(4, momentum=0.5), nn.BatchNorm1d(4, momentum=0.5))
    x = normal(64, 4) * 3 + 7
    net(x)
    before = [m.running_mean.clone() for m in net]
    norms = Examination(net, x).trace.norms
    assert [n.path for n in norms] == ["0", "1"]
    assert [n.tracked for n in norms] == [1, 1]
    for norm, mean in zip(norms, before, strict=True):
        assert norm.running_mean is not None
        assert torch.equal(norm.running_mean, mean)
        assert norm.elements == 64
    assert torch.allclose(norms[0].statistics.mean.float(), x.mean(0), rtol=1e-5)


@pytest.mark.parametrize(
    ("net", "shape", "kind", "elements", "count"),
    [
        (nn.LayerNorm(6), (4, 5, 6), "layer_norm", 6, 20),
        (nn.LayerNorm((5, 6)), (4, 5, 6), "layer_norm", 30, 4),
        (nn.RMSNorm(6), (4, 5, 6), "rms_norm", 6, 20),
        (nn.GroupNorm(2, 6), (4, 6, 3), "group_norm", 9, 8),
        (nn.InstanceNorm1d(6), (4, 6, 3), "instance_norm", 3, 24),
        (nn.BatchNorm2d(6), (4, 6, 3, 2), "batch_norm", 24, 6),
    ],
)
def test_every_norm_s_statistics(
    net: nn.Module, shape: tuple[int, ...], kind: str, elements: int, count: int
) -> None:
    (norm,) = Examination(net, normal(*shape)).trace.norms
    assert (norm.kind, norm.elements, norm.statistics.mean.numel()) == (kind, elements, count)


def test_entries_are_what_reaches_the_first_weights() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.a, self.b = nn.BatchNorm1d(4), nn.Linear(4, 8), nn.Linear(3, 8)
            self.late = nn.Linear(8, 2)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.late(F.relu(self.a(self.norm(x)) + self.b(y / 255)))

    x, y = normal(64, 4) + 9, torch.randint(256, (64, 3), generator=torch.Generator().manual_seed(0))
    entries = Examination(Net(), (x, y)).trace.entries
    assert [(e.node.module, e.inputs, e.normalized) for e in entries] == [
        ("a", ("x",), True),
        ("b", ("y",), False),
    ]
    assert entries[1].high <= 1
    assert not entries[1].integral


def test_the_condition_number_is_that_of_least_squares_with_a_bias() -> None:
    x = normal(500, 3).double() * torch.tensor([1.0, 10.0, 0.1]) + torch.tensor([0.0, 5.0, 1.0])
    (entry,) = Examination(nn.Linear(3, 1).double(), x).trace.entries
    design = torch.cat([torch.ones(500, 1, dtype=x.dtype), x], 1)
    assert entry.condition == pytest.approx(float(torch.linalg.cond(design.T @ design)), rel=1e-6)
    assert entry.condition_standardized == pytest.approx(1, rel=0.3)


@pytest.mark.parametrize("kind", ["repeated", "constant"])
def test_features_without_a_direction_of_their_own_don_t_spoil_the_condition_number(kind: str) -> None:
    x = normal(500, 3).double()
    x[:, 2] = x[:, 1] if kind == "repeated" else 4.0
    (entry,) = Examination(nn.Linear(3, 1).double(), x).trace.entries
    assert entry.condition is not None
    assert entry.condition < 10
