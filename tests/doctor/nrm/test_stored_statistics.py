"""NRM304, 305, 306, 309 and 326: what the running statistics say, and what is true."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import musigma as ms
from musigma.doctor import Finding, Report, examine, explain
from musigma.doctor._examination import Examination
from musigma.doctor.rules.nrm.nrm309_half_running_stats import stuck_distance


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


class Functional(nn.Module):
    """A BatchNorm without a module: buffers of other names, momentum in the call."""

    def __init__(self, momentum: float = 0.1, channels: int = 8) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(channels))
        self.register_buffer("spread", torch.ones(channels))
        self.rate = momentum

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.average, self.spread, training=self.training, momentum=self.rate)


# ---------------------------------------------------------------- NRM304


def poorly_tracked() -> tuple[nn.Module, Tensor, Tensor]:
    """The network of C92."""
    torch.manual_seed(0)
    x = torch.randn(512, 10) * 3 + 100
    y = ((x - 100) @ torch.randn(10) > 0).long()
    layers = [nn.BatchNorm1d(10, momentum=0.001), nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 2)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model, x, y


@pytest.mark.parametrize("intent", [None, "inference", "train", "finetune"])
def test_running_statistics_that_don_t_describe_the_data(intent: Any) -> None:
    """C92: accuracy 1.00 in train mode, 0.52 in eval mode, on the same data."""
    model, x, y = poorly_tracked()
    finding = only(model, x, "NRM304", intent=intent)
    norm, std = model[0], x.std(0)
    apart = (norm.running_mean - x.mean(0)).abs() / std
    ratios = norm.running_var / x.var(0)
    assert (finding.where, finding.severity) == (("0",), "error")
    assert finding.evidence["difference"] == pytest.approx(apart.max().item(), rel=1e-4)
    assert finding.evidence["difference"] == pytest.approx(32.6, abs=0.05)
    layer = finding.evidence["layers"]["0"]
    assert layer["variance_ratio"] == pytest.approx([ratios.min().item(), ratios.max().item()], rel=1e-4)
    assert layer["variance_ratio"][1] == pytest.approx(0.17, abs=0.005)
    assert (layer["momentum"], layer["updates"], finding.evidence["cause"]) == (0.001, 60, "momentum")
    assert layer["initial_weight"] == pytest.approx(0.999**60)
    assert "momentum 0.001 after 60 updates" in finding.message
    assert (model(x).argmax(1) == y).double().mean() > 0.95
    assert (model.eval()(x).argmax(1) == y).double().mean() < 0.7


def test_recalibration_ends_it_and_restores_the_accuracy() -> None:
    model, x, y = poorly_tracked()
    mended, _ = ms.surgery.recalibrate(model, [x])
    assert judged(mended.eval(), x, "NRM304").codes == ()
    assert (mended(x).argmax(1) == y).double().mean() > 0.95


@pytest.mark.parametrize("made", [nn.BatchNorm2d, ms.nn.BatchNorm2d], ids=["torch", "musigma"])
def test_images(made: Callable[..., nn.Module]) -> None:
    x = normal(16, 3, 6, 6) * 2 - 7
    model = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), passed(made(4), torch.zeros(4, 4, 3, 3), 60))
    finding = only(model.eval(), x, "NRM304")
    z = model[0](x)
    apart = (model[1].running_mean - z.mean((0, 2, 3))).abs() / z.std((0, 2, 3))
    assert finding.evidence["layers"]["1"]["difference"] == pytest.approx(apart.max().item(), rel=1e-4)
    assert finding.evidence["cause"] == "changed"


def test_functional_form_with_buffers_of_other_names() -> None:
    model = Functional()
    model.average.fill_(3.0)
    finding = only(model, normal(64, 8), "NRM304")
    assert finding.where == ("",)
    assert finding.evidence["layers"][""]["updates"] is None


def test_stale_layer_doesn_t_blame_the_ones_behind_it() -> None:
    x = normal(256, 8) * 3 + 50
    bad, good = nn.BatchNorm1d(8, momentum=0.001), nn.BatchNorm1d(8)
    model = passed(nn.Sequential(bad, nn.Linear(8, 8), good, nn.Linear(8, 2)), x, 100)
    assert only(model.eval(), x, "NRM304").where == ("0",)


def test_one_channel_among_many() -> None:
    x = normal(256, 64)
    model = passed(nn.BatchNorm1d(64), x, 100)
    model.running_mean[17] += 5
    finding = only(model.eval(), x, "NRM304")
    assert (finding.evidence["channel"], finding.evidence["layers"][""]["off"]) == (17, 1)


def test_spread_alone() -> None:
    x = normal(256, 8)
    model = passed(nn.BatchNorm1d(8), x, 100)
    model.running_var *= 9
    finding = only(model.eval(), x, "NRM304")
    assert finding.evidence["variance_ratio"] == pytest.approx(9, rel=0.01)


def test_momentum_none_averages_over_all_of_training() -> None:
    model = nn.BatchNorm1d(8, momentum=None)
    passed(model, normal(64, 8) + 100, 20)
    passed(model, normal(64, 8), 5)
    assert only(model.eval(), normal(64, 8), "NRM304").evidence["cause"] == "average"


def test_statistics_that_were_set_beside_a_counter_of_zero_are_judged() -> None:
    """Recalibrated or converted: what is stored has nothing initial in it, whatever the counter says."""
    x = normal(64, 8)
    model, _ = ms.surgery.recalibrate(nn.BatchNorm1d(8), [x])
    model.num_batches_tracked.zero_()
    assert judged(model, x, "NRM304").codes == ()
    finding = only(model, x + 9, "NRM304")
    assert finding.evidence["cause"] == "changed"
    assert finding.evidence["layers"][""]["initial_weight"] is None


def test_momentum_zero() -> None:
    x = normal(64, 8) + 10
    finding = only(passed(nn.BatchNorm1d(8, momentum=0.0), x, 60), x, "NRM304")
    assert finding.evidence["layers"][""]["initial_weight"] == 1.0


def test_instance_norm_that_tracks() -> None:
    x = normal(16, 4, 32) + 20
    model = passed(nn.InstanceNorm1d(4, momentum=0.001, track_running_stats=True), x, 20)
    finding = only(model.eval(), x, "NRM304")
    assert finding.evidence["difference"] == pytest.approx(20, rel=0.05)


@pytest.mark.parametrize("intent", [None, "inference"])
@pytest.mark.parametrize("examples", [4, 16, 64])
def test_sampling_error_is_forgiven(intent: Any, examples: int) -> None:
    model = nn.Sequential(nn.BatchNorm1d(32), nn.Linear(32, 2))
    for seed in range(60):
        model(normal(64, 32, seed=seed + 1))
    for seed in range(100, 105):
        assert judged(model, normal(examples, 32, seed=seed), "NRM304", intent=intent).codes == ()


@pytest.mark.parametrize("updates", [0, 1, 10])
def test_run_that_has_just_begun_is_silent_until_it_is_evaluated(updates: int) -> None:
    x = normal(64, 8) * 3 + 20
    model = passed(nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 2)), x, updates)
    assert judged(model, x, "NRM304").codes == ()
    assert judged(model, x, "NRM304", intent="train").codes == ()
    # A model that was never updated is NRM305's.
    assert judged(model.eval(), x, "NRM304", intent="inference").codes == (("NRM304",) if updates else ())


def test_frozen_on_purpose_is_not_judged() -> None:
    model = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 2))
    passed(model, normal(64, 8) + 9, 60)
    model[0].eval()
    assert judged(model, normal(64, 8), "NRM304", intent="finetune").codes == ()
    frozen = ms.nn.FrozenBatchNorm1d.convert(model)
    assert judged(frozen.eval(), normal(64, 8), "NRM304").codes == ()


def test_silent_channel_has_no_spread_to_be_measured_by() -> None:
    """A unit that was dead in this batch only: its mean is 0 where 0.001 is stored."""
    x = torch.relu(normal(64, 4) - 1)
    model = passed(nn.BatchNorm1d(4), x, 100)
    x[:, 2] = 0
    assert judged(model.eval(), x, "NRM304").codes == ()


def test_too_few_examples_to_tell() -> None:
    model = passed(nn.BatchNorm2d(3), normal(8, 3, 4, 4), 100)
    assert judged(model.eval(), normal(1, 3, 4, 4) + 9, "NRM304").codes == ()


# ---------------------------------------------------------------- NRM305


@pytest.mark.parametrize(
    "norm",
    [nn.BatchNorm1d(16), ms.nn.BatchNorm1d(16), ms.nn.FrozenBatchNorm1d(16)],
    ids=["torch", "ms", "frozen"],
)
def test_eval_with_initial_statistics(norm: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(8, 16), norm, nn.ReLU(), nn.Linear(16, 2)).eval()
    finding = only(model, normal(64, 8), "NRM305")
    assert (finding.where, finding.severity) == (("1",), "error")
    assert finding.evidence["layers"]["1"]["initial"]
    assert "NRM305" in judged(model, normal(64, 8), "NRM305", intent="inference").codes


def test_functional_form_is_asked_too() -> None:
    assert only(Functional().eval(), normal(64, 8), "NRM305").where == ("",)


@pytest.mark.parametrize("intent", [None, "train"])
def test_fresh_model_that_is_about_to_train_is_healthy(intent: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
    assert judged(model, normal(64, 8), "NRM305", intent=intent).codes == ()
    if intent == "train":
        assert judged(model.eval(), normal(64, 8), "NRM305", intent=intent).codes == ()


def test_finetuning_a_model_that_was_never_trained() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
    assert only(model, normal(64, 8), "NRM305", intent="finetune").where == ("1",)


def test_new_head_on_a_trained_model_is_fine_and_a_lost_buffer_is_not() -> None:
    body, head = nn.BatchNorm1d(8), nn.BatchNorm1d(8)
    model = nn.Sequential(body, nn.Linear(8, 8), head, nn.Linear(8, 2))
    passed(body, normal(64, 8) + 1, 50)
    assert judged(model, normal(64, 8), "NRM305", intent="finetune").codes == ()
    with torch.no_grad():
        head.weight += 0.1
    assert only(model, normal(64, 8), "NRM305", intent="finetune").where == ("2",)


def test_statistics_beside_a_counter_of_zero() -> None:
    """A converted checkpoint sets mean and variance and doesn't count: silent, and documented so."""
    assert "left alone on purpose" in explain("NRM305")
    model = nn.BatchNorm1d(8)
    model.running_mean += 0.3
    for intent in (None, "inference", "finetune"):
        assert judged(model.eval(), normal(64, 8), "NRM305", intent=intent).codes == ()
    model.momentum = None
    finding = only(model, normal(64, 8), "NRM305")
    assert (finding.severity, finding.evidence["layers"][""]["initial"]) == ("info", False)


