"""What holds for every normalization whatever kernel serves it: dtypes, layouts, one call, errors."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.testing import assert_close

import musigma as ms
from musigma._errors import MusigmaWarning

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


@pytest.mark.parametrize("kind", ["boolean", "weights"])
def test_masked_values_do_not_enter_the_statistics(kind: str) -> None:
    lengths = torch.tensor([5, 3, 1])
    keep = (torch.arange(5) < lengths[:, None]).unsqueeze(1)  # (n, 1, length)
    x = torch.randn(3, 4, 5, requires_grad=True)
    padded = torch.where(keep, x, torch.tensor(float("nan")) if kind == "boolean" else torch.tensor(1e3))
    running, count = (torch.zeros(4), torch.ones(4)), torch.tensor(0)
    mask = keep if kind == "boolean" else keep.float()
    y = f.batch_norm(padded, *running, training=True, num_batches_tracked=count, mask=mask)

    kept = torch.cat([x[i, :, :n] for i, n in enumerate(lengths)], -1).T  # (9, 4): the real values
    expected_running = torch.zeros(4), torch.ones(4)
    expected = F.batch_norm(kept, *expected_running, training=True)
    got = torch.cat([y[i, :, :n] for i, n in enumerate(lengths)], -1).T
    assert_close(got, expected)
    assert_close(running, expected_running)
    assert count.item() == 1
    g = torch.randn(9, 4)
    (dx,) = torch.autograd.grad(got, x, g, retain_graph=True)
    (expected_dx,) = torch.autograd.grad(expected, x, g)
    assert_close(dx, expected_dx)


def test_a_mask_that_keeps_too_little_is_refused_by_channel_and_changes_nothing() -> None:
    running, count = (torch.zeros(4), torch.ones(4)), torch.tensor(0)
    keep = torch.ones(3, 4, dtype=torch.bool)
    keep[1:, 2] = False
    with pytest.raises(ValueError, match=r"Expected more than 1 value per channel.*channels \[2\]"):
        f.batch_norm(torch.randn(3, 4), *running, training=True, num_batches_tracked=count, mask=keep)
    assert torch.equal(running[0], torch.zeros(4))
    assert count.item() == 0


MASKED: dict[str, Callable[..., Tensor]] = {
    # (n, c, length) under an (n, 1, length) mask, as the same function of the values that are kept
    "instance_norm": lambda t, **k: f.instance_norm(
        t, weight=WEIGHT[: t.shape[1]], bias=BIAS[: t.shape[1]], **k
    ),
    "group_norm": lambda t, **k: f.group_norm(t, 2, WEIGHT[: t.shape[1]], BIAS[: t.shape[1]], **k),
    "layer_norm": lambda t, **k: f.layer_norm(t, t.shape[-1:], **k),
    "rms_norm": lambda t, **k: f.rms_norm(t, t.shape[-1:], **k),
}
TOLERANCES = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.bfloat16: {"rtol": 0.016, "atol": 1e-3}}
WEIGHT, BIAS = torch.linspace(0.5, 2.0, 4), torch.linspace(-1.0, 1.0, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MASKED)
def test_each_examples_padding_does_not_enter_its_statistics(name: str, dtype: torch.dtype) -> None:
    lengths = torch.tensor([5, 3, 2])
    keep = (torch.arange(5) < lengths[:, None]).unsqueeze(1)
    x = torch.randn(3, 4, 5).to(dtype).requires_grad_()
    y = MASKED[name](torch.where(keep, x, float("nan")), mask=keep, activation="silu")
    assert y.dtype == dtype
    assert y.isfinite().all()
    g = torch.randn(3, 4, 5).to(dtype) * keep
    (dx,) = torch.autograd.grad(y, x, g)
    for i, n in enumerate(lengths.tolist()):
        alone = x[i : i + 1, :, :n].detach().double().requires_grad_()
        expected = MASKED[name](alone, activation="silu")
        assert_close(y[i, :, :n], expected[0], check_dtype=False, **TOLERANCES[dtype])
        (expected_dx,) = torch.autograd.grad(expected, alone, g[i : i + 1, :, :n].double())
        # bfloat16: dx is a sum of parts that were rounded one by one
        loose = TOLERANCES[torch.float32] if dtype is torch.float32 else {"rtol": 0.02, "atol": 0.05}
        assert_close(dx[i, :, :n], expected_dx[0], check_dtype=False, **loose)
        assert not dx[i, :, n:].any()


def test_a_row_of_which_nothing_is_kept_stays_finite() -> None:
    x = torch.randn(2, 4, 5, requires_grad=True)
    keep = torch.tensor([True, False])[:, None, None]
    for name in MASKED:
        y = MASKED[name](x, mask=keep)
        assert y.isfinite().all(), name
        assert torch.autograd.grad(y.sum(), x)[0].isfinite().all(), name


def test_running_statistics_of_masked_instances_are_those_of_the_kept_values() -> None:
    keep = (torch.arange(6) < torch.tensor([6, 4])[:, None]).unsqueeze(1)
    x = torch.randn(2, 3, 6)
    running = torch.zeros(3), torch.ones(3)
    f.instance_norm(x, *running, momentum=0.5, mask=keep)
    parts = [ms.moments(x[0], -1), ms.moments(x[1, :, :4], -1)]
    assert_close(running[0].double(), sum(0.25 * m.mean for m in parts))
    assert_close(running[1].double(), 0.5 + sum(0.25 * m.var(correction=1) for m in parts))


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


class Calls(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.__name__ != "__get__":
            self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("path", PATHS)
def test_a_mode_sees_one_call(path: Any, name: str) -> None:
    x, weight = torch.randn(3, 6, 4, 5), torch.ones(6)
    running = torch.zeros(6), torch.ones(6)
    with Calls() as calls, ms.ops.use_kernels(path):
        call(name, x, weight, None, running)
    assert [n for n in calls.names if n != "movedim"] == [name.removesuffix("_eval")]


@pytest.mark.parametrize("function", ["add_layer_norm", "add_rms_norm"])
def test_a_mode_sees_one_call_of_the_fused_functions(function: str) -> None:
    x, residual, weight = torch.randn(2, 4), torch.randn(2, 4), torch.ones(4)
    with Calls() as calls:
        getattr(f, function)(x, residual, (4,), weight)
    assert calls.names == [function]


class Tagged(Tensor):
    """The plainest subclass: torch's default ``__torch_function__`` keeps the type."""


