"""One value to normalize: exactly the bias, a warning once a layer, and an error where torch has one."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.testing import assert_close

import musigma as ms
from musigma._errors import MusigmaWarning

f = ms.functional
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
PATHS = ("auto", "reference")


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("path", PATHS)
def test_one_value_a_row_is_exactly_the_bias(path: Any, dtype: torch.dtype) -> None:
    """C07 (and C14's warning): torch gives the weight a gradient of 15, and bfloat16 ±11 for 3."""
    x = torch.tensor([[6e4], [3.3], [-5e4]], dtype=dtype, requires_grad=True)
    weight = torch.full((1,), 2.0, dtype=dtype, requires_grad=True)
    bias = torch.full((1,), 3.0, dtype=dtype, requires_grad=True)
    with ms.ops.use_kernels(path), pytest.warns(MusigmaWarning, match=r"shape \(3, 1\)"):
        y = f.layer_norm(x, (1,), weight, bias)
    dx, dw, db = torch.autograd.grad(y.sum(), (x, weight, bias))
    assert torch.equal(y, torch.full((3, 1), 3.0, dtype=dtype))
    assert torch.equal(dx, torch.zeros_like(dx))
    assert dw.item() == 0.0
    assert db.item() == 3.0


@pytest.mark.parametrize("shape", [(4, 10), (4, 10, 1), (4, 10, 1, 1)])
def test_one_value_a_group_is_exactly_the_bias(shape: tuple[int, ...]) -> None:
    """C14: torch returns 1e-5 of noise and no word."""
    x = (torch.rand(shape) * 1e6).requires_grad_()
    weight = torch.randn(10, requires_grad=True)
    bias = torch.randn(10, requires_grad=True)
    with pytest.warns(MusigmaWarning, match=r"shape \(4, 10.*single values|single values.*shape \(4, 10"):
        y = f.group_norm(x, 10, weight, bias)
    assert torch.equal(y, bias.reshape(10, *[1] * (len(shape) - 2)).expand_as(y))
    dx, dw = torch.autograd.grad(y.sum(), (x, weight))
    assert torch.equal(dx, torch.zeros_like(dx))
    assert torch.equal(dw, torch.zeros_like(dw))


def test_one_value_a_row_keeps_its_sign_under_rms_norm() -> None:
    with pytest.warns(MusigmaWarning, match="sign"):
        y = f.rms_norm(torch.tensor([[1e3], [-2e3]]), (1,))
    assert_close(y, torch.tensor([[1.0], [-1.0]]))


def test_the_warning_about_single_values_comes_once_a_layer() -> None:
    layers = [ms.nn.GroupNorm(10, 10), ms.nn.GroupNorm(10, 10), ms.nn.LayerNorm(1)]
    inputs = [torch.rand(4, 10, 1)] * 3
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            for layer, x in zip(layers, inputs, strict=True):
                torch.nn.Sequential(layer)(x)
    assert len(caught) == 3
    assert "GroupNorm (group_norm)" in str(caught[0].message)


def test_nan_and_inf_stay_visible_where_one_value_is_normalized() -> None:
    with pytest.warns(MusigmaWarning):
        y = f.layer_norm(torch.tensor([[float("nan")], [float("inf")], [1.0]]), (1,))
    assert y.isnan().flatten().tolist() == [True, True, False]


def test_batch_and_instance_norm_refuse_one_value() -> None:
    """C14, C28: they raise as torch does, in the same words, plus the remedy."""
    with pytest.raises(ValueError, match=r"Expected more than 1 value per channel when training.*drop_last"):
        f.batch_norm(torch.rand(1, 10), None, None, training=True)
    with pytest.raises(ValueError, match="Expected more than 1 spatial element when training"):
        f.instance_norm(torch.rand(4, 10, 1))
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        f.group_norm(torch.rand(1, 10), 10)