def test_updated_statistics_are_silent() -> None:
    model = passed(nn.BatchNorm1d(8), normal(64, 8), 1)
    assert judged(model.eval(), normal(64, 8), "NRM305", intent="inference").codes == ()


# ---------------------------------------------------------------- NRM306


@pytest.mark.parametrize("momentum", [0.9, 0.95, 0.99, 0.997, 0.999])
@pytest.mark.parametrize(
    "made", [nn.BatchNorm1d, ms.nn.BatchNorm1d, nn.InstanceNorm1d], ids=["torch", "musigma", "instance"]
)
def test_momentum_of_the_other_convention(made: Callable[..., nn.Module], momentum: float) -> None:
    model = made(8, momentum=momentum, track_running_stats=True)
    finding = only(model, normal(16, 8, 5), "NRM306")
    assert finding.evidence["momentum"] == momentum
    # The exponential average with new weight m has the variance m/(2 − m) of a batch's.
    assert finding.evidence["batches"] == pytest.approx((2 - momentum) / momentum)
    assert f"momentum={1 - momentum:.4g}" in finding.fix


def test_worth_in_batches_is_what_an_average_of_random_batches_shows() -> None:
    finding = only(nn.BatchNorm1d(4, momentum=0.9), normal(16, 4), "NRM306")
    norm = nn.BatchNorm1d(5000, momentum=0.9, affine=False)
    for seed in range(20):
        norm(normal(8, 5000, seed=seed))
    variance = ms.moments(norm.running_mean, 0).var().item()
    # 5000 channels give a variance to √(2/5000) = 2 %.
    assert 1 / 8 / variance == pytest.approx(finding.evidence["batches"], rel=0.08)


