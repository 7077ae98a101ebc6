"""What holds for every normalization whatever kernel serves it: dtypes, layouts, arguments."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.testing import assert_close

import musigma as ms

f = ms.functional

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

PATHS = ("auto", "reference")

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda t: F.gelu(t, approximate="tanh"),
}


def call(
    name: str,
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    running: tuple[Tensor, Tensor] | None = None,
    **more: Any,
) -> Tensor:
    """Each function on (n, c, h, w), with weight and bias of shape (c,); the row norms over the channels."""
    mean, var = running or (None, None)
    match name:
        case "layer_norm":
            return f.layer_norm(x.movedim(1, -1), (x.shape[1],), weight, bias, **more).movedim(-1, 1)
        case "rms_norm":
            return f.rms_norm(x.movedim(1, -1), (x.shape[1],), weight, **more).movedim(-1, 1)
        case "group_norm":
            return f.group_norm(x, 2, weight, bias, **more)
        case "instance_norm":
            return f.instance_norm(x, mean, var, weight, bias, **more)
        case "batch_norm":
            return f.batch_norm(x, mean, var, weight, bias, True, **more)
        case _:
            assert name == "batch_norm_eval"
            mean, var = running or (torch.zeros(x.shape[1]), torch.ones(x.shape[1]))
            return f.batch_norm(x, mean, var, weight, bias, **more)


NAMES = ("layer_norm", "rms_norm", "group_norm", "instance_norm", "batch_norm", "batch_norm_eval")


@pytest.mark.parametrize(("x_dtype", "w_dtype"), list(itertools.product(FLOATS, FLOATS)))
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("path", PATHS)
def test_the_result_has_the_inputs_dtype_whatever_the_weights(
    path: Any, name: str, x_dtype: torch.dtype, w_dtype: torch.dtype
) -> None:
    """C11, for every norm and pair of types: computed in float32 at least, rounded once."""
    x = torch.randn(3, 6, 4, 5).to(x_dtype).requires_grad_()
    weight = (torch.rand(6) + 0.5).to(w_dtype).requires_grad_()
    bias = torch.randn(6).to(w_dtype).requires_grad_()
    with ms.ops.use_kernels(path):
        y = call(name, x, weight, bias)
        g = torch.randn(y.shape).to(x_dtype)
        used = [x, weight] if name == "rms_norm" else [x, weight, bias]
        got = torch.autograd.grad(y, used, g)
    assert y.dtype == x_dtype
    assert [t.dtype for t in got] == [t.dtype for t in used]

    wide = [t.detach().double().requires_grad_() for t in used]
    expected = call(name, *wide)
    # one rounding (half a unit) of the type, and what float32 sums leave
    limit = 0.5 * torch.finfo(x_dtype).eps + 8 * torch.finfo(torch.float32).eps
    assert (y.double() - expected).abs().max() <= limit * expected.abs().max()
    gradients = torch.autograd.grad(expected, wide, g.double())
    for a, b in zip(got, gradients, strict=True):
        # 4 units of the narrower type: gradients are rounded on their way and in the end
        coarse = max(torch.finfo(x_dtype).eps, torch.finfo(w_dtype).eps, 8 * torch.finfo(torch.float32).eps)
        assert (a.double() - b).abs().max() <= 4 * coarse * b.abs().max()


@pytest.mark.parametrize("weight_dtype", FLOATS)
@pytest.mark.parametrize("running_dtype", FLOATS)
@pytest.mark.parametrize("x_dtype", FLOATS)
@pytest.mark.parametrize("name", ["batch_norm", "batch_norm_eval", "instance_norm"])
def test_running_statistics_of_any_dtype(
    name: str, x_dtype: torch.dtype, running_dtype: torch.dtype, weight_dtype: torch.dtype
) -> None:
    """C40: float32 statistics beside half-precision input and weights, which torch's CPU kernel refuses."""
    x = (torch.randn(3, 6, 4, 5) + 1).to(x_dtype)
    running = torch.full((6,), 0.5, dtype=running_dtype), torch.full((6,), 2.0, dtype=running_dtype)
    y = call(name, x, torch.ones(6, dtype=weight_dtype), None, running)
    assert y.dtype == x_dtype
    assert running[0].dtype == running_dtype
    if name == "batch_norm":
        # f = 0.1 from (0.5, 2.0); one rounding of the buffer's type and one of the kernel's float32
        batch = ms.moments(x, (0, 2, 3))
        limit = {"rtol": torch.finfo(running_dtype).eps + 8 * torch.finfo(torch.float32).eps, "atol": 0.0}
        assert_close(running[0].double(), 0.9 * 0.5 + 0.1 * batch.mean, **limit)
        assert_close(running[1].double(), 0.9 * 2.0 + 0.1 * batch.var(correction=1), **limit)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("path", PATHS)
