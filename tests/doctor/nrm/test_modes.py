"""NRM307, 314, 315 and 318: what differs between the modes, and between batch mates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import musigma as ms
from musigma.doctor import Finding, Report, examine
from musigma.doctor._examination import Examination
from musigma.doctor.probes._modes import compare_modes


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def judged(model: nn.Module, x: Any, code: str, **options: Any) -> Report:
    return examine(model, x, select=[code], **options)


def only(model: nn.Module, x: Any, code: str, **options: Any) -> Finding:
    (finding,) = judged(model, x, code, **options)
    return finding


def passed(model: nn.Module, x: Tensor, times: int) -> nn.Module:
    for _ in range(times):
        model(x)
    return model


def mlp(*, norm: Callable[[int], nn.Module] = nn.BatchNorm1d, p: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 32), norm(32), nn.ReLU(), nn.Dropout(p), nn.Linear(32, 32), norm(32), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(32, 3))


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(8))
        self.register_buffer("spread", torch.ones(8))
        self.scale, self.shift = nn.Parameter(torch.ones(8)), nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.average, self.spread, self.scale, self.shift, self.training)


# ---------------------------------------------------------------- NRM307


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, ms.nn.BatchNorm1d], ids=["torch", "musigma"])
@pytest.mark.parametrize("training", [True, False])
def test_gap_is_measured_and_the_layer_named(norm: Callable[[int], nn.Module], training: bool) -> None:
    x = normal(256, 8)
    model = passed(mlp(norm=norm), x, 100)
    model[5].running_mean += 3
    finding = only(model.train(training), x, "NRM307")
    assert finding.where == ("5",)
    with torch.no_grad():
        evaluated, trained = model.eval()(x), model.train()(x)
    apart = (trained - evaluated).square().mean().sqrt()
    assert finding.evidence["difference"] == pytest.approx(apart.item(), rel=1e-4)
    spread = evaluated.var(0, correction=0).mean().sqrt()
    assert finding.evidence["relative"] == pytest.approx((apart / spread).item(), rel=1e-4)
    assert finding.evidence["layers"]["5"]["own"] > 10 * finding.evidence["layers"]["1"]["own"]


def test_c92_at_the_first_layer() -> None:
    x = normal(512, 10) * 3 + 100
    model = nn.Sequential(
        nn.BatchNorm1d(10, momentum=0.001), nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU()
    )
    finding = only(passed(model, x, 60), x, "NRM307", intent="train")
    assert (finding.where, finding.severity) == (("0",), "error")


def test_functional_form() -> None:
    model = Functional()
    model.average += 5
    assert only(model, normal(64, 8), "NRM307").where == ("",)


def test_instance_norm_that_tracks_is_another_layer_in_eval_mode() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(32, 4, 1, generator=generator) * 5 + torch.randn(32, 4, 20, generator=generator)
    model = nn.Sequential(nn.InstanceNorm1d(4, track_running_stats=True), nn.Flatten(), nn.Linear(80, 3))
    finding = only(passed(model, x, 100).eval(), x, "NRM307")
    assert finding.where == ("0",)
    assert finding.evidence["layers"]["0"]["own"] > 1


def test_instance_norm_that_tracks_is_blamed_itself_behind_a_layer() -> None:
    """What comes before is the same in both modes; every example's statistics are not the running ones."""
    torch.manual_seed(0)
    norm = nn.InstanceNorm1d(8, affine=True, track_running_stats=True)
    behind = (nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(8, 4))
    x, model = normal(64, 3, 20), nn.Sequential(nn.Conv1d(3, 8, 3), norm, *behind)
    passed(model, x, 60)
    finding = only(model, x, "NRM307")
    assert finding.where == ("1",)
    assert "'1' normalizes every example by its own statistics in training" in finding.message
    assert "comes before" not in finding.message
    assert finding.evidence["layers"]["1"]["own"] < 0.5
    assert "track_running_stats=False" in finding.fix
    model[1] = nn.InstanceNorm1d(8, affine=True)
    assert judged(model, x, "NRM307").codes == ()