def test_momentum_zero_never_moves_anything() -> None:
    finding = only(nn.BatchNorm1d(8, momentum=0.0), normal(16, 8), "NRM306")
    assert finding.evidence["batches"] == 0.0


@pytest.mark.parametrize("momentum", [0.001, 0.01, 0.1, 0.3, 0.5, 1.0, None])
def test_usual_momenta_are_silent(momentum: float | None) -> None:
    model = nn.BatchNorm1d(8, momentum=momentum)
    assert judged(model, normal(16, 8), "NRM306").codes == ()
    assert judged(model.eval(), normal(16, 8), "NRM306").codes == ()


def test_momentum_in_eval_mode_and_in_a_call() -> None:
    model = nn.Sequential(nn.BatchNorm1d(8, momentum=0.99), nn.Linear(8, 2)).eval()
    assert only(model, normal(16, 8), "NRM306").severity == "warning"
    assert only(model, normal(16, 8), "NRM306", intent="inference").severity == "info"
    assert only(Functional(momentum=0.99), normal(16, 8), "NRM306").where == ("",)


def test_momentum_of_something_else_is_not_meant() -> None:
    """A momentum encoder keeps 0.999 of its weights; its functional BatchNorm has torch's default."""
    model = Functional()
    model.momentum = 0.999
    assert judged(model, normal(16, 8), "NRM306").codes == ()
    assert judged(model.eval(), normal(16, 8), "NRM306").codes == ()