def test_rms_norms_default_eps_is_one_number(path: Any, dtype: torch.dtype) -> None:
    """C10: finfo(bfloat16).eps = 0.0078 exceeds the mean square of rows of std 0.058."""
    x = torch.randn(8, 32) * 0.058
    with ms.ops.use_kernels(path):
        y = f.rms_norm(x.to(dtype), (32,))
    assert y.double().square().mean(-1).sqrt().sub(1).abs().max() < 0.005
    small = torch.full((1, 32), 1e-4, dtype=torch.float64)
    with ms.ops.use_kernels(path):
        y = f.rms_norm(small.to(dtype), (32,))
    expected = 1e-4 / (1e-8 + torch.finfo(torch.float32).eps) ** 0.5
    assert_close(
        y.double(), torch.full((1, 32), expected).double(), rtol=2 * torch.finfo(dtype).eps + 1e-6, atol=0
    )


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t.contiguous(),
    "channels_last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "transposed": lambda t: t.mT.contiguous().mT,
    "batch innermost": lambda t: t.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2),
    "every second": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "expanded": lambda t: t[:, :, :1].expand_as(t),
    "offset": lambda t: torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape),
}


@pytest.mark.parametrize(("layout", "g_layout"), list(itertools.product(LAYOUTS, LAYOUTS)))
@pytest.mark.parametrize("name", NAMES)
def test_gradients_for_every_mix_of_layouts(name: str, layout: str, g_layout: str) -> None:
    """C19: forward and backward, any strides of input and upstream gradient."""
    values, upstream = torch.randn(3, 6, 4, 5), torch.randn(3, 6, 4, 5)
    weight, bias = torch.rand(6) + 0.5, torch.randn(6)
    x = LAYOUTS[layout](values).detach().requires_grad_()
    g = LAYOUTS[g_layout](upstream)
    y = call(name, x, weight, bias if name != "rms_norm" else None)
    (dx,) = torch.autograd.grad(y, x, g)
    wide = x.detach().double().contiguous().requires_grad_()
    expected = call(name, wide, weight.double(), bias.double() if name != "rms_norm" else None)
    (gradient,) = torch.autograd.grad(expected, wide, g.double().contiguous())
    assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    assert_close(dx.double(), gradient, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["group_norm", "instance_norm", "batch_norm", "batch_norm_eval"])
@pytest.mark.parametrize("path", PATHS)
def test_the_result_keeps_the_memory_format(path: Any, name: str) -> None:
    """C19: torch's own instance_norm turns channels_last into contiguous."""
    for shape, fmt in (((2, 8, 6, 6), torch.channels_last), ((2, 8, 3, 4, 5), torch.channels_last_3d)):
        x = torch.randn(shape)
        with ms.ops.use_kernels(path):
            assert call(name, x).is_contiguous()
            assert call(name, x.to(memory_format=fmt)).is_contiguous(memory_format=fmt)


