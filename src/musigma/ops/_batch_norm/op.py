"""BatchNorm by the batch's own statistics, in one step: moments and affine without what lies between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from musigma.ops._define import ErrorSample, Op, Sample, define
from musigma.ops._numerics import (
    accumulator,
    all_but_channels,
    empty_like,
    like,
    none,
    parameter_dtype,
    per_channel,
)


def check(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> None:
    """x is (n, c, *spatial); weight and bias are (c,)."""
    if not x.is_floating_point():
        raise RuntimeError(f"x must be floating point, got {x.dtype}; convert it first, x.float()")
    if x.dim() < 2:
        raise RuntimeError(f"x must be (n, c, *spatial), at least 2-D; got shape {tuple(x.shape)}")
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None and parameter.shape != (x.shape[1],):
            raise RuntimeError(f"{name} must have shape ({x.shape[1]},), got {tuple(parameter.shape)}")


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


def reference(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """y = (x − μ) / √(σ² + eps) · weight + bias, μ and σ² of each channel. Ioffe & Szegedy 2015, algorithm 1.

    The moments come back too: the running statistics are made of them.
    """
    y, _, mean, m2 = _standardized(x, eps)
    if weight is not None:
        y = y * per_channel(weight, x)
    if bias is not None:
        y = y + per_channel(bias, x)
    return like(y, x), mean.flatten().detach().clone(), m2.flatten().detach().clone()


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    m2: Tensor,
    eps: float,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """The three paths of the notes, gathered. Means over a channel, sums over a channel:

        dx = rstd · weight · (dy − mean(dy) − x̂ · mean(dy · x̂)),   dweight = Σ dy · x̂,   dbias = Σ dy

    Formed again from x, so it can itself be differentiated; a kernel reads `mean` and `m2` instead.
    """
    normalized, rstd, _, _ = _standardized(x, eps)
    upstream = dy.to(normalized.dtype)
    dims = all_but_channels(x)
    dx, dweight, dbias = none(x), none(x), none(x)
    if needs[0]:
        path = upstream - upstream.mean(dims, keepdim=True)
        path = path - normalized * (upstream * normalized).mean(dims, keepdim=True)
        scale = rstd if weight is None else rstd * per_channel(weight, x)
        dx = like(scale * path, x)
    if needs[1]:
        dweight = (upstream * normalized).sum(dims).to(parameter_dtype(x, weight))
    if needs[2]:
        dbias = upstream.sum(dims).to(parameter_dtype(x, weight))
    return dx, dweight, dbias


def fake(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    check(x, weight, bias, eps)
    dtype = accumulator(x)
    return empty_like(x), x.new_empty(x.shape[1], dtype=dtype), x.new_empty(x.shape[1], dtype=dtype)


def backward_fake(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    m2: Tensor,
    eps: float,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = parameter_dtype(x, weight)
    return (
        empty_like(x) if needs[0] else none(x),
        x.new_empty(x.shape[1], dtype=dtype) if needs[1] else none(x),
        x.new_empty(x.shape[1], dtype=dtype) if needs[2] else none(x),
    )


def backward_args(
    grads: Sequence[Tensor | None], inputs: Sequence[Any], outputs: dict[int, Tensor], needs: list[bool]
) -> tuple[Any, ...]:
    x, weight, _, eps = inputs
    return grads[0], x, weight, outputs[1], outputs[2], eps, needs


def samples(device: str = "cpu", dtype: torch.dtype = torch.float64) -> Iterator[Sample]:
    """2-D to 5-D, both memory formats, with and without each optional part, constant channels."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int, mean: float = 0.0) -> Tensor:
        return (torch.randn(shape, generator=generator, device=device) + mean).to(dtype)

    for shape in ((5, 4), (6, 3, 5), (2, 3, 4, 5), (2, 3, 2, 2, 2), (9, 1)):
        c = shape[1]
        for weight, bias in ((None, None), (draw(c), None), (None, draw(c)), (draw(c), draw(c))):
            name = f"{shape}-{weight is not None}-{bias is not None}"
            yield Sample((draw(*shape, mean=3.0), weight, bias, 1e-5), name)
    last = draw(2, 4, 3, 5, mean=1.0).to(memory_format=torch.channels_last)
    yield Sample((last, draw(4), draw(4), 1e-5), "channels_last")
    last = draw(2, 4, 2, 3, 2).to(memory_format=torch.channels_last_3d)
    yield Sample((last, draw(4), draw(4), 1e-5), "channels_last_3d")
    yield Sample((draw(5, 3).t().contiguous().t(), draw(3), None, 1e-5), "transposed")
    constant = torch.full((2, 4, 7), 0.1, device=device, dtype=dtype)
    yield Sample((constant, draw(4), draw(4), 1e-5), "constant")


def error_samples() -> Iterator[ErrorSample]:
    x, v = torch.ones(2, 3), torch.ones(3)
    yield ErrorSample((x.long(), None, None, 1e-5), RuntimeError, "floating point", "integer")
    yield ErrorSample((v, None, None, 1e-5), RuntimeError, "at least 2-D", "1-D")
    yield ErrorSample((x, v[:2], None, 1e-5), RuntimeError, r"weight .*\(3,\)", "weight shape")
    yield ErrorSample((x, None, v[:1], 1e-5), RuntimeError, r"bias .*\(3,\)", "bias shape")


batch_norm = define(
    Op(
        name="batch_norm",
        schema="(Tensor x, Tensor? weight, Tensor? bias, float eps) -> (Tensor y, Tensor mean, Tensor m2)",
        backward_schema="(Tensor dy, Tensor x, Tensor? weight, Tensor mean, Tensor m2, float eps,"
        " bool[] needs) -> (Tensor dx, Tensor dweight, Tensor dbias)",
        check=check,
        reference=reference,
        backward=backward,
        fake=fake,
        backward_fake=backward_fake,
        differentiable=(0, 1, 2),
        differentiable_outputs=(0,),
        saved_outputs=(1, 2),
        backward_args=backward_args,
        samples=samples,
        error_samples=error_samples,
    )
)
"""(x, weight, bias, eps) -> (y, mean, m2); x: (n, c, *spatial), everything else (c,)."""
