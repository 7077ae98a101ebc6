"""NRM302 and NRM303: statistics over few values, and over one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import musigma as ms
from musigma.doctor import Report, examine
from musigma.doctor._examination import Examination


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def judged(model: nn.Module, x: Any, **options: Any) -> Report:
    return examine(model, x, select=["NRM302", "NRM303"], **options)


def mlp(norm: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16, bias=False), norm, nn.ReLU(), nn.Linear(16, 2))


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(8))
        self.register_buffer("spread", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.average, self.spread, training=self.training)


# ---------------------------------------------------------------- too few


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(16), ms.nn.BatchNorm1d(16)], ids=["torch", "musigma"])
@pytest.mark.parametrize("examples", [2, 4])
def test_four_or_fewer_examples(norm: nn.Module, examples: int) -> None:
    (finding,) = judged(mlp(norm), normal(examples, 8), intent="train")
    assert finding.code == "NRM302"
    assert finding.where == ("1",)
    assert finding.evidence["effective"] == pytest.approx(examples)
    assert finding.evidence["sd_mean"] == pytest.approx(examples**-0.5)
    assert finding.evidence["sd_std"] == pytest.approx((2 / (4 * examples)) ** 0.5)


@pytest.mark.parametrize("examples", [8, 32, 63])
def test_usual_batches_are_silent(examples: int) -> None:
    assert judged(mlp(nn.BatchNorm1d(16)), normal(examples, 8), intent="train").codes == ()


def test_functional_form() -> None:
    (finding,) = judged(Functional(), normal(3, 8))
    assert (finding.code, finding.where) == ("NRM302", ("",))


def test_stated_deviations_are_those_of_many_batches() -> None:
    (finding,) = judged(nn.BatchNorm1d(4), normal(6, 4))
    batches = normal(20_000, 6, seed=1).double()
    found = ms.moments(batches, 1)
    means = ms.moments(found.mean, 0).std().item()
    # Of 20 000 batches the deviation is known to 1/√40 000 = 0.5 %.
    assert finding.evidence["sd_mean"] == pytest.approx(means, rel=0.02)
    # √(2/4M) is the limit for large M; at M = 6 it is 5 % above the truth.
    assert finding.evidence["sd_std"] == pytest.approx(ms.moments(found.std(), 0).std().item(), rel=0.1)


def test_positions_that_differ_count_and_copies_of_one_don_t() -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3 * 64, 2))
    noise = normal(4, 3, 8, 8)
    flat = normal(4, 3, 1, 1).expand(4, 3, 8, 8).contiguous()
    assert judged(model, noise, intent="train").codes == ()
    (finding,) = judged(model, flat, intent="train")
    assert finding.evidence["effective"] == pytest.approx(4)
    assert finding.evidence["layers"]["0"]["elements"] == 256


def test_effective_number_is_the_one_that_predicts_the_error_of_the_mean() -> None:
    """Images that are half an offset of their own, half noise: Var(mean) = (½ + ½/64)/n."""
    generator = torch.Generator().manual_seed(0)
    offset = torch.randn(400, 64, 1, 1, generator=generator)
    x = (offset + torch.randn(400, 64, 8, 8, generator=generator)) / 2**0.5
    (measure,) = Examination(nn.BatchNorm2d(64), x).channels
    # 400·64 draws of an offset give the ratio to 1 %.
    assert measure.effective == pytest.approx(400 / (0.5 + 0.5 / 64), rel=0.03)


def test_one_image_has_nothing_to_judge_its_pixels_by() -> None:
    (finding,) = judged(nn.BatchNorm2d(3), normal(1, 3, 8, 8), intent="train")
    assert (finding.code, finding.evidence["effective"]) == ("NRM302", 1.0)


@pytest.mark.parametrize(
    "norm",
    [nn.LayerNorm(16), nn.GroupNorm(4, 16), nn.RMSNorm(16), ms.nn.FrozenBatchNorm1d(16)],
    ids=["layer", "group", "rms", "frozen"],
)
def test_norms_that_need_no_batch_are_silent(norm: nn.Module) -> None:
    assert judged(mlp(norm), normal(2, 8), intent="train").codes == ()


def test_batchnorm_that_doesn_t_use_the_batch_is_silent() -> None:
    assert judged(mlp(nn.BatchNorm1d(16)).eval(), normal(2, 8)).codes == ()
    assert judged(mlp(nn.BatchNorm1d(16)), normal(2, 8), intent="inference").codes == ()
    partly = mlp(nn.BatchNorm1d(16))
    partly[1].eval()
    assert judged(partly, normal(2, 8), intent="finetune").codes == ()


def test_batchnorm_without_running_statistics_uses_the_batch_in_eval_too() -> None:
    model = mlp(nn.BatchNorm1d(16, track_running_stats=False)).eval()
    assert judged(model, normal(2, 8)).codes == ("NRM302",)


# ---------------------------------------------------------------- one


RAISES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "batch norm": (lambda: mlp(nn.BatchNorm1d(16)), (1, 8), "1"),
    "musigma batch norm": (lambda: mlp(ms.nn.BatchNorm1d(16)), (1, 8), "1"),
    "nested": (lambda: nn.Sequential(mlp(nn.BatchNorm1d(16))), (1, 8), "0.1"),
    "itself": (lambda: nn.BatchNorm1d(8), (1, 8), ""),
    "functional": (Functional, (1, 8), ""),
    "instance norm": (
        lambda: nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.InstanceNorm2d(8)),
        (2, 8, 4, 4),
        "1",
    ),
    "pooled images": (lambda: nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(8)), (1, 8, 4, 4), "1"),
    "one group in all": (lambda: nn.GroupNorm(1, 1), (1, 1), ""),
}


@pytest.mark.parametrize("name", RAISES)
def test_refusal_becomes_a_finding_that_names_the_layer(name: str) -> None:
    """C28: the last batch of an epoch holds one example."""
    make, shape, path = RAISES[name]
    model, x = make(), normal(*shape)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(ValueError, match="Expected more than 1"):
        model(x)
    model.load_state_dict(before)
    (finding,) = judged(model, x, intent="train")
    assert (finding.code, finding.severity, finding.where) == ("NRM303", "error", (path,))
    assert finding.evidence["raised"] is True
    assert all(torch.equal(model.state_dict()[key], before[key]) for key in before)


def test_other_failures_are_raised() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        judged(mlp(nn.BatchNorm1d(16)), normal(4, 9))


QUIET: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "group norm": (nn.GroupNorm(8, 8), (4, 8)),
    "group norm on pooled images": (nn.GroupNorm(8, 8), (4, 8, 1, 1)),
    "musigma group norm": (ms.nn.GroupNorm(8, 8), (4, 8)),
    "layer norm": (nn.LayerNorm(1), (4, 8, 1)),
    "layer norm over two axes": (nn.LayerNorm((1, 1)), (4, 8, 1, 1)),
}


@pytest.mark.filterwarnings("ignore::musigma._errors.MusigmaWarning")
@pytest.mark.parametrize("name", QUIET)
def test_one_value_a_mean_gives_a_constant(name: str) -> None:
    model, shape = QUIET[name]
    x = normal(*shape)
    # torch's GroupNorm misses 0 by the rounding of its variance, √eps at worst.
    assert model(x).abs().max() < 3.5e-4
    (finding,) = judged(model, x)
    assert (finding.code, finding.severity) == ("NRM303", "error")
    assert finding.evidence == {
        "values": 1,
        "op": finding.evidence["op"],
        "shape": list(shape),
        "raised": False,
    }


def test_rms_norm_leaves_the_sign() -> None:
    (finding,) = judged(nn.RMSNorm(1), normal(4, 8, 1))
    assert (finding.code, finding.severity) == ("NRM303", "warning")
    assert "sign" in finding.message


@pytest.mark.parametrize(
    ("norm", "shape"),
    [
        (nn.GroupNorm(4, 8), (4, 8)),
        (nn.GroupNorm(8, 8), (4, 8, 2, 1)),
        (nn.InstanceNorm2d(8), (2, 8, 1, 2)),
        (nn.LayerNorm(2), (4, 2)),
        (nn.BatchNorm2d(8), (1, 8, 16, 16)),
        (nn.BatchNorm1d(8).eval(), (1, 8)),
    ],
)
def test_two_values_are_not_one(norm: nn.Module, shape: tuple[int, ...]) -> None:
    assert "NRM303" not in judged(norm, normal(*shape)).codes