@pytest.mark.parametrize("name", NAMES)
def test_a_subclass_stays_what_it_is(name: str) -> None:
    x = torch.randn(3, 6, 4, 5)
    y = call(name, x.as_subclass(Tagged), torch.ones(6), activation="relu")
    assert type(y) is Tagged
    assert_close(y.as_subclass(Tensor), call(name, x, torch.ones(6), activation="relu"))


def test_jagged_input() -> None:
    parts = [torch.randn(3, 6), torch.randn(5, 6)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged)
    for norm in (
        lambda t: f.layer_norm(t, (6,), torch.ones(6)),
        lambda t: f.rms_norm(t, (6,), torch.ones(6)),
    ):
        for got, part in zip(norm(nested).unbind(), parts, strict=True):
            assert_close(got, norm(part))


ERRORS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "width": (
        lambda: f.layer_norm(torch.ones(3, 4), (5,)),
        RuntimeError,
        r"Given normalized_shape=\[5\], expected input with shape \[\*, 5\], but got input of size\[3, 4\]",
    ),
    "channels first": (
        lambda: f.layer_norm(torch.ones(2, 8, 5, 7), (8,)),
        RuntimeError,
        r"Given normalized_shape=\[8\].*LayerNorm2d",
    ),
    "rms width": (lambda: f.rms_norm(torch.ones(3, 4), (5,)), RuntimeError, r"Given normalized_shape=\[5\]"),
    "no shape": (lambda: f.layer_norm(torch.ones(3, 4), ()), RuntimeError, "at least 1-dimensional"),
    "weight": (
        lambda: f.layer_norm(torch.ones(3, 4), (4,), torch.ones(5)),
        RuntimeError,
        "Expected weight to be of same shape as normalized_shape",
    ),
    "bias": (
        lambda: f.layer_norm(torch.ones(3, 4), (4,), None, torch.ones(5)),
        RuntimeError,
        "Expected bias to be of same shape as normalized_shape",
    ),
    "negative eps": (lambda: f.layer_norm(torch.ones(3, 4), (4,), eps=-1.0), ValueError, "non-negative"),
    "activation": (
        lambda: f.layer_norm(torch.ones(3, 4), (4,), activation="tanh"),
        ValueError,
        "'relu', 'silu', 'gelu', 'gelu_tanh'; got 'tanh'",
    ),
    "residual shape": (
        lambda: f.add_layer_norm(torch.ones(3, 4), torch.ones(1, 4), (4,)),
        ValueError,
        r"same shape and dtype, got \(3, 4\).*\(1, 4\)",
    ),
    "residual dtype": (
        lambda: f.add_rms_norm(torch.ones(3, 4), torch.ones(3, 4).double(), (4,)),
        ValueError,
        "float64",
    ),
    "groups": (
        lambda: f.group_norm(torch.ones(3, 10), 3),
        RuntimeError,
        "divisible by num_groups.*num_groups=3; try 1, 2, 5 or 10",
    ),
    "no groups": (lambda: f.group_norm(torch.ones(3, 10), 0), RuntimeError, "num_groups=0"),
    "group dims": (lambda: f.group_norm(torch.ones(3), 1), RuntimeError, "at least 2 dimensions"),
    "group weight": (
        lambda: f.group_norm(torch.ones(3, 4), 2, torch.ones(5)),
        RuntimeError,
        "Expected weight to be a vector of size equal to the number of channels",
    ),
    "channel weight": (
        lambda: f.batch_norm(torch.ones(3, 4), None, None, torch.ones(5), training=True),
        RuntimeError,
        "weight should contain 4 elements not 5",
    ),
    "running": (
        lambda: f.batch_norm(torch.ones(3, 4), torch.ones(5), torch.ones(5)),
        RuntimeError,
        "running_mean should contain 4 elements not 5",
    ),
    "half of running": (
        lambda: f.batch_norm(torch.ones(3, 4), torch.ones(4), None, training=True),
        ValueError,
        "must either both be None or neither be None",
    ),
    "nothing to evaluate by": (
        lambda: f.batch_norm(torch.ones(3, 4), None, None),
        RuntimeError,
        "running_mean must be defined in evaluation mode",
    ),
    "batch dims": (
        lambda: f.batch_norm(torch.ones(3), None, None, training=True),
        IndexError,
        "at least 2-D",
    ),
    "training eps": (
        lambda: f.batch_norm(torch.ones(3, 4), None, None, training=True, eps=0.0),
        ValueError,
        "batch_norm eps must be positive during training, but got 0.0",
    ),
    "cumulative without a count": (
        lambda: f.batch_norm(torch.ones(3, 4), torch.zeros(4), torch.ones(4), training=True, momentum=None),
        ValueError,
        "momentum=None .* needs num_batches_tracked",
    ),
    "add": (
        lambda: f.batch_norm(torch.ones(3, 4), None, None, training=True, add=torch.ones(4)),
        ValueError,
        r"add must have the input's shape \(3, 4\), got \(4,\)",
    ),
    "mask": (
        lambda: f.batch_norm(torch.ones(3, 4), None, None, training=True, mask=torch.ones(5) > 0),
        ValueError,
        r"mask must broadcast to the input: \(5,\) against \(3, 4\)",
    ),
    "mask of rows": (
        lambda: f.layer_norm(torch.ones(3, 4), (4,), mask=torch.ones(3) > 0),
        ValueError,
        "mask must broadcast",
    ),
    "mask of groups": (
        lambda: f.group_norm(torch.ones(3, 4), 2, mask=torch.ones(1, 3, 4) > 0),
        ValueError,
        "mask must broadcast",
    ),
    "nothing to evaluate instances by": (
        lambda: f.instance_norm(torch.ones(2, 3, 4), use_input_stats=False),
        RuntimeError,
        "Expected running_mean and running_var to be defined when use_input_stats is false",
    ),
    "integers": (lambda: f.layer_norm(torch.ones(3, 4).long(), (4,)), NotImplementedError, "Long"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_have_torchs_class_and_words(case: str) -> None:
    run, error, words = ERRORS[case]
    with pytest.raises(error, match=words):
        run()


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