def test_dropout_before_batchnorm_shifts_the_variance() -> None:
    """Trained at the variance that dropout makes, evaluated without it (Li et al. 2019).

    A ReLU turns the missing spread into another mean, so the gap shows in the second BatchNorm, whose own
    statistics are right.
    """
    torch.manual_seed(0)
    first = [nn.Linear(8, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU()]
    model = nn.Sequential(*first, nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 3))
    x = normal(256, 8) + 3
    finding = only(passed(model, x, 60).eval(), x, "NRM307")
    assert finding.where == ("7",)
    assert finding.evidence["layers"]["7"]["own"] < 0.1
    assert finding.evidence["draws"] > 2
    assert "dropout" in finding.fix


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm1d(4, affine=False),
        ms.nn.BatchNorm1d(4, affine=False, eps=0.1),
        nn.InstanceNorm1d(4, track_running_stats=True),
    ],
    ids=["batch", "musigma", "instance"],
)
def test_gap_of_a_layer_is_the_one_of_its_outputs(norm: nn.Module) -> None:
    x = (normal(16, 4, 7) * 3 + normal(16, 4, 1, seed=1)).double()
    norm.double()
    norm.running_mean += normal(4).double()
    norm.running_var *= 2
    (measure,) = Examination(norm, x).channels
    stored = {name: b.clone() for name, b in norm.named_buffers()}
    trained = norm(x)
    norm.load_state_dict(stored)
    apart = (trained - norm.eval()(x)).square().mean().sqrt().item()
    # eps is the only thing that the formula leaves out: x̂² averages var/(var + eps), not 1.
    assert measure.gap() == pytest.approx(apart, rel=0.02)


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_noise_of_dropout_is_no_gap(p: float) -> None:
    x = normal(256, 8)
    model = passed(mlp(p=p), x, 100)
    assert judged(model, x, "NRM307").codes == ()
    assert judged(model.eval(), x, "NRM307", intent="inference").codes == ()


@pytest.mark.parametrize("intent", [None, "train", "finetune"])
@pytest.mark.parametrize("updates", [0, 1, 10])
def test_run_that_has_just_begun_is_expected_to_differ(intent: Any, updates: int) -> None:
    x = normal(64, 8) * 3 + 20
    assert judged(passed(mlp(), x, updates), x, "NRM307", intent=intent).codes == ()


def test_small_batches_differ_by_chance() -> None:
    model = mlp()
    for seed in range(100):
        model(normal(64, 8, seed=seed))
    for seed in range(200, 206):
        assert judged(model.eval(), normal(8, 8, seed=seed), "NRM307").codes == ()


def test_frozen_part_is_the_same_in_both_modes() -> None:
    x = normal(256, 8)
    model = passed(mlp(), x, 60)
    model[1].running_mean -= 2
    model[1].eval()
    passed(model, x, 60)
    assert compare_modes(model, x, Examination(model, x).modes).output.relative < 0.5
    assert "1" not in {w for f in judged(model, x, "NRM307", intent="finetune") for w in f.where}


@pytest.mark.parametrize("model", [nn.Linear(8, 3), nn.Sequential(nn.Dropout(0.5), nn.LayerNorm(8))])
def test_models_without_running_statistics(model: nn.Module) -> None:
    assert judged(model, normal(64, 8), "NRM307").codes == ()


def test_batch_of_one_can_t_be_compared() -> None:
    model = passed(mlp(), normal(64, 8), 100).eval()
    model[1].running_mean += 5
    assert judged(model, normal(1, 8), "NRM307").codes == ()


def test_sampling_error_is_the_one_of_the_batch() -> None:
    """One BatchNorm: the error of its outputs over batches of n is √(1/n + x̂²/2n), 1.5/n on average."""
    x = normal(64, 2000)
    model = nn.BatchNorm1d(2000, affine=False)
    model.running_mean += 5
    compared = compare_modes(model, x, {"": True})
    # 2000 channels; halves of 32 estimate the variance 4 % too small.
    assert compared.sampling == pytest.approx((1.5 / 64) ** 0.5, rel=0.1)


# ---------------------------------------------------------------- NRM314


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(8), ms.nn.BatchNorm1d(8), Functional()])
@pytest.mark.parametrize("intent", [None, "train", "finetune"])
def test_frozen_weights_and_moving_statistics(norm: nn.Module, intent: Any) -> None:
    """C36: requires_grad_(False) freezes weight and bias, and nothing else."""
    model = nn.Sequential(norm.requires_grad_(False), nn.Linear(8, 2))
    x = normal(64, 8) * 4 + 10
    finding = only(model, x, "NRM314", intent=intent)
    assert finding.where == ("0",)
    assert len(finding.evidence["layers"]["0"]["frozen"]) == 2
    # Both kinds register the mean first.
    average = next(norm.buffers())
    before = average.clone()
    model(x)
    moved = ((average - before).abs() / (x.var(0, correction=0) + 1e-5).sqrt()).max().item()
    assert finding.evidence["layers"]["0"]["mean_moves"] == pytest.approx(moved, rel=1e-4)


