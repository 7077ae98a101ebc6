"""Center, scale and shift every channel: the second half of BatchNorm, whoever gives the statistics."""

from __future__ import annotations

import math
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
    mean: Tensor,
    var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    add: Tensor | None,
    activation: str | None,
    mask: Tensor | None,
) -> None:
    """x is (n, c, *spatial), `add` is like it, the mask broadcasts to it; everything else is (c,)."""
    if not x.is_floating_point():
        raise RuntimeError(f"x must be floating point, got {x.dtype}; convert it first, x.float()")
    if x.dim() < 2:
        raise RuntimeError(f"x must be (n, c, *spatial), at least 2-D; got shape {tuple(x.shape)}")
    for name, vector in (("mean", mean), ("var", var), ("weight", weight), ("bias", bias)):
        if vector is not None and vector.shape != (x.shape[1],):
            raise RuntimeError(f"{name} must have shape ({x.shape[1]},), got {tuple(vector.shape)}")
    check_add(x, add)
    check_activation(activation)
    if mask is None:
        return
    fits = mask.dim() <= x.dim() and all(
        m in (1, s) for m, s in zip(reversed(mask.shape), reversed(x.shape), strict=False)
    )
    if not fits:
        raise RuntimeError(f"the mask must broadcast to x: {tuple(mask.shape)} against {tuple(x.shape)}")


def _seen(x: Tensor, mask: Tensor | None) -> Tensor:
    """x with 0 for what the mask drops and is not finite: 0 · NaN is NaN, and would reach every gradient."""
    return x if mask is None else torch.where((mask != 0) | x.isfinite(), x, 0.0)


