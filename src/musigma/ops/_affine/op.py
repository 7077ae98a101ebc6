"""Center, scale and shift every channel: the second half of BatchNorm, whoever gives the statistics."""

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


def check(
    x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> None:
    """x is (n, c, *spatial); everything else is (c,)."""
    if not x.is_floating_point():
        raise RuntimeError(f"x must be floating point, got {x.dtype}; convert it first, x.float()")
    if x.dim() < 2:
        raise RuntimeError(f"x must be (n, c, *spatial), at least 2-D; got shape {tuple(x.shape)}")
    for name, vector in (("mean", mean), ("var", var), ("weight", weight), ("bias", bias)):
        if vector is not None and vector.shape != (x.shape[1],):
            raise RuntimeError(f"{name} must have shape ({x.shape[1]},), got {tuple(vector.shape)}")


def _standardized(x: Tensor, mean: Tensor, var: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """x − μ and rstd (shaped to broadcast against x) and x̂, in the accumulator type."""
    dtype = accumulator(x)
    centered = x.to(dtype) - per_channel(mean.to(dtype), x)
    rstd = per_channel((var.to(dtype) + eps).rsqrt(), x)
    return centered, rstd, centered * rstd


def reference(
    x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """y = (x − mean) / √(var + eps) · weight + bias, per channel. Ioffe & Szegedy 2015, steps 1 and 2.

    Centered before it is scaled: scale·x + shift in one step loses 18 units in the last place at
    mean/std 100 and 2e5 at 1e6.
    """
    _, _, y = _standardized(x, mean, var, eps)
    if weight is not None:
        y = y * per_channel(weight, x)
    if bias is not None:
        y = y + per_channel(bias, x)
    return like(y, x)


def backward(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    weight: Tensor | None,
    eps: float,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The direct path of the notes, and what flows on into μ and σ². With g = dy · weight:

    dx = g · rstd,   dmean = −Σ g · rstd,   dvar = −½ Σ g · (x − mean) · rstd³,
    dweight = Σ dy · x̂,   dbias = Σ dy
    """
    centered, rstd, normalized = _standardized(x, mean, var, eps)
    upstream = dy.to(centered.dtype)
    g = upstream if weight is None else upstream * per_channel(weight, x)
    dims = all_but_channels(x)
    dx, dmean, dvar, dweight, dbias = (none(x) for _ in range(5))
    if needs[0]:
        dx = like(g * rstd, x)
    if needs[1]:
        dmean = -(g * rstd).sum(dims).to(mean.dtype)
    if needs[2]:
        dvar = -0.5 * (g * centered * rstd**3).sum(dims).to(var.dtype)
    if needs[3]:
        dweight = (upstream * normalized).sum(dims).to(parameter_dtype(x, weight))
    if needs[4]:
        dbias = upstream.sum(dims).to(parameter_dtype(x, weight))
    return dx, dmean, dvar, dweight, dbias


def fake(
    x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    check(x, mean, var, weight, bias, eps)
    return empty_like(x)


def backward_fake(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    weight: Tensor | None,
    eps: float,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dtypes = [mean.dtype, var.dtype, parameter_dtype(x, weight), parameter_dtype(x, weight)]
    vectors = [
        x.new_empty(x.shape[1], dtype=dtype) if need else none(x)
        for need, dtype in zip(needs[1:], dtypes, strict=True)
    ]
    return empty_like(x) if needs[0] else none(x), vectors[0], vectors[1], vectors[2], vectors[3]


def backward_args(
    grads: Sequence[Tensor | None], inputs: Sequence[Any], outputs: dict[int, Tensor], needs: list[bool]
) -> tuple[Any, ...]:
    x, mean, var, weight, _, eps = inputs
    return grads[0], x, mean, var, weight, eps, needs


def samples(device: str = "cpu", dtype: torch.dtype = torch.float64) -> Iterator[Sample]:
    """2-D to 5-D, both memory formats, with and without weight and bias."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int, mean: float = 0.0) -> Tensor:
        return (torch.randn(shape, generator=generator, device=device) + mean).to(dtype)

    def statistics(c: int) -> tuple[Tensor, Tensor]:
        return draw(c).double(), draw(c).double().square() + 0.1

    for shape in ((5, 3), (2, 3, 4), (2, 3, 4, 5), (2, 3, 2, 2, 2), (0, 3)):
        c = shape[1]
        for weight, bias in ((None, None), (draw(c), None), (None, draw(c)), (draw(c), draw(c))):
            name = f"{shape}-{weight is not None}-{bias is not None}"
            yield Sample((draw(*shape, mean=2.0), *statistics(c), weight, bias, 1e-5), name)
    last = draw(2, 4, 3, 5).to(memory_format=torch.channels_last)
    yield Sample((last, *statistics(4), draw(4), draw(4), 1e-5), "channels_last")
    yield Sample((draw(5, 3).t().contiguous().t(), *statistics(3), draw(3), None, 1e-5), "transposed")


def error_samples() -> Iterator[ErrorSample]:
    x, v = torch.ones(2, 3), torch.ones(3)
    yield ErrorSample((x.long(), v, v, None, None, 1e-5), RuntimeError, "floating point", "integer")
    yield ErrorSample((v, v, v, None, None, 1e-5), RuntimeError, "at least 2-D", "1-D")
    yield ErrorSample((x, v[:2], v, None, None, 1e-5), RuntimeError, r"mean .*\(3,\)", "mean shape")
    yield ErrorSample((x, v, v, None, v[:1], 1e-5), RuntimeError, r"bias .*\(3,\)", "bias shape")


affine = define(
    Op(
        name="affine",
        schema="(Tensor x, Tensor mean, Tensor var, Tensor? weight, Tensor? bias, float eps) -> Tensor",
        backward_schema="(Tensor dy, Tensor x, Tensor mean, Tensor var, Tensor? weight, float eps,"
        " bool[] needs) -> (Tensor dx, Tensor dmean, Tensor dvar, Tensor dweight, Tensor dbias)",
        check=check,
        reference=reference,
        backward=backward,
        fake=fake,
        backward_fake=backward_fake,
        differentiable=(0, 1, 2, 3, 4),
        differentiable_outputs=(0,),
        saved_outputs=(),
        backward_args=backward_args,
        samples=samples,
        error_samples=error_samples,
    )
)
"""(x, mean, var, weight, bias, eps) -> y; x: (n, c, *spatial), everything else (c,)."""
