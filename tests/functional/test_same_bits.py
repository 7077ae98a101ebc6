"""The same values give the same bits: whatever the threads, the batch around them, their place in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import musigma as ms
from native import RUN

pytestmark = pytest.mark.skipif(not RUN, reason="the promise is that of the native kernels")

f = ms.functional
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

Call = Callable[[Tensor, Tensor, Tensor, Tensor, str | None], Tensor]
OPS: dict[str, Call] = {
    # x, another of x's shape, a weight and a bias of 24 values; 24 is x's size in dim 1 and in the last
    "layer": lambda x, m, w, b, a: f.layer_norm(x, (24,), w, b, activation=a),
    "rms": lambda x, m, w, b, a: f.rms_norm(x, (24,), w, activation=a) + 0 * b,
    "add_layer": lambda x, m, w, b, a: f.add_layer_norm(x, m, (24,), w, b, activation=a)[0],
    "add_rms": lambda x, m, w, b, a: f.add_rms_norm(x, m, (24,), w, activation=a)[0] + 0 * b,
    "group": lambda x, m, w, b, a: f.group_norm(x, 6, w, b, activation=a),
    "instance": lambda x, m, w, b, a: f.instance_norm(x, weight=w, bias=b, activation=a),
    "batch": lambda x, m, w, b, a: f.batch_norm(x, None, None, w, b, True, activation=a),
    "batch_add": lambda x, m, w, b, a: f.batch_norm(x, None, None, w, b, True, add=m, activation=a),
    "batch_masked": lambda x, m, w, b, a: f.batch_norm(
        x, None, None, w, b, True, mask=torch.arange(24) % 3 != 1, activation=a
    ),
    "batch_eval": lambda x, m, w, b, a: f.batch_norm(x, w.abs(), w.abs(), w, b, activation=a),
}
# Those whose examples are independent of each other.
EXAMPLES = [name for name in OPS if not name.startswith("batch") or name == "batch_eval"]


def draw(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=g, dtype=torch.float64) + 0.5).to(dtype)


def run(call: Call, x: Tensor, more: Tensor, dy: Tensor, activation: str | None) -> list[Tensor]:
    """y and the gradients of x, `more`, weight and bias, those that there are."""
    weight, bias = draw((24,), 8, x.dtype), draw((24,), 9, x.dtype)
    leaves = [t.detach().requires_grad_() for t in (x, more, weight, bias)]
    y = call(*leaves, activation)
    grads = torch.autograd.grad(y, leaves, dy, allow_unused=True)
    return [y.detach(), *(g for g in grads if g is not None)]


def assert_same_bits(got: list[Tensor], want: list[Tensor]) -> None:
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


# Enough values for four threads, in rows and in channels; and too few examples for one each.
LARGE = ((64, 24, 40, 24), (3, 24, 150, 24), (1500, 24, 24))


@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize("shape", LARGE)
@pytest.mark.parametrize("name", OPS)
def test_any_number_of_threads(name: str, shape: tuple[int, ...], activation: str | None) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for format_ in (torch.contiguous_format, torch.channels_last)[: len(shape) - 2]:
            x, more, dy = (draw(shape, seed, dtype).contiguous(memory_format=format_) for seed in range(3))
            runs = []
            for threads in (1, 2, 4):
                torch.set_num_threads(threads)
                runs.append(run(OPS[name], x, more, dy, activation))
            assert_same_bits(runs[1], runs[0])
            assert_same_bits(runs[2], runs[0])


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", EXAMPLES)
def test_any_batch_and_any_place_in_it(name: str, dtype: torch.dtype, activation: str | None) -> None:
    for last in (False, True):
        tensors = [draw((67, 24, 5, 24), seed, dtype) for seed in range(3)]
        if last:
            tensors = [channels_last(t) for t in tensors]
        all_y, all_dx, *_ = run(OPS[name], *tensors, activation)
        for begin, end in ((0, 1), (66, 67), (3, 40)):
            part = [t[begin:end] for t in tensors]
            y, dx, *_ = run(OPS[name], *part, activation)
            assert torch.equal(y, all_y[begin:end])
            assert torch.equal(dx, all_dx[begin:end])


def elsewhere(x: Tensor) -> Iterator[Tensor]:
    """The same values: misaligned, with gaps between and within rows, with their dims in another order."""
    for shift in (1, 3):
        yield torch.empty(x.numel() + shift, dtype=x.dtype)[shift:].view(x.shape).copy_(x)
    yield torch.empty(*x.shape[:-1], 29, dtype=x.dtype)[..., 2:26].copy_(x)
    yield x.repeat_interleave(2, -1)[..., ::2]
    yield x.repeat_interleave(2, 0)[1::2]
    yield x.transpose(0, 1).contiguous().transpose(0, 1)
    yield x.transpose(0, -1).contiguous().transpose(0, -1)


@pytest.mark.parametrize("activation", [None, "gelu_tanh"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPS)
def test_anywhere_in_memory(name: str, dtype: torch.dtype, activation: str | None) -> None:
    x, more, dy = (draw((35, 24, 24), seed, dtype) for seed in range(3))
    want = run(OPS[name], x, more, dy, activation)
    for xs, ms_, dys in zip(elsewhere(x), elsewhere(more), elsewhere(dy), strict=True):
        in_order = list(xs.stride()) == sorted(xs.stride(), reverse=True)
        if name == "batch_masked" and dtype == torch.float64 and not in_order:
            continue  # moments read any dense memory in its own order, whose rounding double can't hide
        assert_same_bits(run(OPS[name], xs, more, dy, activation), want)
        assert_same_bits(run(OPS[name], xs, ms_, dys, activation), want)


@pytest.mark.parametrize("name", OPS)
def test_an_expanded_gradient_is_as_good_as_a_full_one(name: str) -> None:
    """`y.sum().backward()` hands down one value with strides of 0."""
    x, more = (draw((35, 24, 24), seed, torch.float32) for seed in range(2))
    one = torch.ones(())
    assert_same_bits(
        run(OPS[name], x, more, one.expand_as(x), "relu"),
        run(OPS[name], x, more, one.expand_as(x).contiguous(), "relu"),
    )
