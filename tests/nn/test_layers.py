"""The layers as modules: ambiguous inputs, channels-first LayerNorm, and what a module must survive."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import musigma as ms
from musigma._errors import MusigmaWarning

NAMESAKES = (
    *("BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm", "GroupNorm", "LayerNorm", "RMSNorm"),
    *("InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d"),
)


@pytest.mark.parametrize("name", NAMESAKES)
def test_arguments_and_class_are_torchs(name: str) -> None:
    ours, theirs = getattr(ms.nn, name), getattr(nn, name)
    assert issubclass(ours, theirs)
    mine, given = (list(inspect.signature(c).parameters.values()) for c in (ours, theirs))
    assert [(p.name, p.default, p.kind) for p in mine] == [(p.name, p.default, p.kind) for p in given]
    forward = [inspect.signature(c.forward).parameters for c in (ours, theirs)]
    assert list(forward[0])[: len(forward[1])] == list(forward[1])


def test_statistics_of_an_abcd_input_over_cd_have_shape_ab() -> None:
    """The first note's example: each of the a·b rows has mean 0 and variance 1 on its own."""
    y = ms.nn.LayerNorm((4, 5), elementwise_affine=False)(torch.randn(2, 3, 4, 5) * 3 + 2)
    m = ms.moments(y, (-2, -1))
    assert m.mean.shape == (2, 3)
    assert m.mean.abs().max() < 1e-6
    assert_close(m.var(), torch.ones(2, 3, dtype=torch.float64), rtol=1e-4, atol=0)


def test_instance_norm_1d_reads_two_dims_as_one_example() -> None:
    """C16: (n, c) raises, and where n = c it is still (c, length)."""
    for affine in (False, True):
        with pytest.raises(
            ValueError, match=r"match num_features \(3\), but got: 10.*BatchNorm1d or LayerNorm"
        ):
            ms.nn.InstanceNorm1d(3, affine=affine)(torch.randn(10, 3))
    y = ms.nn.InstanceNorm1d(3)(torch.randn(3, 3))
    assert y.mean(1).abs().max() < 1e-6
    with pytest.raises(ValueError, match=r"match num_features \(3\), but got: 4.*a batch has 4 dims"):
        ms.nn.InstanceNorm2d(3)(torch.randn(4, 3, 5))


def test_instance_norm_of_other_channels_is_refused_or_warned_about_as_torch_does() -> None:
    with pytest.raises(ValueError, match="dim=1 to match num_features"):
        ms.nn.InstanceNorm1d(3, affine=True)(torch.randn(2, 4, 5))
    with pytest.warns(MusigmaWarning, match="dim=1 does not match num_features"):
        ms.nn.InstanceNorm1d(3)(torch.randn(2, 4, 5))


