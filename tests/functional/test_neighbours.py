"""What one set of values does to the others, be it NaN, infinite, constant, huge or not there: nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import musigma as ms
from exact import Norm, Sets, units_off
from native import RUN

pytestmark = pytest.mark.skipif(not RUN, reason="the promise is that of the native kernels")

f = ms.functional
Call = Callable[[Tensor, Tensor, Tensor, str | None], Tensor]
C = 20
PER_EXAMPLE: dict[str, Call] = {
    # x of (n, C, 3, C), a weight and a bias of C values
    "layer": lambda x, w, b, a: f.layer_norm(x, (C,), w, b, activation=a),
    "rms": lambda x, w, b, a: f.rms_norm(x, (C,), w, activation=a) + 0 * b,
    "add_layer": lambda x, w, b, a: f.add_layer_norm(x, x, (C,), w, b, activation=a)[0],
    "group": lambda x, w, b, a: f.group_norm(x, 4, w, b, activation=a),
    "instance": lambda x, w, b, a: f.instance_norm(x, weight=w, bias=b, activation=a),
}
PER_CHANNEL: dict[str, Call] = {
    "batch": lambda x, w, b, a: f.batch_norm(x, None, None, w, b, True, activation=a),
    "batch_eval": lambda x, w, b, a: f.batch_norm(x, b, w.abs(), w, b, activation=a),
}
FORMATS = (torch.contiguous_format, torch.channels_last)
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def gradients(call: Call, x: Tensor, activation: str | None = None) -> list[Tensor]:
    """y, dx, dweight and dbias."""
    w, b = torch.linspace(-2, 2, C, dtype=x.dtype), torch.linspace(1, 3, C, dtype=x.dtype)
    leaves = [t.detach().requires_grad_() for t in (x, w, b)]
    y = call(*leaves, activation)
    dy = torch.linspace(-1, 1, x.numel()).to(x.dtype).view(x.shape)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def assert_rounded(got: Tensor, want: Tensor) -> None:
    """The same but for rounding: where one channel leaves float32's range, all are done in double."""
    assert (got - want).abs().max() <= 4 * torch.finfo(got.dtype).eps * want.abs().max()


@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e38])
@pytest.mark.parametrize("name", [*PER_EXAMPLE, *PER_CHANNEL])
def test_what_is_not_finite_stays_where_it_is(
    name: str, value: float, dtype: torch.dtype, memory_format: torch.memory_format, activation: str | None
) -> None:
    call = (PER_EXAMPLE | PER_CHANNEL)[name]
    clean = torch.randn(5, C, 3, C, generator=torch.Generator().manual_seed(0)).to(dtype)
    clean = clean.contiguous(memory_format=memory_format)
    want = gradients(call, clean, activation)
    for position in (0, 7, C - 1):  # the first is what statistics are taken from
        x = clean.clone(memory_format=torch.preserve_format)
        x[1, position, 0, position] = value
        y, dx, dweight, dbias = gradients(call, x, activation)
        hit = torch.zeros(5, C, 3, C, dtype=torch.bool)
        if name in PER_CHANNEL:
            hit[:, position] = True
            others = torch.arange(C) != position
            assert_rounded(dweight[others], want[2][others])
            assert_rounded(dbias[others], want[3][others])
            assert_rounded(y[~hit], want[0][~hit])
            assert_rounded(dx[~hit], want[1][~hit])
        else:
            hit[1] = True
            assert torch.equal(y[~hit], want[0][~hit])
            assert torch.equal(dx[~hit], want[1][~hit])
        if value == 1e38:
            assert y.isfinite().all()
            assert dx.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [0.0, 0.1, -7.3e9, 3e30])
def test_a_constant_row_gives_the_bias_and_finite_gradients(value: float, dtype: torch.dtype) -> None:
    x = torch.full((6, C, 3, C), value, dtype=dtype)
    bias = torch.linspace(1, 3, C, dtype=dtype)
    for memory_format in FORMATS:
        for name, call in (PER_EXAMPLE | PER_CHANNEL).items():
            if name in ("rms", "batch_eval"):
                continue
            y, *grads = gradients(call, x.contiguous(memory_format=memory_format))
            along = bias if name.endswith("layer") else bias[:, None, None]
            assert torch.equal(y, along.expand_as(y))
            assert all(g.isfinite().all() for g in grads)


@pytest.mark.parametrize("name", [*PER_EXAMPLE, *PER_CHANNEL])
def test_an_empty_batch_has_gradients_of_zero(name: str) -> None:
    call = (PER_EXAMPLE | PER_CHANNEL)[name]
    for shape in ((0, C, 3, C), (0, C, 0, C)):
        y, dx, dweight, dbias = gradients(call, torch.empty(shape))
        assert y.shape == dx.shape == shape
        assert torch.equal(dweight, torch.zeros(C))
        assert torch.equal(dbias, torch.zeros(C))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["layer", "rms", "group", "batch"])
def test_rows_of_a_million_values(name: str, dtype: torch.dtype) -> None:
    n = 2**20
    x = (torch.randn(2, n, generator=torch.Generator().manual_seed(0)) + 3).to(dtype)
    sets = Sets.rows((2, n), 1)
    if name in ("group", "batch"):
        x = x.view((2, 4, n // 4) if name == "group" else (4, 2, n // 4))
        sets = Sets.groups((2, 4, n // 4), 1) if name == "group" else Sets.channels((4, 2, n // 4))
    calls: dict[str, Callable[[Tensor], Tensor]] = {
        "layer": lambda x: f.layer_norm(x, (n,)),
        "rms": lambda x: f.rms_norm(x, (n,), eps=1e-5),
        "group": lambda x: f.group_norm(x, 1),
        "batch": lambda x: f.batch_norm(x, None, None, training=True),
    }
    leaf = x.requires_grad_()
    y = calls[name](leaf)
    dy = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    (dx,) = torch.autograd.grad(y, leaf, dy)
    norm = Norm.of(x, sets, None, None, 1e-5, center=name != "rms")
    want, scale = norm.backward(dy, center=name != "rms")["dx"]
    assert units_off(y, norm.y, norm.largest) <= 4
    assert units_off(dx, want, scale) <= 4
