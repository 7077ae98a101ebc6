"""Rows on the native kernels: activations and residuals fused, odd layouts, determinism, what is kept."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import musigma as ms
from musigma import ops
from native import RUN

pytestmark = pytest.mark.skipif(not RUN, reason="the native kernels are not built")

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
ACTIVATIONS = (None, *ops.ACTIVATIONS)


def draw(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32, mean: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) + mean).to(dtype)


def gradients(
    y: Tensor | tuple[Tensor, ...], leaves: list[Tensor], dtype: torch.dtype | None = None
) -> list[Tensor]:
    """Of a fixed upstream gradient, which `dtype` can hold."""
    outputs = y if isinstance(y, tuple) else (y,)
    upstream = [draw(tuple(o.shape), 9 + i, dtype or o.dtype).to(o.dtype) for i, o in enumerate(outputs)]
    return list(torch.autograd.grad(outputs, leaves, upstream))


def leaves_of(*tensors: Tensor) -> list[Tensor]:
    return [t.detach().requires_grad_() for t in tensors]


def assert_near(got: list[Tensor], want: list[Tensor], units: float) -> None:
    """Largest error over largest value."""
    for a, b in zip(got, want, strict=True):
        unit = torch.finfo(a.dtype).eps * (2 if a.dtype is torch.float64 else 1)
        assert (a.double() - b).abs().max() <= units * unit * b.abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7, 16, 63, 100, 1025])
@pytest.mark.parametrize("activation", ops.ACTIVATIONS)
def test_activations_of_every_length(activation: str, size: int, dtype: torch.dtype) -> None:
    x = draw((6, size), size, dtype, mean=1.0)
    weight, bias = draw((size,), 1, dtype), draw((size,), 2, dtype)
    for center in (True, False):
        leaves = leaves_of(x, weight, bias)
        exact = leaves_of(x.double(), weight.double(), bias.double())
        y = ops.row_norm(leaves[0], 1, leaves[1], leaves[2], 1e-5, center, activation)[0]
        with ops.use_kernels("reference"):
            want = ops.row_norm(exact[0], 1, exact[1], exact[2], 1e-5, center, activation)[0]
        got_all, want_all = [y, *gradients(y, leaves)], [want, *gradients(want, exact, dtype)]
        assert_near(got_all[:1], want_all[:1], 4)
        if size > 1:  # dx of a single value is 0 but for rounding
            # the slope at a z that is off by a unit or two, times a dz that is as large as the largest
            assert_near(got_all[1:], want_all[1:], 8)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_adding_first_is_adding_then_normalizing_bit_for_bit(
    dtype: torch.dtype, activation: str | None
) -> None:
    for shape, center in (((5, 7), True), ((37, 100), False), ((3, 4, 1025), True)):
        x, residual = draw(shape, 0, dtype, mean=3.0), draw(shape, 1, dtype)
        weight, bias = draw(shape[-1:], 2, dtype), draw(shape[-1:], 3, dtype)
        one, two = leaves_of(x, residual, weight, bias), leaves_of(x, residual, weight, bias)
        y, total, *_ = ops.add_row_norm(one[0], one[1], 1, one[2], one[3], 1e-5, center, activation)
        added = two[0] + two[1]
        wanted = ops.row_norm(added, 1, two[2], two[3], 1e-5, center, activation)[0]
        assert torch.equal(total, added)
        assert torch.equal(y, wanted)
        # of y alone, where both backwards do the same; then of both, where one rounds less
        for a, b in zip(gradients(y, one), gradients(wanted, two), strict=True):
            assert torch.equal(a, b)
        y, total, *_ = ops.add_row_norm(one[0], one[1], 1, one[2], one[3], 1e-5, center, activation)
        added = two[0] + two[1]
        wanted = ops.row_norm(added, 1, two[2], two[3], 1e-5, center, activation)[0]
        for a, b in zip(gradients((y, total), one), gradients((wanted, added), two), strict=True):
            torch.testing.assert_close(a, b, rtol=2 * torch.finfo(dtype).eps, atol=2 * torch.finfo(dtype).eps)


def test_the_gradient_of_an_unused_norm_is_that_of_the_sum() -> None:
    x, residual, weight = leaves_of(draw((4, 9), 0), draw((4, 9), 1), draw((9,), 2))
    y, total = ms.functional.add_rms_norm(x, residual, (9,), weight)
    dsum = draw((4, 9), 3)
    grads = torch.autograd.grad(total, [x, residual, weight], dsum, allow_unused=True, retain_graph=True)
    assert torch.equal(grads[0], dsum)
    assert torch.equal(grads[1], dsum)
    assert grads[2] is None
    assert torch.autograd.grad(y.sum(), [x])[0].isfinite().all()


def test_a_residual_stream_is_added_up_without_a_cycle() -> None:
    """The node of a sum that it keeps itself must go when the sum does."""
    import gc
    import weakref

    gc.disable()
    try:
        x, residual = leaves_of(draw((4, 9), 0), draw((4, 9), 1))
        y, total = ms.functional.add_layer_norm(x, residual, (9,))
        gone = weakref.ref(total)
        storage = weakref.ref(total.untyped_storage())
        del y, total
        assert gone() is None
        assert storage() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(300, 700), (5, 3, 257), (1, 40_000), (2050, 16)])
def test_same_bits_for_any_number_of_threads_and_any_batch(
    shape: tuple[int, ...], activation: str | None
) -> None:
    x, residual = draw(shape, 0, mean=1.0), draw(shape, 1)
    weight, bias = draw(shape[-1:], 2), draw(shape[-1:], 3)

    def run(x: Tensor, residual: Tensor) -> list[Tensor]:
        leaves = leaves_of(x, residual, weight, bias)
        results = ops.add_row_norm(leaves[0], leaves[1], 1, leaves[2], leaves[3], 1e-5, True, activation)[:2]
        return [*results, *gradients(results, leaves)]

    runs = []
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        runs.append(run(x, residual))
    for other, i in itertools.product(runs[1:], range(6)):
        assert torch.equal(other[i], runs[0][i])
    for k in (0, shape[0] // 2, shape[0] - 1):
        alone = run(x[k : k + 1], residual[k : k + 1])
        assert torch.equal(alone[0], runs[0][0][k : k + 1])
        assert torch.equal(alone[1], runs[0][1][k : k + 1])


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_row_in_double_leaves_its_neighbours_as_they_are(activation: str | None) -> None:
    """Rows are done four at a time; one whose squares overflow float32 is done again, and alone."""
    x, weight, bias = draw((8, 50), 0), draw((50,), 1), draw((50,), 2)
    dy = draw((8, 50), 3)

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        leaf = x.requires_grad_()
        y = ops.row_norm(leaf, 1, weight, bias, 1e-12, True, activation)[0]
        return y.detach(), torch.autograd.grad(y, leaf, dy)[0]

    y, dx = run(x.clone())
    for k in range(8):
        spiked = x.clone()
        spiked[k] *= 1e25
        got, gradient = run(spiked)
        others = [i for i in range(8) if i != k]
        assert torch.equal(got[others], y[others])
        assert torch.equal(gradient[others], dx[others])
        assert (got[k] - y[k]).abs().max() <= 8 * 2**-23 * y[k].abs().max()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_constant_rows_give_exactly_the_activated_bias(activation: str | None) -> None:
    bias, weight = draw((100,), 0), draw((100,), 1)
    zero = ops.row_norm(torch.zeros(1, 100), 1, torch.zeros(100), bias, 1e-5, True, activation)[0]
    for value in (0.1, -7.3e9, 1e30, 3e38):
        for n in (5, 100):
            x = torch.full((3, n), value)
            y = ops.row_norm(x, 1, weight[:n], bias[:n], 1e-5, True, activation)[0]
            assert torch.equal(y, zero[:, :n].expand(3, n))


@pytest.mark.parametrize("pivot", [1e3, -1e6, 1e8])
@pytest.mark.parametrize("size", [16, 20, 64, 1000])
def test_a_first_vector_unlike_the_rest_is_no_pivot(size: int, pivot: float) -> None:
    """Sums are taken around the mean of the first values, and again where that was far off."""
    for first in (1, 8, 16):
        x = draw((4, size), 0)
        x[:, :first] = pivot
        y = ms.functional.layer_norm(x, (size,))
        want = F.layer_norm(x.double(), (size,))
        assert (y.double() - want).abs().max() <= 4 * 2**-23 * want.abs().max()


def test_activations_and_sums_are_not_kept_for_backward() -> None:
    """x (or the sum), two doubles a row and the parameters: nothing else of the input's size."""
    x = draw((64, 512), 0).requires_grad_()
    residual = draw((64, 512), 1)
    weight, bias = leaves_of(draw((512,), 2), draw((512,), 3))
    kept: list[Tensor] = []

    def keep(t: Tensor) -> Tensor:
        kept.append(t)
        return t

    calls: list[Any] = [
        lambda: ms.functional.layer_norm(x, (512,), weight, bias, activation="gelu"),
        lambda: ms.functional.rms_norm(x, (512,), weight, activation="silu"),
        lambda: ms.functional.add_layer_norm(x, residual, (512,), weight, bias, activation="relu"),
    ]
    for call in calls:
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            call()
        size = sum(t.nbytes for t in kept if t.numel() > 512)
        assert size == x.nbytes
        assert sum(t.nbytes for t in kept if t.dtype is torch.float64) == 2 * 64 * 8