@pytest.mark.parametrize("spatial", [(5, 7), (8, 8), (1, 1), (0, 3)])
def test_layer_norm_over_channels_first(spatial: tuple[int, int]) -> None:
    """C17: permute, LayerNorm(c), permute back; also where width and channels have one size."""
    layer, inner = ms.nn.LayerNorm2d(8), ms.nn.LayerNorm(8)
    nn.init.uniform_(layer.weight)
    nn.init.normal_(layer.bias)
    inner.load_state_dict(layer.state_dict())
    x = torch.randn(2, 8, *spatial)
    expected = inner(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    y = layer(x)
    assert y.is_contiguous()
    assert_close(y, expected, rtol=0, atol=1e-6)
    last = layer(x.to(memory_format=torch.channels_last))
    assert 0 in spatial or last.is_contiguous(memory_format=torch.channels_last)
    assert_close(last, expected, rtol=0, atol=1e-6)
    if spatial == (8, 8):
        assert not torch.allclose(inner(x), expected, atol=0.1)


def test_layer_norm_over_channels_of_one_and_three_dims() -> None:
    x1, x3 = torch.randn(2, 4, 5), torch.randn(2, 4, 3, 2, 5)
    assert_close(ms.nn.LayerNorm1d(4)(x1), ms.nn.LayerNorm(4)(x1.mT).mT)
    assert_close(ms.nn.LayerNorm3d(4)(x3), ms.nn.LayerNorm(4)(x3.movedim(1, -1)).movedim(-1, 1))


def test_layer_norm_over_channels_refuses_other_shapes() -> None:
    with pytest.raises(ValueError, match=r"expected 4D input \(got 3D input\)"):
        ms.nn.LayerNorm2d(4)(torch.randn(2, 4, 5))
    with pytest.raises(
        ValueError, match=r"expected 4 channels in dim 1.*channels-last input use ms.nn.LayerNorm"
    ):
        ms.nn.LayerNorm2d(4)(torch.randn(2, 5, 5, 4))


def test_masks_go_through_to_the_functions() -> None:
    keep = (torch.arange(6) < torch.tensor([6, 4])[:, None]).unsqueeze(1)
    x = torch.randn(2, 4, 6)
    for layer in (ms.nn.GroupNorm(2, 4), ms.nn.InstanceNorm1d(4)):
        y = layer(torch.where(keep, x, 99.0), mask=keep)
        assert_close(y[1:, :, :4], layer(x[1:, :, :4]))
        assert_close(y[:1], layer(x[:1]))
    one = ms.nn.InstanceNorm1d(4)
    assert_close(one(torch.where(keep, x, 99.0)[1], mask=keep[1])[:, :4], one(x[1, :, :4]))


def test_group_norm_says_which_groups_would_do() -> None:
    with pytest.raises(
        ValueError, match=r"num_channels \(10\) must be divisible by num_groups \(3\); try 1, 2, 5 or 10"
    ):
        ms.nn.GroupNorm(3, 10)
    with pytest.raises(ValueError, match=r"num_groups \(0\)"):
        ms.nn.GroupNorm(0, 10)


LAYERS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "BatchNorm1d": (lambda **k: ms.nn.BatchNorm1d(6, **k), (4, 6)),
    "BatchNorm2d": (lambda **k: ms.nn.BatchNorm2d(6, **k), (4, 6, 3, 3)),
    "SyncBatchNorm": (lambda **k: ms.nn.SyncBatchNorm(6, **k), (4, 6)),
    "FrozenBatchNorm1d": (lambda **k: ms.nn.FrozenBatchNorm1d(6, **k), (4, 6)),
    "GroupNorm": (lambda **k: ms.nn.GroupNorm(2, 6, **k), (4, 6, 3)),
    "InstanceNorm1d": (
        lambda **k: ms.nn.InstanceNorm1d(6, affine=True, track_running_stats=True, **k),
        (4, 6, 3),
    ),
    "LayerNorm": (lambda **k: ms.nn.LayerNorm(6, **k), (4, 6)),
    "LayerNorm2d": (lambda **k: ms.nn.LayerNorm2d(6, **k), (4, 6, 3, 3)),
    "RMSNorm": (lambda **k: ms.nn.RMSNorm(6, **k), (4, 6)),
    "LayerNormLSTM": (lambda **k: ms.nn.LayerNormLSTM(6, 5, **k), (4, 2, 6)),
    "BatchNormLSTM": (lambda **k: ms.nn.BatchNormLSTM(6, 5, max_steps=4, **k), (4, 3, 6)),
}


def output(layer: nn.Module, x: Tensor) -> Tensor:
    y = layer(x)
    return y[0] if isinstance(y, tuple) else y


@pytest.mark.parametrize("name", LAYERS)
def test_copies_pickles_and_checkpoints_are_the_same_layer(name: str) -> None:
    make, shape = LAYERS[name]
    layer = make()
    output(layer, torch.randn(shape))
    x = torch.randn(shape)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    loaded = make()
    loaded.load_state_dict(torch.load(file, weights_only=True))
    assigned = make(device="meta")
    assigned.load_state_dict(layer.state_dict(), assign=True)
    copies = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), loaded, copy.deepcopy(assigned)]
    expected = output(copy.deepcopy(layer), x)
    for other in copies:
        assert_close(output(other, x), expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", LAYERS)
def test_on_the_meta_device_it_makes_shapes(name: str) -> None:
    make, shape = LAYERS[name]
    layer = make(device="meta")
    assert all(t.is_meta for t in layer.state_dict().values())
    y = output(layer, torch.empty(shape, device="meta"))
    assert y.is_meta
    assert y.shape == output(make(), torch.randn(shape)).shape


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", LAYERS)
def test_parameters_take_the_dtype_asked_for(name: str, dtype: torch.dtype) -> None:
    make, shape = LAYERS[name]
    layer = make(dtype=dtype)
    assert {p.dtype for p in layer.parameters()} <= {dtype}
    assert output(layer, torch.randn(shape, dtype=dtype)).dtype == dtype


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm", "GroupNorm", "InstanceNorm1d"])
def test_gradients_accumulate_over_two_backwards(name: str) -> None:
    make, shape = LAYERS[name]
    layer = make()
    x = torch.randn(shape)
    layer(x).square().sum().backward()
    once = {k: p.grad.clone() for k, p in layer.named_parameters()}
    layer(x).square().sum().backward()
    for k, p in layer.named_parameters():
        assert_close(p.grad, 2 * once[k])
