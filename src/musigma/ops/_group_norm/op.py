"""GroupNorm: the channels of one example, a group at a time; with one channel a group InstanceNorm."""

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
    empty_like,
    first,
    like,
    none,
    parameter_dtype,
    per_channel,
)


def check(
    x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float, activation: str | None
) -> None:
    """x is (n, c, *spatial); the groups divide the channels; weight and bias are (c,)."""
    if not x.is_floating_point():
        raise RuntimeError(f"x must be floating point, got {x.dtype}; convert it first, x.float()")
    if x.dim() < 2:
        raise RuntimeError(f"x must be (n, c, *spatial), at least 2-D; got shape {tuple(x.shape)}")
    channels = x.shape[1]
    if groups < 1 or channels % groups:
        divisors = [d for d in range(1, channels + 1) if channels % d == 0]
        raise RuntimeError(f"groups ({groups}) must divide the channels ({channels}); try one of {divisors}")
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None and parameter.shape != (channels,):
            raise RuntimeError(f"{name} must have shape ({channels},), got {tuple(parameter.shape)}")
    check_activation(activation)


def _standardized(x: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x̂ (in x's shape), and each group's rstd, mean and M2 as (n, groups, 1), in the accumulator type."""
    rows = x.to(accumulator(x)).reshape(x.shape[0], groups, math.prod(x.shape[1:]) // groups)
    pivot = first(rows)
    offset = (rows - pivot).mean(-1, keepdim=True)
    centered = rows - pivot - offset
    squares = centered.square()
    rstd = (squares.mean(-1, keepdim=True) + eps).rsqrt()
    return (centered * rstd).reshape(x.shape), rstd, pivot + offset, squares.sum(-1, keepdim=True)


def _affine(normalized: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    y = normalized
    if weight is not None:
        y = y * per_channel(weight, x)
    if bias is not None:
        y = y + per_channel(bias, x)
    return y


def reference(
    x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float, activation: str | None
) -> tuple[Tensor, Tensor, Tensor]:
    """y = activation((x − μ) / √(σ² + eps) · weight + bias), over (c/groups, *spatial) of each example.

    Wu & He 2018. The moments come back too: InstanceNorm's running statistics are made of them.
    """
    normalized, _, mean, m2 = _standardized(x, groups, eps)
    y = activate(_affine(normalized, x, weight, bias), activation)
    return like(y, x), mean.squeeze(-1).detach().clone(), m2.squeeze(-1).detach().clone()


def backward(
    dy: Tensor,
    x: Tensor,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    m2: Tensor,
    eps: float,
    activation: str | None,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """With u = dy · activation′ and g = u · weight, means over a group, sums over examples and positions:

        dx = rstd · (g − mean(g) − x̂ · mean(g · x̂)),   dweight = Σ u · x̂,   dbias = Σ u

    Formed again from x, so it can itself be differentiated; a kernel reads `mean` and `m2` instead.
    """
    normalized, rstd, _, _ = _standardized(x, groups, eps)
    upstream = dy.to(normalized.dtype)
    if activation is not None:
        upstream = upstream * slope(_affine(normalized, x, weight, bias), activation)
    dims = all_but_channels(x)
    dx, dweight, dbias = none(x), none(x), none(x)
    if needs[0]:
        g = upstream if weight is None else upstream * per_channel(weight, x)
        shape = (x.shape[0], groups, math.prod(x.shape[1:]) // groups)
        g, rows = g.reshape(shape), normalized.reshape(shape)
        path = g - g.mean(-1, keepdim=True) - rows * (g * rows).mean(-1, keepdim=True)
        dx = like((rstd * path).reshape(x.shape), x)
    if needs[1]:
        dweight = (upstream * normalized).sum(dims).to(parameter_dtype(x, weight))
    if needs[2]:
        dbias = upstream.sum(dims).to(parameter_dtype(x, weight))
    return dx, dweight, dbias


def fake(
    x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float, activation: str | None
) -> tuple[Tensor, Tensor, Tensor]:
    check(x, groups, weight, bias, eps, activation)
    dtype = accumulator(x)
    shape = (x.shape[0], groups)
    return empty_like(x), x.new_empty(shape, dtype=dtype), x.new_empty(shape, dtype=dtype)


def backward_fake(
    dy: Tensor,
    x: Tensor,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    m2: Tensor,
    eps: float,
    activation: str | None,
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
    x, groups, weight, bias, eps, activation = inputs
    return grads[0], x, groups, weight, bias, outputs[1], outputs[2], eps, activation, needs


def samples(device: str = "cpu", dtype: torch.dtype = torch.float64) -> Iterator[Sample]:
    """2-D to 5-D, one group to one channel a group, both memory formats, empty batches."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int, mean: float = 0.0) -> Tensor:
        return (torch.randn(shape, generator=generator, device=device) + mean).to(dtype)

    for shape, groups in (((3, 4), 2), ((2, 6, 5), 3), ((2, 4, 3, 3), 1), ((2, 4, 3, 3), 4), ((0, 4, 2), 2)):
        c = shape[1]
        for weight, bias in ((None, None), (draw(c), None), (None, draw(c)), (draw(c), draw(c))):
            name = f"{shape}-{groups}-{weight is not None}-{bias is not None}"
            yield Sample((draw(*shape, mean=3.0), groups, weight, bias, 1e-5, None), name)
    for activation in ACTIVATIONS:
        for shape, groups in (((3, 6), 2), ((2, 6, 3, 3), 3)):
            args = (draw(*shape, mean=3.0), groups, draw(6), draw(6), 1e-5, activation)
            yield Sample(args, f"{shape}-{groups}-{activation}")
    last = draw(2, 4, 3, 5, mean=1.0).to(memory_format=torch.channels_last)
    yield Sample((last, 2, draw(4), draw(4), 1e-5, None), "channels_last")
    last = draw(2, 4, 2, 3, 2).to(memory_format=torch.channels_last_3d)
    yield Sample((last, 2, draw(4), draw(4), 1e-5, None), "channels_last_3d")
    ambiguous = draw(1, 6, 4, 1).permute(1, 2, 0, 3)
    yield Sample((ambiguous, 2, None, None, 1e-5, None), "ambiguous strides")
    constant = torch.full((2, 4, 7), 0.1, device=device, dtype=dtype)
    yield Sample((constant, 2, draw(4), draw(4), 1e-5, None), "constant")


def error_samples() -> Iterator[ErrorSample]:
    x = torch.ones(2, 6, 3)
    yield ErrorSample((x.long(), 2, None, None, 1e-5, None), RuntimeError, "floating point", "integer")
    yield ErrorSample((x[0, 0], 1, None, None, 1e-5, None), RuntimeError, "at least 2-D", "1-D")
    yield ErrorSample((x, 4, None, None, 1e-5, None), RuntimeError, r"divide .*\[1, 2, 3, 6\]", "groups")
    yield ErrorSample(
        (x, 2, torch.ones(2), None, 1e-5, None), RuntimeError, r"weight .*\(6,\)", "weight shape"
    )
    yield ErrorSample((x, 2, None, None, 1e-5, "tanh"), ValueError, "activation must be", "activation")


group_norm = define(
    Op(
        name="group_norm",
        schema="(Tensor x, int groups, Tensor? weight, Tensor? bias, float eps, str? activation)"
        " -> (Tensor y, Tensor mean, Tensor m2)",
        backward_schema="(Tensor dy, Tensor x, int groups, Tensor? weight, Tensor? bias, Tensor mean,"
        " Tensor m2, float eps, str? activation, bool[] needs)"
        " -> (Tensor dx, Tensor dweight, Tensor dbias)",
        check=check,
        reference=reference,
        backward=backward,
        fake=fake,
        backward_fake=backward_fake,
        differentiable=(0, 2, 3),
        differentiable_outputs=(0,),
        saved_outputs=(1, 2),
        backward_args=backward_args,
        samples=samples,
        error_samples=error_samples,
    )
)
"""(x, groups, weight, bias, eps, activation) -> (y, mean, m2); x: (n, c, *spatial), moments: (n, groups)."""