@pytest.mark.parametrize("kinds", list(itertools.product(DTYPES[:1] + DTYPES[2:], repeat=2)))
@pytest.mark.parametrize("dtype", DTYPES[2:])
def test_half_precision_beside_parameters_of_any_type(
    dtype: torch.dtype, kinds: tuple[torch.dtype, ...]
) -> None:
    x = draw((5, 70), 0, dtype, mean=1.0)
    weight, bias = draw((70,), 1, kinds[0]), draw((70,), 2, kinds[1])
    leaves, exact = leaves_of(x, weight, bias), leaves_of(x.double(), weight.double(), bias.double())
    y = ms.functional.layer_norm(leaves[0], (70,), leaves[1], leaves[2])
    want = F.layer_norm(exact[0], (70,), exact[1], exact[2])
    assert_near([y], [want], 1)
    for got, wanted in zip(gradients(y, leaves), gradients(want, exact, dtype), strict=True):
        assert_near([got], [wanted], 4)


@pytest.mark.parametrize("width", [1 << 16, 1 << 20])
def test_long_rows(width: int) -> None:
    x = draw((2, width), 0, mean=5.0)
    leaf, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    y, want = ms.functional.layer_norm(leaf, (width,)), F.layer_norm(exact, (width,))
    assert_near([y, *gradients(y, [leaf])], [want, *gradients(want, [exact], torch.float32)], 4)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8), (2, 0)])
