"""A negative running variance is refused by channel: the output would be NaN, or wrong, without a word."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import musigma as ms
from musigma._errors import MusigmaWarning
from musigma.functional._variances import check_variances

f = ms.functional


def looked_through(var: Tensor) -> Tensor:
    check_variances(var)
    return -var


def by_instance(x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    return f.instance_norm(x[..., None], mean, var, use_input_stats=False)


@pytest.mark.parametrize("evaluate", [f.batch_norm, by_instance])
@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize(
    ("var", "words"),
    [
        ([1.0, -2e-5, 1.0], r"running_var must not be negative, got -2e-05 \(channels 1\)"),
        ([-1e-6, 1.0, -3.0], r"got -3 \(channels 0, 2\)"),  # −1e-6 + eps has a root, and the wrong one
        ([float("nan"), 1.0, -1.0], r"got -1 \(channels 2\)"),
    ],
)
def test_evaluating_by_a_negative_variance(
    evaluate: Callable[..., Tensor], kernels: str, var: list[float], words: str
) -> None:
    """C37: the second half, for whoever calls the function or writes the buffer."""
    with ms.ops.use_kernels(kernels), pytest.raises(ValueError, match=words):
        evaluate(torch.randn(4, 3), torch.zeros(3), torch.tensor(var))


@pytest.mark.parametrize("make", [ms.nn.BatchNorm1d, ms.nn.FrozenBatchNorm1d, ms.nn.SyncBatchNorm])
def test_a_buffer_written_after_it_was_looked_at(make: Callable[[int], nn.Module]) -> None:
    layer, x = make(3).eval(), torch.randn(4, 3)
    for _ in range(2):
        assert layer(x).isfinite().all()
    layer.get_buffer("running_var")[1] = -1.0
    for _ in range(2):
        with pytest.raises(ValueError, match=r"got -1 \(channels 1\).*ms\.surgery\.recalibrate"):
            layer(x)
    layer.get_buffer("running_var")[1] = 1.0
    assert layer(x).isfinite().all()


def test_a_new_tensor_in_the_place_of_one_that_was_looked_at() -> None:
    """An id is given out again once its tensor is gone; the verdict on that one says nothing of this one."""
    x, mean = torch.randn(4, 3), torch.zeros(3)
    for _ in range(20):
        f.batch_norm(x, mean, torch.ones(3))
        with pytest.raises(ValueError, match="must not be negative"):
            f.batch_norm(x, mean, -torch.ones(3))


def test_zero_tiny_and_absent_variances_are_honest() -> None:
    x = torch.randn(4, 3)
    for var in (torch.tensor([0.0, -0.0, 4e-6]), torch.tensor([1e-45, 1.0, 3e38])):
        assert f.batch_norm(x, torch.zeros(3), var).isfinite().all()
    assert f.batch_norm(x[:, :0], torch.zeros(0), torch.zeros(0)).shape == (4, 0)
    with torch.inference_mode():  # such tensors count no versions
        var = torch.ones(3)
        assert f.batch_norm(x, torch.zeros(3), var).isfinite().all()
        var[0] = -1.0
        with pytest.raises(ValueError, match="must not be negative"):
            f.batch_norm(x, torch.zeros(3), var)


def test_nobody_who_watches_sees_us_look() -> None:
    layer, x = ms.nn.BatchNorm1d(3).eval(), torch.randn(4, 3)
    assert [node.op for node in ms.graph.record(layer, x).nodes] == ["batch_norm"]
    expected = layer(x)
    traced = torch.jit.trace(looked_through, torch.ones(3))
    assert [node.kind() for node in traced.graph.nodes()][-1:] == ["aten::neg"]
    assert "aten::min" not in str(traced.graph)
    mapped = torch.func.vmap(lambda v: f.batch_norm(x, torch.zeros(3), v))(torch.ones(2, 3))
    assert_close(mapped[1], expected)
    meta = f.batch_norm(x.to("meta"), torch.zeros(3, device="meta"), -torch.ones(3, device="meta"))
    assert meta.is_meta
    program = torch.export.export(copy.deepcopy(layer), (x,), strict=False).module()
    assert_close(program(x), expected)


def test_whoever_finds_or_mends_an_impossible_variance_may_run_the_model() -> None:
    x = torch.randn(64, 4)
    net = nn.Sequential(nn.Linear(4, 4, bias=False), ms.nn.BatchNorm1d(4)).eval()
    net[1].running_var[1] = -1.0
    report = ms.doctor.examine(net, x, intent="inference")
    assert "NRM326" in report.codes
    treated, record = ms.doctor.treat(net, report)
    assert "NRM326" in record.mended
    assert treated(x).isfinite().all()
    for mode in ("one_pass", "layerwise"):
        mended, _ = ms.surgery.recalibrate(net, [x], mode=mode)
        assert mended(x).isfinite().all()
    with pytest.raises(ValueError, match="must not be negative"):
        net(x)


@pytest.mark.parametrize("evaluate", [f.batch_norm, by_instance])
@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_evaluating_by_statistics_that_overflowed_says_so_once(
    evaluate: Callable[..., Tensor], kernels: str
) -> None:
    """The square of 1e30 is no float32; torch keeps inf, and its layers go on with the bias alone."""
    x, mean, var = torch.randn(4, 3), torch.zeros(3), torch.ones(3)
    with ms.ops.use_kernels("reference"):  # torch's kernel overflows before there is anything to keep
        f.batch_norm(torch.randn(64, 3) * torch.tensor([1.0, 1e30, 1.0]), mean, var, training=True)
    assert var.isinf().tolist() == [False, True, False]
    with ms.ops.use_kernels(kernels):
        with pytest.warns(MusigmaWarning, match=r"running_var is not finite: inf \(channels 1\)"):
            y = evaluate(x, mean, var)
        assert torch.equal(y[:, 1], torch.zeros_like(y[:, 1]))
        evaluate(x, mean, var)  # a warning is an error here
        var[1] = 1.0
        mean[2] = float("nan")
        with pytest.warns(MusigmaWarning, match=r"running_mean is not finite: nan \(channels 2\)"):
            assert evaluate(x, mean, var)[:, 2].isnan().all()
