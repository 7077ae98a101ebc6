"""What comes after the affine in the same kernel: an addition, an activation, and their way back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from musigma import ops
from native import BUILT

pytestmark = pytest.mark.skipif(not BUILT, reason="the native kernels are not built")

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SHAPES = (((33, 37), None), ((6, 5, 49), None), ((3, 19, 9, 11), None), ((3, 37, 9, 11), torch.channels_last))
NAMES = (None, *ops.ACTIVATIONS)


def draw(shape: tuple[int, ...], seed: int, dtype: torch.dtype, mean: float = 0.0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=g, dtype=torch.float64) + mean).to(dtype)


def calls(op: str, x: Tensor, activation: str | None, eps: float = 1e-5) -> Callable[..., Tensor]:
    """The op as a function of x, weight, bias and what is added."""
    if op == "group_norm":
        groups = next(g for g in (3, 5, 1) if x.shape[1] % g == 0)
        return lambda x, w, b, add=None: ops.group_norm(x, groups, w, b, eps, activation)[0]
    if op == "batch_norm":
        return lambda x, w, b, add=None: ops.batch_norm(x, w, b, eps, add, activation)[0]
    mean = x.double().transpose(0, 1).flatten(1).mean(1)
    var = x.double().transpose(0, 1).flatten(1).var(1) + 0.1
    return lambda x, w, b, add=None: ops.affine(x, mean, var, w, b, eps, add, activation, None)


def arguments(
    op: str, shape: tuple[int, ...], last: torch.memory_format | None, dtype: torch.dtype, added: bool
) -> list[Tensor]:
    x = draw(shape, 0, dtype, mean=3.0)
    if last is not None:
        x = x.to(memory_format=last)
    few = torch.float64 if dtype is torch.float64 else torch.float32
    # Weights away from 0: rstd · max|dy · weight| is what dx is held against.
    return [
        x,
        draw((shape[1],), 1, few).sign() * (draw((shape[1],), 2, few).abs() + 0.5),
        draw((shape[1],), 3, few),
    ] + ([draw(shape, 4, dtype)] if added else [])


@pytest.mark.parametrize("activation", NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("op", "added"),
    [("batch_norm", False), ("batch_norm", True), ("affine", False), ("affine", True), ("group_norm", False)],
)
def test_both_ways_within_four_units(
    op: str, added: bool, dtype: torch.dtype, activation: str | None
) -> None:
    """In every layout, against float64; the sums against √n · rms of their terms."""
    for shape, last in SHAPES:
        leaves = arguments(op, shape, last, dtype, added)
        exact = [t.detach().double().requires_grad_() for t in leaves]
        leaves = [t.requires_grad_() for t in leaves]
        call = calls(op, leaves[0].detach(), activation)
        with ops.use_kernels("reference"):
            want = call(*exact)
            z = calls(op, leaves[0].detach(), None)(*exact).detach()
        # relu's slope jumps at 0, where z's own rounding decides on which side a value lies
        dy = (draw(shape, 9, dtype).double() * (z.abs() > 0.05)).to(dtype)
        with ops.use_kernels("reference"):
            wanted = torch.autograd.grad(want, exact, dy.double())
        y = call(*leaves)
        got = torch.autograd.grad(y, leaves, dy)
        # float64's reference is as far off
        unit = torch.finfo(dtype).eps * (2 if dtype is torch.float64 else 1)
        assert (y.double() - want).abs().max() <= 4 * unit * want.abs().max()
        x = exact[0].detach().transpose(0, 1).flatten(1)
        rstd = x.var(1, correction=0).min().rsqrt() if op != "group_norm" else 2.0
        heaviest = rstd * (dy.double().abs().max() * exact[1].abs().max())
        assert (got[0].double() - wanted[0]).abs().max() <= 4 * unit * heaviest
        assert got[0].stride() == leaves[0].stride()
        terms = (dy.double() * z.abs().clamp(min=1)).transpose(0, 1).flatten(1).square().sum(1).sqrt()
        for a, b in zip(got[1:3], wanted[1:3], strict=True):
            unit = torch.finfo(a.dtype).eps * (2 if dtype is torch.float64 else 1)
            assert ((a.double() - b).abs() <= 4 * unit * torch.maximum(terms, b.abs()).clamp(min=1)).all()
        if added:
            assert (got[3].double() - wanted[3]).abs().max() <= 4 * torch.finfo(dtype).eps * dy.abs().max()


@pytest.mark.parametrize("op", ["batch_norm", "affine"])
def test_what_is_added_may_lie_otherwise_in_memory(op: str) -> None:
    x, w, b, add = arguments(op, (2, 5, 7, 9), None, torch.float32, True)
    call = calls(op, x, "silu")
    want = call(x, w, b, add)
    for other in (
        add.to(memory_format=torch.channels_last),
        add.transpose(1, 2).contiguous().transpose(1, 2),
    ):
        assert torch.equal(call(x, w, b, other), want)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("activation", ["relu", "silu", "gelu", "gelu_tanh"])
def test_what_is_not_finite_stays_visible(activation: str, value: float) -> None:
    x = torch.randn(40, 3)
    x[7, 1] = value
    mean, var = torch.zeros(3), torch.ones(3)
    y = ops.affine(x, mean, var, None, None, 0.0, None, activation, None)
    # (gelu of inf is NaN in torch's vectors and inf in its scalars)
    assert torch.equal(y.isfinite(), ops.activate(x, activation).isfinite())
    assert ops.batch_norm(x, None, None, 1e-5, None, activation)[0][:, 1].isnan().all()


def test_relu_lets_gradients_pass_exactly_where_its_result_is_positive() -> None:
    """The backward forms z again: from other bits than the forward's it would choose another side."""
    for shape, last in SHAPES:
        x, w, b = arguments("batch_norm", shape, last, torch.float32, False)
        for op in ("batch_norm", "affine", "group_norm"):
            x = x.detach().requires_grad_()
            bias = b.detach().clone().requires_grad_()
            y = calls(op, x.detach(), "relu")(x, w, bias)
            (passed,) = torch.autograd.grad(y, bias, torch.ones_like(y))
            dims = [d for d in range(x.dim()) if d != 1]
            assert torch.equal(passed, (y > 0).sum(dims).float())