def test_nothing_to_normalize(shape: tuple[int, ...]) -> None:
    weight = torch.ones(shape[-1:], requires_grad=True)
    x = torch.empty(shape, requires_grad=True)
    y, total = ms.functional.add_layer_norm(x, x, shape[-1:], weight, activation="silu")
    assert y.shape == total.shape == x.shape
    dx, dweight = torch.autograd.grad(y.sum(), [x, weight])
    assert dx.shape == x.shape
    assert torch.equal(dweight, torch.zeros(shape[-1:]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_rounded_as_torch_rounds(dtype: torch.dtype) -> None:
    """Ties to even, subnormals, overflow, every kind of NaN: a weight of 0 leaves the float32 bias alone."""
    unit = 23 - (7 if dtype is torch.bfloat16 else 10)  # bits that are rounded off
    generator = torch.Generator().manual_seed(0)
    upper = torch.randint(-(2 ** (31 - unit)), 2 ** (31 - unit), (4096,), generator=generator) << unit
    lower = torch.tensor([0, 1, 2 ** (unit - 1) - 1, 2 ** (unit - 1), 2 ** (unit - 1) + 1, 2**unit - 1])
    bits = torch.cat([(upper[:, None] + lower).flatten(), torch.tensor([2**31 - 1, -1, 0x7F800001])])
    bias = bits.to(torch.int32).view(torch.float32)
    x = draw((1, bias.numel()), 1, dtype)
    y = ops.row_norm(x, 1, torch.zeros_like(bias), bias, 1e-5, True, None)[0][0]
    want = bias.to(dtype)
    assert torch.equal(y.isnan(), want.isnan())
    assert torch.equal(y[~y.isnan()].view(torch.int16), want[~y.isnan()].view(torch.int16))