def test_no_running_statistics_no_momentum() -> None:
    model = nn.BatchNorm1d(8, momentum=0.99, track_running_stats=False)
    assert judged(model, normal(16, 8), "NRM306").codes == ()


# ---------------------------------------------------------------- NRM309


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_statistics_in_training(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2)).to(dtype)
    finding = only(model, normal(64, 8).to(dtype), "NRM309", intent="train")
    numbers = finding.evidence["layers"]["1"]
    assert (finding.where, finding.severity) == (("1",), "warning")
    # running_var is 1 = 2⁰: half a unit in the last place is eps/2, and momentum 0.1 makes it ten times that.
    assert numbers["stuck_var"] == pytest.approx(torch.finfo(dtype).eps / 2 / 0.1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("start", [0.3, 1.0, 1.9, 2.0, 700.0])
@pytest.mark.parametrize("momentum", [0.001, 0.1])
def test_stated_distance_is_where_updates_are_rounded_away(
    dtype: torch.dtype, start: float, momentum: float
) -> None:
    value = torch.tensor(start, dtype=dtype)
    distance = stuck_distance(value, momentum)

    def updated(apart: Tensor) -> Tensor:
        return (value.double() + momentum * apart).to(dtype)

    assert torch.equal(updated(0.99 * distance), value)
    assert not torch.equal(updated(1.01 * distance), value)


def test_variance_that_sticks_at_two() -> None:
    """C40: momentum 0.001 in bfloat16 leaves a running variance at 2.0 where 4.0 is right."""
    model = nn.BatchNorm1d(1, momentum=0.001).bfloat16()
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        model.running_var.fill_(2.0)
        model(torch.randn(64, 1, generator=generator).mul(2).bfloat16())
        assert model.running_var.item() == 2.0
    x = torch.randn(64, 1, generator=generator).mul(2).bfloat16()
    numbers = only(model, x, "NRM309").evidence["layers"][""]
    assert numbers["stuck_channels"] == 1
    assert numbers["stuck_var"] * 2.0 > abs(x.float().var().item() - 2.0)


def test_float16_that_overflowed_is_an_error_in_eval_mode_too() -> None:
    """C40: a variance of 10⁶ becomes infinite, and one of 10⁻⁸ zero."""
    model = nn.BatchNorm1d(3, momentum=1.0)
    x = normal(256, 3) * torch.tensor([1.0, 1000.0, 1e-4])
    model(x)
    model.half().eval()
    finding = only(model, x.half(), "NRM309")
    numbers = finding.evidence["layers"][""]
    assert (finding.severity, numbers["infinite"], numbers["vanished"]) == ("error", 1, 1)


def test_rounded_mean_in_eval_mode() -> None:
    x = normal(64, 4) * 0.1 + 30
    model = nn.BatchNorm1d(4, momentum=1.0)
    model(x)
    model.bfloat16().eval()
    finding = only(model, x.bfloat16().float().bfloat16(), "NRM309", intent="inference")
    assert finding.evidence["layers"][""]["rounded"] == 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("training", [True, False])
def test_the_advice_runs_and_ends_it(dtype: torch.dtype, training: bool) -> None:
    x = normal(64, 8).to(dtype)
    for norm in (nn.BatchNorm1d(8).to(dtype).float(), ms.nn.BatchNorm1d(8).to(dtype)):
        norm.train(training)
        assert norm(x).dtype == dtype
        assert judged(norm, x, "NRM309").codes == ()


def test_half_precision_inference_that_is_fine() -> None:
    model = passed(nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16)), normal(64, 8), 50)
    for dtype in (torch.float16, torch.bfloat16):
        model.to(dtype).eval()
        assert judged(model, normal(64, 8).to(dtype), "NRM309").codes == ()
        assert judged(model, normal(64, 8).to(dtype), "NRM309", intent="inference").codes == ()