def test_c36_alone() -> None:
    norm = nn.BatchNorm1d(3).requires_grad_(False)
    assert only(norm, normal(64, 3) * 4 + 10, "NRM314").where == ("",)


def test_frozen_for_good_or_not_at_all_is_silent() -> None:
    x = normal(64, 8)
    frozen = nn.Sequential(nn.BatchNorm1d(8).requires_grad_(False), nn.Linear(8, 2))
    assert judged(frozen, x, "NRM314", intent="inference").codes == ()
    converted = ms.nn.FrozenBatchNorm1d.convert(passed(frozen, x, 1))
    assert judged(converted, x, "NRM314", intent="finetune").codes == ()
    learning = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 2))
    assert judged(learning, x, "NRM314", intent="finetune").codes == ()
    learning[0].requires_grad_(False).eval()
    assert judged(learning, x, "NRM314", intent="finetune").codes == ()
    assert judged(nn.BatchNorm1d(8, affine=False), x, "NRM314").codes == ()
    half = nn.BatchNorm1d(8)
    half.weight.requires_grad_(False)
    assert judged(half, x, "NRM314").codes == ()
    layer = nn.Sequential(nn.LayerNorm(8).requires_grad_(False), nn.Linear(8, 2))
    assert judged(layer, x, "NRM314", intent="finetune").codes == ()


def test_frozen_model_in_eval_mode_that_is_about_to_be_finetuned() -> None:
    model = nn.Sequential(nn.BatchNorm1d(8).requires_grad_(False), nn.Linear(8, 2)).eval()
    assert only(model, normal(64, 8), "NRM314", intent="finetune").where == ("0",)


# ---------------------------------------------------------------- NRM315


class Forgetful(nn.Module):
    """`F.dropout` without `training=`: eval() doesn't reach it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.dropout(x, 0.5))


class Attentive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(8, 4, num_layers=2, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0]


LEFT_ON: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str, str]] = {
    "batch norm": (lambda: nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 2)), (16, 8), "norms", "0"),
    "musigma": (lambda: nn.Sequential(ms.nn.BatchNorm1d(8), nn.Linear(8, 2)), (16, 8), "norms", "0"),
    "functional": (Functional, (16, 8), "norms", ""),
    "instance norm": (lambda: nn.InstanceNorm1d(8, track_running_stats=True), (16, 8, 5), "norms", ""),
    "dropout": (lambda: nn.Sequential(nn.Dropout(0.1), nn.Linear(8, 2)), (16, 8), "dropouts", "0"),
    "attention": (Attentive, (4, 5, 8), "dropouts", "attention"),
    "recurrent": (Recurrent, (4, 5, 8), "dropouts", "rnn"),
}


@pytest.mark.parametrize("name", LEFT_ON)
def test_forgotten_eval(name: str) -> None:
    make, shape, key, path = LEFT_ON[name]
    model, x = make(), normal(*shape)
    finding = only(model, x, "NRM315", intent="inference")
    assert finding.evidence[key] == [path]
    assert finding.severity == "error"
    assert judged(model.eval(), x, "NRM315", intent="inference").codes == ()


@pytest.mark.parametrize("intent", [None, "train", "finetune"])
def test_train_mode_is_right_for_training(intent: Any) -> None:
    assert judged(mlp(p=0.5), normal(64, 8), "NRM315", intent=intent).codes == ()


def test_dropout_that_eval_doesn_t_reach() -> None:
    finding = only(Forgetful().eval(), normal(16, 8), "NRM315", intent="inference")
    assert finding.evidence["forced"] == [""]
    assert "training=self.training" in finding.fix


def test_one_layer_left_behind() -> None:
    model = mlp(p=0.5).eval()
    model[3].train()
    assert only(model, normal(64, 8), "NRM315", intent="inference").where == ("3",)


def test_layers_that_are_the_same_in_both_modes_are_silent() -> None:
    model = nn.Sequential(
        nn.Linear(8, 8), nn.LayerNorm(8), nn.Dropout(0.0), nn.BatchNorm1d(8, track_running_stats=False)
    )
    assert judged(model, normal(64, 8), "NRM315", intent="inference").codes == ()


def test_single_request_that_doesn_t_fail() -> None:
    finding = only(nn.BatchNorm2d(3), normal(1, 3, 4, 4), "NRM315", intent="inference")
    assert finding.evidence["gap"] >= 0


def test_single_request_that_fails() -> None:
    """C98: inference left in train mode; a single example raises."""
    report = examine(nn.Sequential(nn.BatchNorm1d(3)), normal(1, 3), intent="inference", select=["NRM"])
    assert {"NRM303", "NRM315"} <= set(report.codes)


# ---------------------------------------------------------------- NRM318


def test_output_that_depends_on_batch_mates() -> None:
    """C98: the same sample in different batches gives different outputs."""
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(3)
    for _ in range(200):
        norm(torch.randn(64, 3) * 2 + 1)
    x = torch.randn(4, 3) * 2 + 1
    finding = only(norm, x, "NRM318", independent=True)
    assert finding.where == ("",)
    assert finding.evidence["origins"] == [{"op": "batch_norm", "module": ""}]
    apart = (norm(x)[:2] - norm(x[[0, 1, 0, 1]])[:2]).abs().max().item()
    assert finding.evidence["difference"] == pytest.approx(apart, rel=1e-5)
    assert finding.evidence["difference"] > 1e-5
    assert judged(norm.eval(), x, "NRM318", independent=True).codes == ()


class Batchwise(nn.Module):
    """Attention that takes the batch for the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]