@pytest.mark.parametrize("activation", NAMES)
@pytest.mark.parametrize("op", ["batch_norm", "group_norm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_tensor_is_kept_for_the_backward(op: str, dtype: torch.dtype, activation: str | None) -> None:
    x, w, b = arguments(op, (4, 6, 32, 32), None, dtype, False)
    kept: dict[int, int] = {}

    def keep(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        calls(op, x, activation)(x.requires_grad_(), w.requires_grad_(), b.requires_grad_())
    assert sum(kept.values()) <= 1.05 * x.numel() * x.element_size()


@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
def test_same_bits_for_any_number_of_threads(activation: str | None) -> None:
    for shape, last in (((8, 6, 70, 90), None), ((8, 6, 70, 90), torch.channels_last), ((900, 70), None)):
        x, w, b, add = arguments("batch_norm", shape, last, torch.float32, True)
        dy = draw(shape, 9, torch.float32)
        for op in ("batch_norm", "affine", "group_norm"):
            call: Any = calls(op, x, activation)
            runs = []
            for threads in (1, 2, 4):
                torch.set_num_threads(threads)
                leaves = [t.detach().requires_grad_() for t in (x, w, b, add)][
                    : 3 if op == "group_norm" else 4
                ]
                y = call(*leaves)
                runs.append([y, *torch.autograd.grad(y, leaves, dy)])
            for run in runs[1:]:
                assert all(torch.equal(p, q) for p, q in zip(run, runs[0], strict=True))


@pytest.mark.parametrize("start", [0, 1, 5])
def test_results_too_large_for_the_caches_have_the_same_bits(start: int) -> None:
    """They are written past the caches, which asks for aligned addresses; those of a row's start are any."""
    n = 5 * 3 * 1_500_001
    x = torch.randn(n + start)[start:].view(5, 3, 1_500_001)
    w, b = torch.randn(3), torch.randn(3)
    mean, var = torch.zeros(3), torch.ones(3)
    y = ops.affine(x, mean, var, w, b, 1e-5, None, "relu", None)
    for i in (0, 4):
        few = ops.affine(x[i : i + 1, :, :100_000], mean, var, w, b, 1e-5, None, "relu", None)
        assert torch.equal(y[i : i + 1, :, :100_000], few)
        few = ops.affine(x[i : i + 1, :, -7777:], mean, var, w, b, 1e-5, None, "relu", None)
        assert torch.equal(y[i : i + 1, :, -7777:], few)
    wide = torch.randn(100_000, 64)
    last = ops.affine(wide, torch.zeros(64), torch.ones(64), None, None, 1e-5, None, None, None)
    few = ops.affine(wide[:99], torch.zeros(64), torch.ones(64), None, None, 1e-5, None, None, None)
    assert torch.equal(last[:99], few)
