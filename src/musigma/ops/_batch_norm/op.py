"""BatchNorm by the batch's own statistics, in one step: moments and affine without what lies between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from musigma.ops._activations import ACTIVATIONS, activate, check_activation, slope
from musigma.ops._define import ErrorSample, Op, Sample, define
from musigma.ops._numerics import (
    accumulator,
    all_but_channels,
    check_add,
    empty_like,
    like,
    none,
    parameter_dtype,
    per_channel,
)


def check(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    add: Tensor | None,
    activation: str | None,
) -> None:
    """x is (n, c, *spatial), `add` is like it; weight and bias are (c,)."""
    if not x.is_floating_point():
        raise RuntimeError(f"x must be floating point, got {x.dtype}; convert it first, x.float()")
    if x.dim() < 2:
        raise RuntimeError(f"x must be (n, c, *spatial), at least 2-D; got shape {tuple(x.shape)}")
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None and parameter.shape != (x.shape[1],):
            raise RuntimeError(f"{name} must have shape ({x.shape[1]},), got {tuple(parameter.shape)}")
    check_add(x, add)
    check_activation(activation)


def _standardized(x: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x̂ in x's shape, and each channel's rstd, mean and M2, shaped against x, in the accumulator type."""
    values = x.to(accumulator(x))
    dims = all_but_channels(x)
    # A value of each channel, near its mean: subtracting it first is exact, and cancels out of derivatives.
    pivot = values[tuple(slice(0, 1) if d in dims else slice(None) for d in range(x.dim()))].detach()
    if not x.numel():
        pivot = values.new_zeros([1 if d in dims else x.shape[1] for d in range(x.dim())])
    offset = (values - pivot).mean(dims, keepdim=True)
    centered = values - pivot - offset
    squares = centered.square()
    rstd = (squares.mean(dims, keepdim=True) + eps).rsqrt()
    return centered * rstd, rstd, pivot + offset, squares.sum(dims, keepdim=True)


