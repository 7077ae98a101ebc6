"""The native kernels against the references: sizes, layouts, dtypes and options, to the promised accuracy."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from musigma import ops

pytestmark = pytest.mark.skipif(
    all(k.runs != "native" for k in ops.kernels()), reason="the native kernels are not built"
)

SIZES = (1, 7, 8, 63, 64, 100, 1023, 1024, 1025)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


@dataclass(frozen=True)
class Norm:
    """One way to normalize: the op, and its arguments besides x, weight, bias and eps."""

    op: str
    extra: tuple[Any, ...] = ()

    def parameter_shape(self, x: Tensor) -> tuple[int, ...]:
        return tuple(x.shape[-self.extra[0] :]) if self.op == "row_norm" else (x.shape[1],)

    def __call__(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5) -> Tensor:
        if self.op == "row_norm":
            n_dims, center = self.extra
            return ops.row_norm(x, n_dims, weight, bias, eps, center, None)[0]
        if self.op == "group_norm":
            return ops.group_norm(x, *self.extra, weight, bias, eps, None)[0]
        return ops.batch_norm(x, weight, bias, eps, None, None)[0]

    def rows(self, x: Tensor) -> Tensor:
        """x, in float64, as (rows, width), one set of statistics a row."""
        x = x.detach().double()
        if self.op == "row_norm":
            return x.flatten(-self.extra[0]).flatten(0, -2) if x.dim() > 1 else x[None]
        if self.op == "group_norm":
            return x.reshape(x.shape[0] * self.extra[0], -1)
        return x.transpose(0, 1).reshape(x.shape[1], -1)


def draw(
    shape: tuple[int, ...], seed: int, dtype: torch.dtype, mean: float = 0.0, scale: float = 1.0
) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return ((torch.randn(shape, generator=g, dtype=torch.float64) + mean) * scale).to(dtype)


def units(dtype: torch.dtype) -> float:
    """One unit in the last place of 1. In float64 the reference is as far off: its 4 come on top."""
    return torch.finfo(dtype).eps * (2 if dtype == torch.float64 else 1)


def assert_promised(
    norm: Norm, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5
) -> None:
    """y and every gradient within 4 units in the last place of the float64 reference."""
    leaves = [None if t is None else t.detach().requires_grad_() for t in (x, weight, bias)]
    exact = [None if t is None else t.detach().double().requires_grad_() for t in (x, weight, bias)]
    y = norm(*leaves, eps)
    dy = draw(tuple(x.shape), 9, x.dtype)
    with ops.use_kernels("reference"):
        want = norm(*exact, eps)
        wanted = torch.autograd.grad(want, [t for t in exact if t is not None], dy.double())
    got = torch.autograd.grad(y, [t for t in leaves if t is not None], dy)
    unit = units(x.dtype)
    assert y.dtype == x.dtype
    assert (y.double() - want).abs().max() <= 4 * unit * want.abs().max()

    rows = norm.rows(x)
    spread = (rows.var(-1, correction=0) if norm.extra[-1:] != (False,) else rows.square().mean(-1)) + eps
    g = dy.double() if weight is None else dy.double() * (want.detach() * 0 + _against(weight, want, norm))
    # dx against rstd · max|dy · weight|
    assert got[0].dtype == x.dtype
    assert (got[0].double() - wanted[0]).abs().max() <= 4 * unit * spread.rsqrt().max() * g.abs().max()
    if weight is not None:
        normalized = (want.detach() - (0 if bias is None else _against(bias, want, norm))) / _against(
            weight, want, norm
        )
        assert_sum(got[1], wanted[1], dy.double() * normalized, norm)
    if bias is not None:
        assert_sum(got[-1], wanted[-1], dy.double(), norm)


def _against(parameter: Tensor, x: Tensor, norm: Norm) -> Tensor:
    p = parameter.detach().double()
    return p if norm.op == "row_norm" else p.reshape(-1, *[1] * (x.dim() - 2))


def assert_sum(got: Tensor, want: Tensor, terms: Tensor, norm: Norm) -> None:
    """A sum over rows within 4 units of max(√rows · rms of its terms, |result|)."""
    terms = terms.reshape(-1, *want.shape) if norm.op == "row_norm" else terms.transpose(0, 1).flatten(1).T
    scale = torch.maximum(terms.square().sum(0).sqrt(), want.abs())
    unit = units(got.dtype)
    # an element whose terms happen to be tiny is held to the typical one
    assert ((got.double() - want).abs() <= 4 * unit * torch.maximum(scale, scale.mean())).all()


def weights(norm: Norm, x: Tensor, kind: str) -> tuple[Tensor | None, Tensor | None]:
    shape = norm.parameter_shape(x)
    dtype = torch.float32 if kind == "float32" and x.dtype != torch.float64 else x.dtype
    # away from 0, where dividing by the weight to find x̂ again would only measure the test
    weight = draw(shape, 1, dtype).sign() * (draw(shape, 2, dtype).abs() + 0.5)
    bias = draw(shape, 3, dtype)
    return (None if kind in ("none", "bias") else weight), (None if kind in ("none", "weight") else bias)


KINDS = ("none", "weight", "bias", "both", "float32")


def images(size: int) -> Iterator[Tensor]:
    """Shapes with `size` as the channels, the batch, and the positions."""
    yield from (torch.empty(s) for s in ((5, size), (size + 2, 3), (3, 6, size), (2, size, 2, 3)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("center", [True, False])
def test_rows_of_every_length(size: int, center: bool, dtype: torch.dtype) -> None:
    norm = Norm("row_norm", (1, center))
    for kind in KINDS if size < 100 else ("both", "none"):
        x = draw((5, size), size, dtype, mean=2.0)
        if size == 1 and center:
            continue  # one value: what is left is the bias, tested below
        assert_promised(norm, x, *weights(norm, x, kind))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("op", ["batch_norm", "group_norm"])
def test_channels_and_positions_of_every_number(op: str, size: int, dtype: torch.dtype) -> None:
    for like in images(size):
        c = like.shape[1]
        norm = Norm(op) if op == "batch_norm" else Norm(op, (3 if c % 3 == 0 else 1,))
        x = draw(tuple(like.shape), size, dtype, mean=2.0)
        if norm.rows(x).shape[1] == 1:
            continue
        for kind in ("both", "none") if size > 8 else KINDS:
            assert_promised(norm, x, *weights(norm, x, kind))
            if x.dim() in FORMATS:
                last = x.to(memory_format=FORMATS[x.dim()])
                assert_promised(norm, last, *weights(norm, x, kind))


@pytest.mark.parametrize("op", ["batch_norm", "group_norm"])
@pytest.mark.parametrize(
    "shape", [(2, 6, 3, 5, 7), (3, 33, 5, 5), (4, 6, 90, 100), (70, 4, 1, 1), (1, 12, 40, 40)]
)
def test_both_memory_formats(op: str, shape: tuple[int, ...]) -> None:
    norm = Norm(op) if op == "batch_norm" else Norm(op, (2 if shape[1] % 2 == 0 else 3,))
    x = draw(shape, 0, torch.float32, mean=5.0)
    last = x.to(memory_format=FORMATS[x.dim()])
    for t in (x, last):
        assert_promised(norm, t, *weights(norm, t, "both"))
        kept = FORMATS[x.dim()] if t is last else torch.contiguous_format
        assert norm(t, None, None).is_contiguous(memory_format=kept)


@pytest.mark.parametrize("op", ["row_norm", "batch_norm", "group_norm"])
@given(
    ratio=st.sampled_from([0.0, 1.0, 1e2, 1e4, 1e6]),
    exponent=st.integers(-30, 30),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    width=st.integers(2, 300),
    seed=st.integers(0, 2**16),
    last=st.booleans(),
)
def test_any_mean_and_any_scale(
    op: str, ratio: float, exponent: int, dtype: torch.dtype, width: int, seed: int, last: bool
) -> None:
    if ratio * torch.finfo(dtype).eps >= 0.3:
        return  # at such a ratio the input itself has lost its spread
    scale = 10.0**exponent
    if op == "row_norm":
        norm, shape = Norm(op, (1, True)), (4, width)
    else:
        norm, shape = Norm(op) if op == "batch_norm" else Norm(op, (2,)), (3, 4, width, 2)
    x = draw(shape, seed, dtype, mean=ratio, scale=scale)
    if last and x.dim() == 4:
        x = x.to(memory_format=torch.channels_last)
    if norm.rows(x).var(-1).min() == 0:
        return  # constant: below
    eps = 1e-5 * scale**2 if exponent < 0 else 1e-5
    # dweight is asked to be right too, whose terms are finite here
    assert_promised(norm, x, *weights(norm, x, "both"), eps)


@pytest.mark.parametrize("value", [0.1, -7.3e9, 1e30])
@pytest.mark.parametrize("op", ["row_norm", "batch_norm", "group_norm"])
def test_constant_values_give_exactly_the_bias_and_finite_gradients(op: str, value: float) -> None:
    for shape, last in (((3, 4, 5, 7), False), ((3, 4, 5, 7), True), ((70, 64), False)):
        norm = Norm(op, {"row_norm": (1, True), "group_norm": (2,)}.get(op, ()))
        x = torch.full(shape, value)
        if last:
            x = x.to(memory_format=torch.channels_last)
        x.requires_grad_()
        weight, bias = weights(norm, x, "both")
        y = norm(x, weight, bias)
        assert torch.equal(y, _against(bias, y, norm).float().expand_as(y))
        assert torch.autograd.grad(y, x, torch.randn_like(y))[0].isfinite().all()


def strided_copies(x: Tensor) -> Iterator[Tensor]:
    """The same values as x elsewhere in memory: misaligned, with gaps between rows, transposed."""
    for shift in (1, 3):
        flat = torch.empty(x.numel() + shift, dtype=x.dtype)[shift:]
        yield flat.copy_(x.flatten()).view(x.shape)
    wide = torch.empty(*x.shape[:-1], x.shape[-1] + 5, dtype=x.dtype)[..., : x.shape[-1]]
    yield wide.copy_(x)
    yield x.transpose(0, -1).contiguous().transpose(0, -1)
    yield x.repeat_interleave(2, 0)[::2]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", ["row_norm", "batch_norm", "group_norm"])
def test_same_bits_wherever_the_values_lie(op: str, dtype: torch.dtype) -> None:
    norm = Norm(op, {"row_norm": (1, True), "group_norm": (3,)}.get(op, ()))
    x = draw((37, 6, 101), 0, dtype, mean=1.0)
    weight, bias = weights(norm, x, "both")
    dy = draw(tuple(x.shape), 1, dtype)

    def run(x: Tensor) -> list[Tensor]:
        leaves = [t.detach().requires_grad_() for t in (x, weight, bias)]
        y = norm(*leaves)
        return [y, *torch.autograd.grad(y, leaves, dy)]

    want = run(x)
    for other in strided_copies(x):
        for a, b in zip(run(other), want, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", ["row_norm", "group_norm"])
def test_a_row_does_not_depend_on_its_batch(op: str, dtype: torch.dtype) -> None:
    norm = Norm(op, (1, True) if op == "row_norm" else (3,))
    x = draw((67, 6, 5, 23), 0, dtype, mean=1.0)
    dy = draw(tuple(x.shape), 1, dtype)
    weight, bias = weights(norm, x, "both")

    def run(x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        y = norm(x, weight, bias)
        return y, torch.autograd.grad(y, x, dy)[0]

    y, dx = run(x, dy)
    for begin, end in ((0, 1), (66, 67), (3, 40)):
        part = run(x[begin:end], dy[begin:end])
        assert torch.equal(part[0], y[begin:end])
        assert torch.equal(part[1], dx[begin:end])


@pytest.mark.parametrize(
    ("norm", "shape"),
    [
        (Norm("row_norm", (1, True)), (300, 700)),
        (Norm("row_norm", (1, False)), (300, 700)),
        (Norm("row_norm", (1, True)), (2, 150_000)),
        (Norm("batch_norm"), (200, 1000)),
        (Norm("batch_norm"), (8, 5, 60, 100)),
        (Norm("group_norm", (5,)), (1, 10, 200, 100)),
        (Norm("group_norm", (5,)), (6, 10, 60, 100)),
    ],
)
def test_same_bits_for_any_number_of_threads(norm: Norm, shape: tuple[int, ...]) -> None:
    formats = (
        (torch.contiguous_format, torch.channels_last) if len(shape) == 4 else (torch.contiguous_format,)
    )
    for memory_format in formats:
        x = draw(shape, 0, torch.float32, mean=1.0).to(memory_format=memory_format)
        weight, bias = weights(norm, x, "both")
        dy = draw(shape, 1, torch.float32)
        runs = []
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            leaves = [t.detach().requires_grad_() for t in (x, weight, bias)]
            y = norm(*leaves)
            runs.append([y, *torch.autograd.grad(y, leaves, dy)])
        for run, t in itertools.product(runs[1:], range(4)):
            assert torch.equal(run[t], runs[0][t])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims", [[0], [1], [-1], [0, 2], [0, 2, 3], [1, 2, 3], [0, 1, 2, 3], [2, 0]])
def test_moments_over_any_dims(dims: list[int], dtype: torch.dtype) -> None:
    x = draw((3, 5, 7, 21), 0, dtype, mean=1e2)
    for t in (x, x.to(memory_format=torch.channels_last), x.transpose(1, 3), x[:, :, ::2]):
        got = ops.moments(t, dims, None)
        with ops.use_kernels("reference"):
            want = ops.moments(t, dims, None)
        for a, b in zip(got, want, strict=True):
            assert a.shape == b.shape
            # both sum in float64, in another order
            torch.testing.assert_close(a, b, rtol=1e-13, atol=0.0)


@pytest.mark.parametrize("exponent", [-30, 0, 30])
def test_affine_over_scales_and_layouts(exponent: int) -> None:
    x = draw((3, 19, 4, 5), 0, torch.float32, scale=10.0**exponent)
    mean, var = x.double().mean((0, 2, 3)), x.double().var((0, 2, 3))
    weight, bias = draw((19,), 1, torch.float32), draw((19,), 2, torch.float32)
    plain = (None, None, None)
    for t in (x, x.to(memory_format=torch.channels_last), x.transpose(2, 3)):
        y = ops.affine(t, mean, var, weight, bias, 1e-5 * 10.0 ** min(2 * exponent, 0), *plain)
        with ops.use_kernels("reference"):
            want = ops.affine(
                t.double(), mean, var, weight, bias, 1e-5 * 10.0 ** min(2 * exponent, 0), *plain
            )
        assert (y.double() - want).abs().max() <= 4 * 2**-23 * want.abs().max()


@pytest.mark.parametrize("mode", ["off", "reference"])
def test_switched_off_the_ops_run_their_references(mode: str) -> None:
    x = draw((3, 101), 0, torch.float32)
    want = ops.row_norm.reference(x, 1, None, None, 1e-5, True, None)[0]
    assert not torch.equal(ops.row_norm(x, 1, None, None, 1e-5, True, None)[0], want)
    with ops.use_kernels(mode):
        assert torch.equal(ops.row_norm(x, 1, None, None, 1e-5, True, None)[0], want)


def test_rounding_of_half_types_is_torchs() -> None:
    # every float16 and bfloat16 value, and what lies between them
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    mean, var = torch.zeros(1), torch.ones(1)
    for dtype in (torch.float16, torch.bfloat16):
        x = every.view(dtype)
        x = x[x.isfinite()][:, None]
        for scale in (1.0, 0.75, 1.0 + 2**-12):
            y = ops.affine(x, mean, var, torch.tensor([scale]), None, 0.0, None, None, None)
            assert torch.equal(y, (x.float() * scale).to(dtype))


def test_a_backward_given_statistics_of_another_size_reads_nothing_beyond_them() -> None:
    x, few = torch.randn(4, 6, 5), torch.zeros(2, dtype=torch.float64)
    call = torch.ops.musigma
    needs = [True, True, True]
    for dx, *_ in (
        # the references find the statistics again, whatever they are told
        call.row_norm_backward(x, x, 1, None, None, few, few, 1e-5, True, None, needs),
        call.batch_norm_backward(x, x, None, None, None, few, few, 1e-5, None, [*needs, False]),
        call.group_norm_backward(x, x, 2, None, None, few, few, 1e-5, None, needs),
    ):
        assert dx.shape == x.shape
        assert dx.isfinite().all()


@pytest.mark.parametrize("op", ["row_norm", "group_norm"])
def test_a_number_too_large_for_a_machine_word_is_refused(op: str) -> None:
    rest = (None, None, 1e-5, True, None) if op == "row_norm" else (None, None, 1e-5, None)
    with pytest.raises((RuntimeError, OverflowError, TypeError)):
        ops.OPS[op](torch.randn(4, 6), 2**70, *rest)
