"""weight = √(σ² + ε), bias = μ gives back the input: the notes' argument for the two parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import musigma as ms

restore = ms.nn.restore_identity_


def batch(*shape: int) -> Tensor:
    return torch.randn(shape) * 3 + 7


EXACT: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "BatchNorm1d": (lambda: ms.nn.BatchNorm1d(4), batch(9, 4)),
    "BatchNorm2d": (lambda: ms.nn.BatchNorm2d(4), batch(3, 4, 5, 6)),
    "BatchNorm3d": (lambda: ms.nn.BatchNorm3d(4), batch(3, 4, 2, 3, 4)),
    "torch's BatchNorm": (lambda: nn.BatchNorm1d(4), batch(9, 4)),
    "SyncBatchNorm": (lambda: ms.nn.SyncBatchNorm(4), batch(9, 4)),
    "LayerNorm, one row": (lambda: ms.nn.LayerNorm(6), batch(1, 6)),
    "LayerNorm, one row of three dims": (lambda: ms.nn.LayerNorm((2, 3, 4)), batch(1, 2, 3, 4)),
    "LayerNorm, rows alike": (lambda: ms.nn.LayerNorm(6), torch.stack([batch(6).sort().values] * 3).flip(-1)),
    "LayerNorm2d, one position": (lambda: ms.nn.LayerNorm2d(6), batch(1, 6, 1, 1)),
    "RMSNorm": (lambda: ms.nn.RMSNorm(6), batch(1, 6)),
    "RMSNorm, eps": (lambda: ms.nn.RMSNorm(6, eps=0.1), batch(1, 6)),
    "GroupNorm": (lambda: ms.nn.GroupNorm(2, 6), batch(1, 6, 5)),
    "InstanceNorm1d": (lambda: ms.nn.InstanceNorm1d(4, affine=True), batch(1, 4, 5)),
    "InstanceNorm2d, unbatched": (lambda: ms.nn.InstanceNorm2d(4, affine=True), batch(4, 5, 6)),
    "float64": (lambda: ms.nn.BatchNorm1d(4).double(), batch(9, 4).double()),
}


@pytest.mark.parametrize("case", EXACT)
def test_the_input_comes_back(case: str) -> None:
    make, x = EXACT[case]
    layer = make()
    assert restore(layer, x) is layer
    y = layer(x)
    # weight, bias and the normalized value are each rounded once or twice: 8 units of the largest value
    assert (y - x).abs().max() <= 8 * torch.finfo(x.dtype).eps * x.abs().max()
    assert all(p.grad_fn is None and p.is_leaf for p in layer.parameters())


def test_in_evaluation_by_the_running_statistics_any_input_comes_back() -> None:
    layer = ms.nn.BatchNorm1d(4)
    layer(batch(64, 4))
    restore(layer.eval(), batch(1, 4))
    x = batch(5, 4) * 100
    assert_close(layer(x), x)
    frozen = restore(ms.nn.FrozenBatchNorm1d.from_batchnorm(layer), x)
    assert_close(frozen(x), x)


DIFFERENT: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "LayerNorm": (lambda: ms.nn.LayerNorm(6), batch(2, 6)),
    "RMSNorm": (lambda: ms.nn.RMSNorm(6), batch(2, 6)),
    "LayerNorm2d": (lambda: ms.nn.LayerNorm2d(6), batch(1, 6, 2, 1)),
    "GroupNorm": (lambda: ms.nn.GroupNorm(2, 6), batch(2, 6)),
    "InstanceNorm1d": (lambda: ms.nn.InstanceNorm1d(4, affine=True), batch(2, 4, 5)),
    "means alone": (lambda: ms.nn.LayerNorm(4), torch.arange(4.0) + torch.tensor([[0.0], [1.0]])),
    "spreads alone": (lambda: ms.nn.LayerNorm(4), torch.tensor([[-1.0, -1, 1, 1], [-2.0, -2, 2, 2]])),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_examples_of_different_moments_are_refused_and_nothing_changes(case: str) -> None:
    make, x = DIFFERENT[case]
    layer = make()
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(ValueError, match=r"examples of one mean and spread only.*range over means"):
        restore(layer, x)
    assert_close(layer.state_dict(), before, rtol=0, atol=0)


def test_layers_with_nothing_to_set_are_refused() -> None:
    with pytest.raises(ValueError, match="needs weight and bias"):
        restore(ms.nn.BatchNorm1d(4, affine=False), batch(9, 4))
    with pytest.raises(ValueError, match="needs weight and bias"):
        restore(ms.nn.LayerNorm(4, bias=False), batch(1, 4))
    with pytest.raises(ValueError, match="needs a weight"):
        restore(ms.nn.RMSNorm(4, elementwise_affine=False), batch(1, 4))
    with pytest.raises(TypeError, match="got Linear"):
        restore(nn.Linear(4, 4), batch(1, 4))
    with pytest.raises(ValueError, match=r"no example in an input of shape \(0, 4\)"):
        restore(ms.nn.LayerNorm(4), torch.empty(0, 4))


BAD: dict[str, tuple[Callable[[], nn.Module], Tensor, type[Exception], str]] = {
    f"{name}, {value}": (
        make,
        torch.where(torch.arange(x.numel()).reshape(x.shape) == 1, value, x),
        ValueError,
        words,
    )
    for name, (make, x) in EXACT.items()
    for value, words in ((torch.nan, "finite, got nan at "), (torch.inf, "finite, got inf at "))
}
BAD |= {
    f"{name}, empty": (make, x[:0], ValueError, r"no example in an input of shape \(0, ")
    for name, (make, x) in EXACT.items()
    if "unbatched" not in name
}
BAD |= {
    "half precision is too narrow": (
        lambda: ms.nn.LayerNorm(4).half(),
        torch.tensor([[0.0, 3e5, 0.0, 3e5]]),
        ValueError,
        "leave torch.float16",
    ),
    "bias too large for it": (
        lambda: ms.nn.BatchNorm1d(1).half(),
        torch.tensor([[1e5], [1e5 + 1]]),
        ValueError,
        "leave torch.float16",
    ),
    "another width": (lambda: ms.nn.LayerNorm(6), batch(1, 5), RuntimeError, r"normalized_shape=\[6\]"),
    "another width, scaled": (lambda: ms.nn.RMSNorm(6), batch(1, 5), RuntimeError, r"normalized_shape=\[6\]"),
    "other channels": (
        lambda: ms.nn.LayerNorm2d(6),
        batch(1, 5, 1, 1),
        RuntimeError,
        r"normalized_shape=\[6\]",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_would_write_nan_into_the_layer_is_refused_and_nothing_changes(case: str) -> None:
    make, x, error, words = BAD[case]
    layer = make()
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(error, match=words):
        restore(layer, x)
    assert_close(layer.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "value"), [("running_mean", "nan"), ("running_var", "-1"), ("running_var", "inf")]
)
def test_impossible_running_statistics_are_not_restored_by(name: str, value: str) -> None:
    layer = ms.nn.BatchNorm1d(3).eval()
    layer.get_buffer(name)[1] = float(value)
    with pytest.raises(ValueError, match=r"running statistics must be finite.*channels \[1\]"):
        restore(layer, batch(2, 3))
    assert layer.weight.tolist() == [1, 1, 1]
    assert layer.bias.tolist() == [0, 0, 0]