def test_group_norm_backward_with_ambiguous_strides() -> None:
    """C19's own input: (64, 12, 1, 1), contiguous and channels_last at once."""
    x = torch.randn(1, 64, 12, 1).permute(1, 2, 0, 3).requires_grad_()
    g = torch.randn(64, 12, 1, 1).to(memory_format=torch.channels_last)
    (dx,) = torch.autograd.grad(f.group_norm(x, 3), x, g)
    wide = x.detach().double().contiguous().requires_grad_()
    (expected,) = torch.autograd.grad(F.group_norm(wide, 3), wide, g.double().contiguous())
    assert_close(dx.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("n_dims", [1, 2, 3])
@pytest.mark.parametrize("path", PATHS)
def test_gradients_of_many_dims_are_those_of_the_matrix(path: Any, n_dims: int) -> None:
    """C20: M = shape[0] instead of the number of rows gives wrong gradients for 3 and more dims."""
    x = torch.randn(2, 5, 3, 4, dtype=torch.float64)
    shape = x.shape[-n_dims:]
    weight, bias = torch.randn(shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)
    g = torch.randn(x.shape, dtype=torch.float64)
    width = shape.numel()

    def gradients(x: Tensor, shape: tuple[int, ...], w: Tensor, b: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        inputs = [t.detach().requires_grad_() for t in (x, w, b)]
        with ms.ops.use_kernels(path):
            return torch.autograd.grad(f.layer_norm(inputs[0], shape, *inputs[1:]), inputs, g)

    many = gradients(x, shape, weight, bias, g)
    matrix = gradients(x.reshape(-1, width), (width,), weight.flatten(), bias.flatten(), g.reshape(-1, width))
    for a, b in zip(many, matrix, strict=True):
        assert_close(a, b.reshape(a.shape), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(0, 6, 4, 5), (3, 6, 0, 5), (0, 6, 0, 0)])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("path", PATHS)
def test_empty_input_gives_empty_output_and_zero_gradients(
    path: Any, name: str, shape: tuple[int, ...]
) -> None:
    x = torch.empty(shape, requires_grad=True)
    weight, bias = torch.ones(6, requires_grad=True), torch.zeros(6, requires_grad=True)
    running = torch.zeros(6), torch.ones(6)
    with ms.ops.use_kernels(path):
        y = call(name, x, weight, None if name == "rms_norm" else bias, running)
        dx, dw = torch.autograd.grad(y.sum(), (x, weight))
    assert y.shape == dx.shape == shape
    assert torch.equal(dw, torch.zeros(6))
    assert torch.equal(running[0], torch.zeros(6))
    assert torch.equal(running[1], torch.ones(6))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("path", PATHS)
def test_the_activation_comes_last(path: Any, name: str, activation: str) -> None:
    x, weight = torch.randn(3, 6, 4, 5), torch.randn(6)
    with ms.ops.use_kernels(path):
        y = call(name, x, weight, activation=activation)
        plain = call(name, x, weight)
    assert_close(y, ACTIVATIONS[activation](plain))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("path", PATHS)
def test_add_comes_after_the_affine_and_before_the_activation(path: Any, training: bool) -> None:
    x, add = torch.randn(3, 6, 4, 5, requires_grad=True), torch.randn(3, 6, 4, 5, requires_grad=True)
    weight, bias = torch.randn(6), torch.randn(6)
    kept = torch.zeros(6), torch.ones(6)
    with ms.ops.use_kernels(path):
        y = f.batch_norm(x, *kept, weight, bias, training, add=add, activation="relu")
        (dadd,) = torch.autograd.grad(y.sum(), add)
    kept = torch.zeros(6), torch.ones(6)
    expected = torch.relu(F.batch_norm(x, *kept, weight, bias, training) + add)
    assert_close(y, expected)
    assert torch.equal(dadd, (expected > 0).float())


def test_add_of_a_wider_type_does_not_widen_the_result() -> None:
    x = torch.randn(3, 6).bfloat16()
    y = f.batch_norm(x, None, None, training=True, add=torch.randn(3, 6))
    assert y.dtype == torch.bfloat16


@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_add_then_normalize_returns_both(path: Any, rms: bool) -> None:
    x, residual = torch.randn(3, 5, 8, requires_grad=True), torch.randn(3, 5, 8, requires_grad=True)
    weight = torch.randn(8)
    with ms.ops.use_kernels(path):
        if rms:
            y, s = f.add_rms_norm(x, residual, (8,), weight, activation="silu")
            expected = F.silu(F.rms_norm(x + residual, (8,), weight, f._rows.RMS_EPS))
        else:
            y, s = f.add_layer_norm(x, residual, (8,), weight, activation="silu")
            expected = F.silu(F.layer_norm(x + residual, (8,), weight))
        (dx, dr) = torch.autograd.grad(y.square().sum() + s.sum(), (x, residual))
    assert torch.equal(s, x + residual)
    assert_close(y, expected)
    assert torch.equal(dx, dr)
    assert_close(dx, torch.autograd.grad(expected.square().sum() + (x + residual).sum(), x)[0])


def test_eps_zero_is_fine_where_there_is_a_spread() -> None:
    x = torch.randn(3, 4, 5)
    kept = torch.zeros(4), torch.full((4,), 2.0)
    assert_close(f.layer_norm(x, (5,), eps=0.0), F.layer_norm(x, (5,), eps=0.0))
    assert_close(f.rms_norm(x, (5,), eps=0.0), F.rms_norm(x, (5,), eps=0.0))
    assert_close(f.group_norm(x, 2, eps=0.0), F.group_norm(x, 2, eps=0.0))
    assert_close(f.batch_norm(x, *kept, eps=0.0), x / 2**0.5)


@pytest.mark.parametrize("name", NAMES)
def test_autocast_leaves_the_choice_of_types_to_torch(name: str) -> None:
    x, weight = torch.randn(3, 6, 4, 5), torch.ones(6)
    running = torch.zeros(6), torch.ones(6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert call(name, x, weight, None, running).dtype == torch.float32
        assert call(name, x.bfloat16(), weight, None, running).dtype == torch.bfloat16
