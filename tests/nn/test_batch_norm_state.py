"""What BatchNorm keeps from batch to batch: which variance, when it is updated, when it must not be."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import musigma as ms

BN1 = ms.nn.BatchNorm1d
PATHS = ("auto", "reference")


def state(module: nn.Module) -> dict[str, Tensor]:
    return {k: v.clone() for k, v in module.state_dict().items()}


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("path", PATHS)
def test_biased_to_normalize_unbiased_to_keep(path: Any) -> None:
    """C27: biased (3.5, 350) in the output, unbiased (4.6667, 466.667) in running_var."""
    x = torch.tensor([[1.0, 10.0], [2.0, 20.0], [3.0, 60.0], [6.0, 30.0]])
    bn = BN1(2, momentum=0.1, affine=False)
    with ms.ops.use_kernels(path):
        y = bn(x)
    assert_close(y, (x - torch.tensor([3.0, 30.0])) / (torch.tensor([3.5, 350.0]) + 1e-5).sqrt())
    assert_close(bn.running_mean, torch.tensor([0.3, 3.0]))
    assert_close(bn.running_var, torch.tensor([1.36667, 47.56667]))
    assert bn.num_batches_tracked.item() == 1


@pytest.mark.parametrize("momentum", [0.1, 0.0, 1.0, None])
@pytest.mark.parametrize("path", PATHS)
def test_running_averages_by_hand(path: Any, momentum: float | None) -> None:
    """Exponential with the weight on the new value; none at all; the last batch; the plain average."""
    bn = BN1(3, momentum=momentum)
    mean, var = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    with ms.ops.use_kernels(path):
        for step in range(1, 6):
            x = torch.randn(8, 3) * 2 + 5
            bn(x)
            batch = ms.moments(x, 0)
            weight = 1 / step if momentum is None else momentum
            mean = (1 - weight) * mean + weight * batch.mean
            var = (1 - weight) * var + weight * batch.var(correction=1)
    assert_close(bn.running_mean.double(), mean, rtol=1e-6, atol=1e-6)
    assert_close(bn.running_var.double(), var, rtol=1e-6, atol=1e-6)
    assert bn.num_batches_tracked.item() == 5


def test_the_whole_training_sets_statistics() -> None:
    """The notes' other choice at test time, here by the plain average over batches of one size."""
    data = torch.randn(64, 3) * 2 + 5
    bn = BN1(3, momentum=None)
    for batch in data.split(8):
        bn(batch)
    whole = ms.Moments.merge(ms.moments(batch, 0) for batch in data.split(8))
    assert_close(bn.running_mean.double(), whole.mean, rtol=1e-6, atol=1e-6)
    within = sum(ms.moments(batch, 0).var(correction=1) for batch in data.split(8)) / 8
    assert_close(bn.running_var.double(), within, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize(
    ("batch", "error"),
    [
        (torch.randn(1, 3), ValueError),
        (torch.randn(4, 5), RuntimeError),
        (torch.randn(4, 3, 2, 2), ValueError),
        (torch.randn(3), ValueError),
        (torch.ones(4, 3).long(), NotImplementedError),
    ],
    ids=["one sample", "channels", "too many dims", "too few dims", "integers"],
)
def test_a_rejected_batch_changes_nothing(
    batch: Tensor, error: type[Exception], momentum: float | None
) -> None:
    """C28: torch has counted it already."""
    bn = BN1(3, momentum=momentum)
    bn(torch.randn(4, 3))
    before = state(bn)
    with pytest.raises(error):
        bn(batch)
    assert_same(bn.state_dict(), before)


@pytest.mark.parametrize(
    "more",
    [
        {"activation": "tanh"},
        {"add": torch.ones(1, 3)},
        {"mask": torch.zeros(4, 3, dtype=torch.bool)},
        {"mask": torch.ones(7, dtype=torch.bool)},
    ],
    ids=["activation", "add", "empty mask", "mask shape"],
)
def test_a_rejected_argument_changes_nothing(more: dict[str, Any]) -> None:
    bn = BN1(3)
    before = state(bn)
    with pytest.raises(ValueError):
        bn(torch.randn(4, 3), **more)
    assert_same(bn.state_dict(), before)


def test_one_sample_of_nine_pixels_is_enough() -> None:
    """C28's second half."""
    assert ms.nn.BatchNorm2d(3)(torch.randn(1, 3, 3, 3)).shape == (1, 3, 3, 3)


@pytest.mark.parametrize("path", PATHS)
def test_an_empty_batch_is_not_counted(path: Any) -> None:
    bn = BN1(3, momentum=None)
    bn(torch.randn(4, 3))
    before = state(bn)
    with ms.ops.use_kernels(path):
        assert bn(torch.empty(0, 3)).shape == (0, 3)
    assert_same(bn.state_dict(), before)


@pytest.mark.parametrize("path", PATHS)
def test_track_running_stats_switched_off_later(path: Any) -> None:
    """C30: training leaves the buffers alone, evaluation still uses them."""
    bn = BN1(4)
    with ms.ops.use_kernels(path):
        bn(torch.randn(32, 4) + 5)
        bn.track_running_stats = False
        before = state(bn)
        y = bn(torch.randn(32, 4) - 5)
        assert y.mean().abs() < 1e-5  # by the batch's own
        assert_same(bn.state_dict(), before)
        x = torch.randn(32, 4) + 50
        assert_close(bn.eval()(x), (x - bn.running_mean) / (bn.running_var + bn.eps).sqrt())


def test_requires_grad_false_freezes_the_affine_only() -> None:
    """C36: the statistics are another matter, and so is the layer that freezes both."""
    x = torch.randn(64, 3) * 4 + 10
    bn = BN1(3).requires_grad_(False)
    y = bn(x)
    assert y.mean().abs() < 1e-5
    assert bn.running_mean.mean() > 0.5

    frozen = ms.nn.FrozenBatchNorm1d.from_batchnorm(BN1(3)).train()
    before = state(frozen)
    y = frozen(x)
    assert_close(y, x / (1 + 1e-5) ** 0.5)
    assert y.mean() > 9
    assert_same(frozen.state_dict(), before)


@pytest.mark.parametrize("strict_metadata", [True, False])
def test_a_partial_state_dict_leaves_the_counter(strict_metadata: bool) -> None:
    """C31: 7 stays 7, with the metadata of a state_dict and without (a plain dict has no version)."""
    bn = BN1(3)
    for _ in range(7):
        bn(torch.randn(4, 3))
    mean = bn.running_mean.clone()
    partial: OrderedDict[str, Tensor] = OrderedDict()
    if strict_metadata:
        partial._metadata = bn.state_dict()._metadata  # type: ignore[attr-defined]
    bn.load_state_dict(partial, strict=False)
    assert bn.num_batches_tracked.item() == 7
    assert_close(bn.running_mean, mean, rtol=0, atol=0)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("make", [BN1, ms.nn.FrozenBatchNorm1d, ms.nn.SyncBatchNorm])
def test_a_negative_variance_is_refused_with_its_channels(
    make: Callable[..., nn.Module], assign: bool
) -> None:
    """C37: what "running_var −= eps" on load leaves; every forward would be NaN, silently."""
    layer = make(5)
    before = state(layer)
    broken = {k: v + 1 for k, v in before.items()}
    broken["running_var"] = torch.tensor([1.0, -6e-6, 0.0, 4e-6, -1e-5])
    with pytest.raises(RuntimeError, match=r"running_var must not be negative, got -1e-05 \(channels 1, 4\)"):
        layer.load_state_dict(broken, assign=assign)
    assert_same(layer.state_dict(), before)


@pytest.mark.parametrize("name", ["running_mean", "running_var"])
@pytest.mark.parametrize("value", ["nan", "inf"])
@pytest.mark.parametrize("make", [BN1, ms.nn.FrozenBatchNorm1d, ms.nn.SyncBatchNorm])
def test_statistics_that_are_not_finite_are_refused_with_their_channels(
    make: Callable[..., nn.Module], value: str, name: str
) -> None:
    """C37's relative: one overflowing batch of a layer that takes it in, saved and loaded ever after."""
    layer = make(3)
    before = state(layer)
    broken = {k: v + 1 for k, v in before.items()}
    broken[name][1:] = float(value)
    with pytest.raises(RuntimeError, match=rf"{name} must be finite, got {value} \(channels 1, 2\)"):
        layer.load_state_dict(broken)
    assert_same(layer.state_dict(), before)


def test_a_negative_variance_deep_in_a_model_is_named() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(BN1(2)))
    broken = state(net)
    broken["1.0.running_var"] = torch.tensor([-1.0, 1.0])
    with pytest.raises(RuntimeError, match=r"1\.0\.running_var"):
        net.load_state_dict(broken)


