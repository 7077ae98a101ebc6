"""What stands beside the input and can't be meant is refused, where it would give garbage without a word."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import musigma as ms

f = ms.functional
Call = Callable[[Tensor, Tensor], object]
X = torch.linspace(-1, 1, 2 * 5 * 5).reshape(2, 5, 5)
NORMS: dict[str, Call] = {
    "layer_norm": lambda w, x: f.layer_norm(x, (5,), w),
    "rms_norm": lambda w, x: f.rms_norm(x, (5,), w),
    "add_layer_norm": lambda w, x: f.add_layer_norm(x, x, (5,), w),
    "add_rms_norm": lambda w, x: f.add_rms_norm(x, x, (5,), w),
    "group_norm": lambda w, x: f.group_norm(x, 5, w),
    "instance_norm": lambda w, x: f.instance_norm(x, weight=w),
    "batch_norm": lambda w, x: f.batch_norm(x, None, None, w, training=True),
    "batch_norm_eval": lambda w, x: f.batch_norm(x, torch.zeros(5), torch.ones(5), w),
    "running_mean": lambda w, x: f.batch_norm(x, w, torch.ones(5)),
}
PATHS = ("auto", "off", "reference")


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("path", PATHS)
def test_a_meta_parameter_has_no_values(name: str, path: ms.ops.Mode) -> None:
    """A model half loaded: the dispatcher would take the shapes' kernel, and return memory as it found it."""
    with ms.ops.use_kernels(path), pytest.raises((RuntimeError, NotImplementedError), match=r"meta|Meta"):
        NORMS[name](torch.ones(5, device="meta"), X)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64, torch.bool])
@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("path", PATHS)
def test_a_parameter_without_fractions_or_with_more(name: str, dtype: torch.dtype, path: ms.ops.Mode) -> None:
    with ms.ops.use_kernels(path), pytest.raises(RuntimeError, match="must be floating point, got torch"):
        NORMS[name](torch.ones(5, dtype=dtype), X)


@pytest.mark.parametrize("path", PATHS)
def test_running_statistics_without_values_take_in_nothing(path: ms.ops.Mode) -> None:
    mean, var = torch.zeros(5, device="meta"), torch.ones(5, device="meta")
    with ms.ops.use_kernels(path), pytest.raises((RuntimeError, NotImplementedError), match=r"meta|Meta"):
        f.batch_norm(X, mean, var, training=True)


EPS: dict[str, Callable[[float], object]] = {
    "layer_norm": lambda eps: f.layer_norm(X, (5,), eps=eps),
    "rms_norm": lambda eps: f.rms_norm(X, (5,), eps=eps),
    "group_norm": lambda eps: f.group_norm(X, 5, eps=eps),
    "instance_norm": lambda eps: f.instance_norm(X, eps=eps),
    "batch_norm": lambda eps: f.batch_norm(X, None, None, training=True, eps=eps),
    "batch_norm_eval": lambda eps: f.batch_norm(X, torch.zeros(5), torch.ones(5), eps=eps),
}


@pytest.mark.parametrize("name", EPS)
def test_eps_that_is_not_a_number(name: str) -> None:
    with pytest.raises(ValueError, match=r"eps must be .*, but got nan"):
        EPS[name](float("nan"))


@pytest.mark.parametrize("name", EPS)
def test_an_infinite_eps_leaves_nothing(name: str) -> None:
    assert torch.equal(EPS[name](float("inf")), torch.zeros_like(X))
