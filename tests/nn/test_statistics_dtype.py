"""Running statistics are float32 at least, whatever a model is cast to, built in or loaded from."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import musigma as ms

BN1 = ms.nn.BatchNorm1d


def state(module: nn.Module) -> dict[str, Tensor]:
    return {k: v.clone() for k, v in module.state_dict().items()}


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert_close(a, b, rtol=0, atol=0, equal_nan=True)


CASTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.bfloat16(),
    "to": lambda m: m.to(torch.float16),
    "to like": lambda m: m.to(torch.zeros(1, dtype=torch.bfloat16)),
    "type": lambda m: m.type(torch.bfloat16),
    "in a model": lambda m: nn.Sequential(nn.Sequential(m)).half()[0][0],
    "twice": lambda m: m.half().bfloat16(),
    "by double": lambda m: m.double().half(),
}
LAYERS: dict[str, Callable[..., nn.Module]] = {
    "BatchNorm1d": BN1,
    "SyncBatchNorm": ms.nn.SyncBatchNorm,
    "FrozenBatchNorm1d": ms.nn.FrozenBatchNorm1d,
    "InstanceNorm1d": lambda c, **k: ms.nn.InstanceNorm1d(c, affine=True, track_running_stats=True, **k),
}


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("name", LAYERS)
def test_statistics_stay_float32_whatever_the_model_is_cast_to(name: str, cast: str) -> None:
    """C40: 1e6 is inf in float16."""
    layer = LAYERS[name](3)
    layer.running_var.copy_(torch.tensor([1.0, 1e6, 1e-8]))
    layer = CASTS[cast](layer)
    assert layer.weight.dtype.itemsize == 2
    assert layer.running_mean.dtype == layer.running_var.dtype == torch.float32
    assert layer.running_var.tolist() == pytest.approx([1.0, 1e6, 1e-8])
    assert layer.num_batches_tracked.dtype == torch.int64
    x = torch.randn(4, 3, 5).to(layer.weight.dtype)
    assert layer.eval()(x).dtype == x.dtype
    assert layer.train()(x).dtype == x.dtype


@pytest.mark.parametrize("name", LAYERS)
def test_statistics_are_float32_from_the_start(name: str) -> None:
    assert LAYERS[name](3, dtype=torch.bfloat16).running_var.dtype == torch.float32
    assert LAYERS[name](3, dtype=torch.float64).running_var.dtype == torch.float64
    torch.set_default_dtype(torch.float16)
    try:
        layer = LAYERS[name](3)
    finally:
        torch.set_default_dtype(torch.float32)
    assert layer.weight.dtype == torch.float16
    assert layer.running_var.dtype == torch.float32


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_statistics_of_a_half_precision_checkpoint_are_widened(name: str, assign: bool) -> None:
    layer = LAYERS[name](3)
    halves = {k: v.half() if v.is_floating_point() else v for k, v in state(layer).items()}
    layer.load_state_dict(halves, assign=assign)
    assert layer.running_var.dtype == torch.float32


@pytest.mark.parametrize("name", LAYERS)
def test_wider_types_and_other_devices_still_go_through(name: str) -> None:
    layer = LAYERS[name](3)
    assert layer.double().running_var.dtype == torch.float64
    assert layer.float().running_var.dtype == torch.float32
    meta = copy.deepcopy(layer).to("meta", torch.bfloat16)
    assert meta.running_var.is_meta
    assert meta.running_var.dtype == torch.float32
    real = meta.to_empty(device="cpu")
    assert real.running_var.device.type == "cpu"
    real.load_state_dict(layer.state_dict())
    assert_same(real.float().state_dict(), layer.state_dict())
    assert layer.share_memory().running_var.is_shared()
    same = pickle.loads(pickle.dumps(copy.deepcopy(layer)))
    assert_same(same.state_dict(), layer.state_dict())


def test_a_float16_layer_gives_the_float32_layers_result() -> None:
    """C40: within 1 % of float32, the channel of variance 1e6 not silently zero."""
    bn = BN1(3, momentum=1.0)
    x = torch.randn(256, 3) * torch.tensor([1.0, 1000.0, 1e-4])
    bn(x)
    expected = bn.eval()(x)
    half = BN1(3)
    half.load_state_dict(bn.state_dict())
    y = half.half().eval()(x.half())
    error = (y.float() - expected).abs().amax(0)
    # the third channel's x, 1e-4, has 11 bits or fewer in float16
    assert (error <= 0.01 * expected.abs().amax(0)).all()


def test_a_bfloat16_layers_statistics_keep_moving() -> None:
    """C40: steps of 0.001 of what is missing are below half a unit of bfloat16 from 2.0 on."""
    bn = BN1(1, momentum=0.01).bfloat16()
    for _ in range(500):
        bn((torch.randn(64, 1) * 2).bfloat16())
    # 0.99⁵⁰⁰ = 0.7 % of the start is left; a batch's variance has sd 4·√(2/63), averaged over 1/(2·0.01)
    assert bn.running_var.item() == pytest.approx(4.0, rel=0.1)