def test_tiny_and_zero_variances_are_honest() -> None:
    """C37: 4e-6 and 0 load, unshifted, and give finite output."""
    bn = BN1(3).eval()
    honest = state(bn) | {"running_var": torch.tensor([1.0, 4e-6, 0.0])}
    bn.load_state_dict(honest)
    assert_close(bn.running_var, honest["running_var"], rtol=0, atol=0)
    assert bn(torch.randn(4, 3)).isfinite().all()


def test_state_dict_goes_both_ways_with_torch() -> None:
    ours, theirs = ms.nn.BatchNorm2d(3), nn.BatchNorm2d(3)
    ours(torch.randn(2, 3, 4, 4))
    theirs.load_state_dict(ours.state_dict())
    assert_same(theirs.state_dict(), ours.state_dict())
    fresh = ms.nn.BatchNorm2d(3)
    fresh.load_state_dict(theirs.state_dict())
    assert_same(fresh.state_dict(), theirs.state_dict())


def run(module: nn.Module, x: Tensor, how: str, reentrant: bool) -> Tensor:
    def once(t: Tensor) -> Tensor:
        return checkpoint(module, t, use_reentrant=reentrant)

    if how == "once":
        return once(x)
    if how == "nested":
        return checkpoint(lambda t: once(t) * 1, x, use_reentrant=reentrant)
    return once(x) + once(x)


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("how", ["once", "nested", "twice"])
@pytest.mark.parametrize("path", PATHS)
def test_a_checkpointed_batch_is_taken_in_once(
    path: Any, how: str, reentrant: bool, momentum: float | None
) -> None:
    """C33: torch counts 2 and takes in 0.19 of the batch's mean; forward and gradients hide it."""
    x = (torch.randn(16, 2) + 3).requires_grad_()
    plain, checkpointed = BN1(2, momentum=momentum), BN1(2, momentum=momentum)
    with ms.ops.use_kernels(path):
        expected = plain(x) + plain(x) if how == "twice" else plain(x)
        (dx,) = torch.autograd.grad(expected.pow(3).sum(), x)
        y = run(checkpointed, x, how, reentrant)
        y.pow(3).sum().backward()
    assert_close(x.grad, dx)
    assert_same(checkpointed.state_dict(), plain.state_dict())
    assert checkpointed.num_batches_tracked.item() == (2 if how == "twice" else 1)