def test_statistics_that_stay_float32_are_silent() -> None:
    model = nn.Sequential(nn.Linear(8, 16), ms.nn.BatchNorm1d(16)).bfloat16()
    assert judged(model, normal(64, 8).bfloat16(), "NRM309", intent="train").codes == ()
    assert judged(nn.BatchNorm1d(8), normal(64, 8), "NRM309").codes == ()
    assert judged(nn.BatchNorm1d(8).double(), normal(64, 8).double(), "NRM309").codes == ()


# ---------------------------------------------------------------- NRM326


def test_overflow_that_poisoned_one_channel() -> None:
    """C34: one infinite activation among fifty batches."""
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    for i in range(50):
        x = normal(8, 2, seed=i)
        if i == 3:
            x[0, 1] = math.inf
        model(x)
    found = {f.where[0]: f for f in judged(model, normal(8, 2), "NRM326", intent="train")}
    assert set(found) == {"0.running_mean", "0.running_var"}
    assert all(f.evidence["channels"] == [1] for f in found.values())
    assert found["0.running_mean"].evidence["infinite"] == 1
    assert found["0.running_var"].evidence["nan"] == 1
    # What can't be compared is not compared.
    assert judged(model, normal(64, 2), "NRM304").codes == ()


def test_negative_variance() -> None:
    """C37: a loader subtracted eps; variances of 4e-6 and 0 are honest."""
    model = nn.BatchNorm1d(3).eval()
    model.running_var.copy_(torch.tensor([1.0, 4e-6, 0.0]))
    assert judged(model, normal(4, 3), "NRM326").codes == ()
    model.running_var -= 1e-5
    finding = only(model, normal(4, 3), "NRM326")
    assert finding.where == ("running_var",)
    assert finding.evidence["channels"] == [1, 2]
    assert finding.evidence["lowest"] == pytest.approx(-1e-5)


def test_poisoned_buffers_of_a_functional_norm() -> None:
    model = Functional()
    model.spread[5] = -1
    finding = only(model.eval(), normal(8, 8), "NRM326")
    assert (finding.where, finding.evidence["channels"]) == (("spread",), [5])


def test_poisoned_statistics_are_named_when_the_model_raises() -> None:
    model = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(4, 2))
    model[0].running_mean[0] = math.nan
    assert only(model, normal(8, 8), "NRM326").where == ("0.running_mean",)


def test_negative_means_are_fine() -> None:
    model = nn.BatchNorm1d(8)
    model.running_mean -= 5
    assert judged(model.eval(), normal(8, 8), "NRM326").codes == ()


# ---------------------------------------------------------------- the probe


def test_statistics_are_those_before_the_run_and_nothing_moves() -> None:
    model = nn.Sequential(nn.BatchNorm1d(8), Functional(), ms.nn.BatchNorm1d(8))
    passed(model, normal(64, 8) + 1, 3)
    before = {name: b.clone() for name, b in model.named_buffers()}
    exam = Examination(model, normal(64, 8))
    first, second, third = exam.channels
    assert torch.equal(first.stored.mean, before["0.running_mean"])
    assert torch.equal(second.stored.var, before["1.spread"])
    assert torch.equal(third.stored.mean, before["2.running_mean"])
    assert (first.stored.tracked, second.stored.tracked, third.stored.tracked) == (3, None, 3)
    assert second.stored.names == ("1.average", "1.spread")
    assert all(torch.equal(b, before[name]) for name, b in model.named_buffers())


def test_mask_stays_out_of_the_statistics() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = ms.nn.BatchNorm1d(4)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.norm(x, mask=mask)

    x, mask = normal(16, 4, 6), torch.ones(16, 1, 6, dtype=torch.bool)
    mask[:, :, 4:], x[:, :, 4:] = False, 1e6
    (measure,) = Examination(Masked(), (x, mask)).channels
    torch.testing.assert_close(measure.batch.mean, x[:, :, :4].double().mean((0, 2)))
    assert measure.examples.mean.abs().max() < 5