def _standardized(x: Tensor, mean: Tensor, var: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """x − μ and rstd (shaped to broadcast against x) and x̂, in the accumulator type."""
    dtype = accumulator(x)
    centered = x.to(dtype) - per_channel(mean.to(dtype), x)
    rstd = per_channel((var.to(dtype) + eps).rsqrt(), x)
    return centered, rstd, centered * rstd


def _affine(normalized: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    y = normalized
    if weight is not None:
        y = y * per_channel(weight, x)
    if bias is not None:
        y = y + per_channel(bias, x)
    return y


def reference(
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    add: Tensor | None,
    activation: str | None,
    mask: Tensor | None,
) -> Tensor:
    """y = activation((x − mean) / √(var + eps) · weight + bias + add), per channel. Ioffe & Szegedy 2015.

    Centered before it is scaled: scale·x + shift in one step loses 18 units in the last place at
    mean/std 100 and 2e5 at 1e6. What the mask drops and is not finite counts as 0.
    """
    _, _, normalized = _standardized(_seen(x, mask), mean, var, eps)
    y = _affine(normalized, x, weight, bias)
    if add is not None:
        y = y + add
    return like(activate(y, activation), x)


def backward(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    add: Tensor | None,
    activation: str | None,
    mask: Tensor | None,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The direct path of the notes, and what flows into μ and σ². With u = dy · activation′, g = u · weight:

    dx = g · rstd,   dmean = −Σ g · rstd,   dvar = −½ Σ g · (x − mean) · rstd³,
    dweight = Σ u · x̂,   dbias = Σ u,   dadd = u
    """
    centered, rstd, normalized = _standardized(_seen(x, mask), mean, var, eps)
    upstream = dy.to(centered.dtype)
    if activation is not None:
        z = _affine(normalized, x, weight, bias)
        upstream = upstream * slope(z if add is None else z + add, activation)
    g = upstream if weight is None else upstream * per_channel(weight, x)
    dims = all_but_channels(x)
    dx, dmean, dvar, dweight, dbias, dadd = [none(x) for _ in range(6)]
    if needs[0]:
        dx = g * rstd
        dx = like(dx if mask is None else torch.where((mask != 0) | x.isfinite(), dx, 0.0), x)
    if needs[1]:
        dmean = -(g * rstd).sum(dims).to(mean.dtype)
    if needs[2]:
        dvar = -0.5 * (g * centered * rstd**3).sum(dims).to(var.dtype)
    if needs[3]:
        dweight = (upstream * normalized).sum(dims).to(parameter_dtype(x, weight))
    if needs[4]:
        dbias = upstream.sum(dims).to(parameter_dtype(x, weight))
    if needs[5]:
        dadd = like(upstream.clone(), x)
    return dx, dmean, dvar, dweight, dbias, dadd


def fake(
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    add: Tensor | None,
    activation: str | None,
    mask: Tensor | None,
) -> Tensor:
    check(x, mean, var, weight, bias, eps, add, activation, mask)
    return empty_like(x)


def backward_fake(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    add: Tensor | None,
    activation: str | None,
    mask: Tensor | None,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    dtypes = [mean.dtype, var.dtype, parameter_dtype(x, weight), parameter_dtype(x, weight)]
    dmean, dvar, dweight, dbias = (
        x.new_empty(x.shape[1], dtype=dtype) if need else none(x)
        for need, dtype in zip(needs[1:5], dtypes, strict=True)
    )
    dx, dadd = (empty_like(x) if needs[i] else none(x) for i in (0, 5))
    return dx, dmean, dvar, dweight, dbias, dadd


def backward_args(
    grads: Sequence[Tensor | None], inputs: Sequence[Any], outputs: dict[int, Tensor], needs: list[bool]
) -> tuple[Any, ...]:
    x, mean, var, weight, bias, eps, add, activation, mask = inputs
    return grads[0], x, mean, var, weight, bias, eps, add, activation, mask, needs


def samples(device: str = "cpu", dtype: torch.dtype = torch.float64) -> Iterator[Sample]:
    """2-D to 5-D, both memory formats, with and without every optional part, NaN where the mask drops."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int, mean: float = 0.0) -> Tensor:
        return (torch.randn(shape, generator=generator, device=device) + mean).to(dtype)

    def statistics(c: int) -> tuple[Tensor, Tensor]:
        return draw(c).double(), draw(c).double().square() + 0.1

    plain = (None, None, None)
    for shape in ((5, 3), (2, 3, 4), (2, 3, 4, 5), (2, 3, 2, 2, 2), (0, 3)):
        c = shape[1]
        for weight, bias in ((None, None), (draw(c), None), (None, draw(c)), (draw(c), draw(c))):
            name = f"{shape}-{weight is not None}-{bias is not None}"
            yield Sample((draw(*shape, mean=2.0), *statistics(c), weight, bias, 1e-5, *plain), name)
    for activation in (None, *ACTIVATIONS):
        for shape in ((5, 3), (2, 3, 4, 5)):
            c, name = shape[1], f"{shape}-{activation}"
            args = (draw(*shape, mean=2.0), *statistics(c), draw(c), draw(c), 1e-5)
            yield Sample((*args, draw(*shape), activation, None), f"{name}-add")
            yield Sample((*args, None, activation, None), name)
    last = draw(2, 4, 3, 5).to(memory_format=torch.channels_last)
    yield Sample((last, *statistics(4), draw(4), draw(4), 1e-5, *plain), "channels_last")
    yield Sample((draw(5, 3).t().contiguous().t(), *statistics(3), draw(3), None, 1e-5, *plain), "transposed")
    x = draw(3, 2, 4)
    x[1, 0, 2], x[2, 1, 3] = math.nan, math.inf
    mask = torch.ones(3, 1, 4, dtype=torch.bool, device=device)
    mask[1, 0, 2] = mask[2, 0, 3] = mask[0, 0, 0] = False
    yield Sample((x, *statistics(2), draw(2), draw(2), 1e-5, None, "silu", mask), "masked")


def error_samples() -> Iterator[ErrorSample]:
    x, v, plain = torch.ones(2, 3), torch.ones(3), (None, None, None)
    yield ErrorSample((x.long(), v, v, None, None, 1e-5, *plain), RuntimeError, "floating point", "integer")
    yield ErrorSample((v, v, v, None, None, 1e-5, *plain), RuntimeError, "at least 2-D", "1-D")
    yield ErrorSample((x, v[:2], v, None, None, 1e-5, *plain), RuntimeError, r"mean .*\(3,\)", "mean shape")
    yield ErrorSample((x, v, v, None, v[:1], 1e-5, *plain), RuntimeError, r"bias .*\(3,\)", "bias shape")
    args = (x, v, v, None, None, 1e-5)
    yield ErrorSample((*args, x[:1], None, None), RuntimeError, "add must be like x", "add shape")
    yield ErrorSample((*args, None, "tanh", None), ValueError, "activation must be", "activation")
    yield ErrorSample((*args, None, None, v[:2] > 0), RuntimeError, "mask must broadcast", "mask shape")


affine = define(
    Op(
        name="affine",
        schema="(Tensor x, Tensor mean, Tensor var, Tensor? weight, Tensor? bias, float eps, Tensor? add,"
        " str? activation, Tensor? mask) -> Tensor",
        backward_schema="(Tensor dy, Tensor x, Tensor mean, Tensor var, Tensor? weight, Tensor? bias,"
        " float eps, Tensor? add, str? activation, Tensor? mask, bool[] needs) -> (Tensor dx, Tensor dmean,"
        " Tensor dvar, Tensor dweight, Tensor dbias, Tensor dadd)",
        check=check,
        reference=reference,
        backward=backward,
        fake=fake,
        backward_fake=backward_fake,
        differentiable=(0, 1, 2, 3, 4, 6),
        differentiable_outputs=(0,),
        saved_outputs=(),
        backward_args=backward_args,
        samples=samples,
        error_samples=error_samples,
    )
)
"""(x, mean, var, weight, bias, eps, add, activation, mask) -> y; x and add: (n, c, *spatial), else (c,)."""