@pytest.mark.parametrize("layer", [ms.nn.InstanceNorm1d(2, track_running_stats=True), ms.nn.SyncBatchNorm(2)])
def test_a_checkpointed_batch_is_taken_in_once_by_the_others(layer: nn.Module) -> None:
    x = (torch.randn(8, 2, 5) + 3).requires_grad_()
    plain = copy.deepcopy(layer)
    plain(x)
    checkpoint(layer, x, use_reentrant=False).pow(3).sum().backward()
    assert_same(layer.state_dict(), plain.state_dict())


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("path", PATHS)
def test_a_batch_that_overflows_does_not_poison_the_statistics(
    path: Any, momentum: float | None, bad: float
) -> None:
    """C34: a gradient scaler skips the step; 49 clean batches later the statistics are finite."""
    bn, clean = BN1(2, momentum=momentum), BN1(2, momentum=momentum)
    with ms.ops.use_kernels(path):
        for i in range(50):
            x = torch.randn(8, 2)
            if i == 3:
                x[0, 1] = bad
                kept = bn.running_mean[1].item()
                bn(x)
                assert bn.running_mean[1].item() == kept
            else:
                bn(x)
                clean(x)
    assert ms.nn.nonfinite_statistics(bn) == {}
    assert bn.eval()(torch.randn(4, 2)).isfinite().all()
    if momentum is not None:
        # the other channel took the batch in, this one did as if it had not been
        assert_close(bn.running_mean[1], clean.running_mean[1], rtol=0, atol=0)


def test_non_finite_buffers_are_named() -> None:
    """C34's other half, for statistics that arrived so."""
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), BN1(3))
    with torch.no_grad():
        net[1].running_mean[1] = float("nan")
        net[2].running_var[0] = float("inf")
    assert ms.nn.nonfinite_statistics(net) == {"1.running_mean": [1], "2.running_var": [0]}


@pytest.mark.parametrize(
    ("average", "use_buffers", "counted"),
    [
        (get_ema_multi_avg_fn, False, 10),
        # torch's EMA of a counter is rounded down to 1 for ever; only momentum=None would read it
        (get_ema_multi_avg_fn, True, 1),
        (ms.nn.ema_multi_avg_fn, False, 10),
        (ms.nn.ema_multi_avg_fn, True, 10),
    ],
)
def test_averaged_copies(average: Callable[[float], Any], use_buffers: bool, counted: int) -> None:
    """C39: copied (the default) or averaged, and in each case not those of step 0."""
    net = nn.Sequential(nn.Linear(3, 3), BN1(3))
    ema = AveragedModel(net, multi_avg_fn=average(0.9), use_buffers=use_buffers)
    expected: Tensor | None = None
    for _ in range(10):
        net(torch.randn(16, 3) + 20)
        ema.update_parameters(net)
        live = net[1].running_mean
        expected = live.clone() if expected is None or not use_buffers else torch.lerp(expected, live, 0.1)
    assert expected is not None
    assert_close(ema.module[1].running_mean, expected)
    assert ema.module[1].num_batches_tracked.item() == counted
    assert ema(torch.randn(4, 3)).isfinite().all()


def test_an_averages_decay_is_a_share() -> None:
    with pytest.raises(ValueError, match=r"decay must be in \[0, 1\].*got 1\.5"):
        ms.nn.ema_multi_avg_fn(1.5)


@pytest.mark.parametrize("path", PATHS)
def test_without_autograd_the_statistics_are_kept_all_the_same(path: Any) -> None:
    for context in (torch.no_grad, torch.inference_mode):
        bn, plain = BN1(3), BN1(3)
        x = torch.randn(8, 3)
        with ms.ops.use_kernels(path):
            plain(x)
            with context():
                bn(x)
            bn(x)
        plain(x)
        assert_close(bn.state_dict(), plain.state_dict())