def _affine(normalized: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    y = normalized
    if weight is not None:
        y = y * per_channel(weight, x)
    if bias is not None:
        y = y + per_channel(bias, x)
    return y


def reference(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    add: Tensor | None,
    activation: str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """y = activation((x − μ) / √(σ² + eps) · weight + bias + add), μ and σ² of each channel.

    Ioffe & Szegedy 2015, algorithm 1; what is added is a ResNet's shortcut. The moments come back too: the
    running statistics are made of them.
    """
    normalized, _, mean, m2 = _standardized(x, eps)
    y = _affine(normalized, x, weight, bias)
    if add is not None:
        y = y + add
    y = activate(y, activation)
    return like(y, x), mean.flatten().detach().clone(), m2.flatten().detach().clone()


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    add: Tensor | None,
    mean: Tensor,
    m2: Tensor,
    eps: float,
    activation: str | None,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """With g = dy · activation′, the three paths of the notes, gathered. Means and sums over a channel:

        dx = rstd · weight · (g − mean(g) − x̂ · mean(g · x̂)),   dweight = Σ g · x̂,   dbias = Σ g,   dadd = g

    Formed again from x, so it can itself be differentiated; a kernel reads `mean` and `m2` instead.
    """
    normalized, rstd, _, _ = _standardized(x, eps)
    upstream = dy.to(normalized.dtype)
    dims = all_but_channels(x)
    if activation is not None:
        z = _affine(normalized, x, weight, bias)
        upstream = upstream * slope(z if add is None else z + add, activation)
    dx, dweight, dbias, dadd = none(x), none(x), none(x), none(x)
    if needs[0]:
        path = upstream - upstream.mean(dims, keepdim=True)
        path = path - normalized * (upstream * normalized).mean(dims, keepdim=True)
        scale = rstd if weight is None else rstd * per_channel(weight, x)
        dx = like(scale * path, x)
    if needs[1]:
        dweight = (upstream * normalized).sum(dims).to(parameter_dtype(x, weight))
    if needs[2]:
        dbias = upstream.sum(dims).to(parameter_dtype(x, weight))
    if needs[3]:
        dadd = like(upstream.clone(), x)
    return dx, dweight, dbias, dadd


def fake(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    add: Tensor | None,
    activation: str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    check(x, weight, bias, eps, add, activation)
    dtype = accumulator(x)
    return empty_like(x), x.new_empty(x.shape[1], dtype=dtype), x.new_empty(x.shape[1], dtype=dtype)


def backward_fake(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    add: Tensor | None,
    mean: Tensor,
    m2: Tensor,
    eps: float,
    activation: str | None,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dtype = parameter_dtype(x, weight)
    return (
        empty_like(x) if needs[0] else none(x),
        x.new_empty(x.shape[1], dtype=dtype) if needs[1] else none(x),
        x.new_empty(x.shape[1], dtype=dtype) if needs[2] else none(x),
        empty_like(x) if needs[3] else none(x),
    )


def backward_args(
    grads: Sequence[Tensor | None], inputs: Sequence[Any], outputs: dict[int, Tensor], needs: list[bool]
) -> tuple[Any, ...]:
    x, weight, bias, eps, add, activation = inputs
    return grads[0], x, weight, bias, add, outputs[1], outputs[2], eps, activation, needs


def samples(device: str = "cpu", dtype: torch.dtype = torch.float64) -> Iterator[Sample]:
    """2-D to 5-D, both memory formats, with and without each optional part, constant channels."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int, mean: float = 0.0) -> Tensor:
        return (torch.randn(shape, generator=generator, device=device) + mean).to(dtype)

    for shape in ((5, 4), (6, 3, 5), (2, 3, 4, 5), (2, 3, 2, 2, 2), (9, 1)):
        c = shape[1]
        for weight, bias in ((None, None), (draw(c), None), (None, draw(c)), (draw(c), draw(c))):
            name = f"{shape}-{weight is not None}-{bias is not None}"
            yield Sample((draw(*shape, mean=3.0), weight, bias, 1e-5, None, None), name)
    for activation in (None, *ACTIVATIONS):
        for shape in ((6, 3), (2, 3, 4, 5)):
            c, name = shape[1], f"{shape}-{activation}"
            args = (draw(*shape, mean=3.0), draw(c), draw(c), 1e-5)
            yield Sample((*args, draw(*shape), activation), f"{name}-add")
            yield Sample((*args, None, activation), name)
    last = draw(2, 4, 3, 5, mean=1.0).to(memory_format=torch.channels_last)
    yield Sample((last, draw(4), draw(4), 1e-5, None, None), "channels_last")
    last = draw(2, 4, 2, 3, 2).to(memory_format=torch.channels_last_3d)
    yield Sample((last, draw(4), draw(4), 1e-5, None, None), "channels_last_3d")
    yield Sample((last, draw(4), draw(4), 1e-5, draw(2, 4, 2, 3, 2), "silu"), "add in another format")
    yield Sample((draw(5, 3).t().contiguous().t(), draw(3), None, 1e-5, None, None), "transposed")
    constant = torch.full((2, 4, 7), 0.1, device=device, dtype=dtype)
    yield Sample((constant, draw(4), draw(4), 1e-5, None, None), "constant")


def error_samples() -> Iterator[ErrorSample]:
    x, v = torch.ones(2, 3), torch.ones(3)
    yield ErrorSample((x.long(), None, None, 1e-5, None, None), RuntimeError, "floating point", "integer")
    yield ErrorSample((v, None, None, 1e-5, None, None), RuntimeError, "at least 2-D", "1-D")
    yield ErrorSample((x, v[:2], None, 1e-5, None, None), RuntimeError, r"weight .*\(3,\)", "weight shape")
    yield ErrorSample((x, None, v[:1], 1e-5, None, None), RuntimeError, r"bias .*\(3,\)", "bias shape")
    yield ErrorSample((x, None, None, 1e-5, x[:1], None), RuntimeError, "add must be like x", "add shape")
    yield ErrorSample(
        (x, None, None, 1e-5, x.double(), None), RuntimeError, "add must be like x", "add dtype"
    )
    yield ErrorSample((x, None, None, 1e-5, None, "tanh"), ValueError, "activation must be", "activation")


batch_norm = define(
    Op(
        name="batch_norm",
        schema="(Tensor x, Tensor? weight, Tensor? bias, float eps, Tensor? add, str? activation)"
        " -> (Tensor y, Tensor mean, Tensor m2)",
        backward_schema="(Tensor dy, Tensor x, Tensor? weight, Tensor? bias, Tensor? add, Tensor mean,"
        " Tensor m2, float eps, str? activation, bool[] needs)"
        " -> (Tensor dx, Tensor dweight, Tensor dbias, Tensor dadd)",
        check=check,
        reference=reference,
        backward=backward,
        fake=fake,
        backward_fake=backward_fake,
        differentiable=(0, 1, 2, 4),
        differentiable_outputs=(0,),
        saved_outputs=(1, 2),
        backward_args=backward_args,
        samples=samples,
        error_samples=error_samples,
    )
)
"""(x, weight, bias, eps, add, activation) -> (y, mean, m2); x and add: (n, c, *spatial), else (c,)."""