class OverExamples(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.fc = way, nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        z = self.fc(x)
        match self.way:
            case "softmax":
                return z.softmax(0)
            case "mean":
                return z - z.mean(0)
            case "last":
                return self.fc(x) + x[-1:, :5]
            case "own softmax":
                return z.softmax(1)
        raise AssertionError(self.way)


@pytest.mark.parametrize(
    ("model", "shape", "op"),
    [
        (Batchwise(), (6, 5, 8), "multi_head_attention"),
        (OverExamples("softmax"), (6, 8), "softmax"),
        (OverExamples("mean"), (6, 8), "sub"),
        (OverExamples("last"), (6, 8), "add"),
        (Functional(), (6, 8), "batch_norm"),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()), (5, 3, 6, 6), "batch_norm"),
        (nn.Sequential(ms.nn.BatchNorm1d(8)), (2, 8), "batch_norm"),
    ],
)
def test_where_the_dependence_comes_in(model: nn.Module, shape: tuple[int, ...], op: str) -> None:
    finding = only(model, normal(*shape), "NRM318", independent=True)
    assert [origin["op"] for origin in finding.evidence["origins"]] == [op]


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Dropout(0.5), nn.Linear(16, 2)), (63, 8)),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4)), (5, 3, 6, 6)),
        (nn.Sequential(nn.Linear(8, 300), nn.RMSNorm(300), nn.GELU(), nn.Linear(300, 2)), (100, 8)),
        (Attentive(), (4, 5, 8)),
        (Recurrent(), (4, 5, 8)),
        (OverExamples("own softmax"), (6, 8)),
        (mlp(norm=ms.nn.FrozenBatchNorm1d), (16, 8)),
        (mlp().eval(), (16, 8)),
    ],
)
def test_independent_examples_agree_up_to_rounding(model: nn.Module, shape: tuple[int, ...]) -> None:
    assert judged(model, normal(*shape), "NRM318", independent=True).codes == ()
    half = model.bfloat16()
    assert judged(half, normal(*shape).bfloat16(), "NRM318", independent=True).codes == ()


def test_nobody_asked() -> None:
    report = judged(nn.BatchNorm1d(8), normal(16, 8), "NRM318")
    assert report.codes == ()
    assert report.skipped == {"NRM318": "needs independent"}


def test_one_example_has_no_mates() -> None:
    assert judged(nn.BatchNorm2d(3), normal(1, 3, 4, 4), "NRM318", independent=True).codes == ()


def test_inputs_by_name_and_by_place() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, a: Tensor, b: Tensor) -> dict[str, Tensor]:
            return {"sum": a + b, "norm": self.norm(b)}

    a, b = normal(6, 4), normal(6, 4, seed=1)
    assert only(Two(), (a, b), "NRM318", independent=True).where == ("norm",)
    assert only(Two(), {"a": a, "b": b}, "NRM318", independent=True).where == ("norm",)
