"""A residual's addition and the norm behind it in one pass: the step between a Transformer's sublayers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from musigma.ops._activations import ACTIVATIONS
from musigma.ops._define import ErrorSample, Op, Sample, define
from musigma.ops._numerics import accumulator, none, parameter_dtype
from musigma.ops._row_norm import op as row


def check(
    x: Tensor,
    residual: Tensor,
    n_dims: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    center: bool,
    activation: str | None,
) -> None:
    """x and residual are alike; the rest is row_norm's."""
    row.check(x, n_dims, weight, bias, eps, center, activation)
    if x.shape != residual.shape or x.dtype is not residual.dtype:
        raise ValueError(
            "x and residual must have the same shape and dtype, got "
            f"{tuple(x.shape)} {x.dtype} and {tuple(residual.shape)} {residual.dtype}"
        )


def reference(
    x: Tensor,
    residual: Tensor,
    n_dims: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    center: bool,
    activation: str | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """sum = x + residual, rounded to their type; y = row_norm(sum).

    Vaswani et al. 2017, section 3.1 (post-norm); Xiong et al. 2020 (pre-norm, which carries the sum on).
    """
    total = (x + residual).contiguous()
    y, mean, rstd = row.reference(total, n_dims, weight, bias, eps, center, activation)
    return y, total, mean, rstd


def backward(
    dy: Tensor | None,
    dsum: Tensor | None,
    total: Tensor,
    n_dims: int,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    eps: float,
    center: bool,
    activation: str | None,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """row_norm's backward at the sum, and the sum's own gradient: one d for x and for residual.

    `needs` has a flag for each of x, residual, weight and bias.
    """
    if dy is None:
        dy = torch.zeros_like(total)
    dx, dweight, dbias = row.backward(
        dy.to(accumulator(total)),
        total.to(accumulator(total)),
        n_dims,
        weight,
        bias,
        mean,
        rstd,
        eps,
        center,
        activation,
        [needs[0] or needs[1], needs[2], needs[3]],
    )
    if needs[0] or needs[1]:
        dx = (dx if dsum is None else dx + dsum).to(total.dtype).contiguous()
    else:
        dx = none(total)
    if needs[2]:
        dweight = dweight.to(parameter_dtype(total, weight))
    if needs[3]:
        dbias = dbias.to(parameter_dtype(total, weight if bias is None else bias))
    return dx, dweight if needs[2] else none(total), dbias if needs[3] else none(total)


def fake(
    x: Tensor,
    residual: Tensor,
    n_dims: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    center: bool,
    activation: str | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    check(x, residual, n_dims, weight, bias, eps, center, activation)
    y, mean, rstd = row.fake(x, n_dims, weight, bias, eps, center, activation)
    return y, x.new_empty(x.shape), mean, rstd


def backward_fake(
    dy: Tensor | None,
    dsum: Tensor | None,
    total: Tensor,
    n_dims: int,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    eps: float,
    center: bool,
    activation: str | None,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    rows = [needs[0] or needs[1], needs[2], needs[3]]
    return row.backward_fake(total, total, n_dims, weight, bias, mean, rstd, eps, center, activation, rows)


def backward_args(
    grads: Sequence[Tensor | None], inputs: Sequence[Any], outputs: dict[int, Tensor], needs: list[bool]
) -> tuple[Any, ...]:
    _, _, n_dims, weight, bias, eps, center, activation = inputs
    return (
        grads[0],
        grads[1],
        outputs[1],
        n_dims,
        weight,
        bias,
        outputs[2],
        outputs[3],
        eps,
        center,
        activation,
        needs,
    )


def samples(device: str = "cpu", dtype: torch.dtype = torch.float64) -> Iterator[Sample]:
    """row_norm's hazards, with something to add to each."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int, mean: float = 0.0) -> Tensor:
        return (torch.randn(shape, generator=generator, device=device) + mean).to(dtype)

    for shape, n_dims in (((4, 8), 1), ((2, 3, 5), 2), ((7,), 1), ((0, 4), 1), ((2, 3, 63), 1)):
        size = shape[-n_dims:]
        for center, weight, bias in (
            (True, draw(*size), draw(*size)),
            (True, None, None),
            (False, draw(*size), None),
        ):
            name = f"{shape}-{n_dims}-{'center' if center else 'rms'}-{weight is not None}"
            x, residual = draw(*shape, mean=3.0), draw(*shape)
            yield Sample((x, residual, n_dims, weight, bias, 1e-5, center, None), name)
    for activation in ACTIVATIONS:
        x, residual = draw(3, 17), draw(3, 17)
        yield Sample((x, residual, 1, draw(17), draw(17), 1e-5, True, activation), activation)
    strided = draw(6, 5, mean=1.0).t()
    yield Sample((strided, draw(5, 6), 1, draw(6), None, 1e-5, True, None), "transposed")


def error_samples() -> Iterator[ErrorSample]:
    x = torch.ones(2, 3)
    rest = (1, None, None, 1e-5, True, None)
    yield ErrorSample((x, x[:1], *rest), ValueError, r"same shape .*\(1, 3\)", "another shape")
    yield ErrorSample((x, x.double(), *rest), ValueError, "same shape and dtype", "another dtype")
    yield ErrorSample((x.long(), x.long(), *rest), RuntimeError, "floating point", "integer")
    yield ErrorSample((x, x, 3, *rest[1:]), RuntimeError, "n_dims", "too many dims")
    yield ErrorSample((x, x, *rest[:-1], "tanh"), ValueError, "activation", "unknown activation")


add_row_norm = define(
    Op(
        name="add_row_norm",
        schema="(Tensor x, Tensor residual, int n_dims, Tensor? weight, Tensor? bias, float eps, bool center,"
        " str? activation) -> (Tensor y, Tensor sum, Tensor mean, Tensor rstd)",
        backward_schema="(Tensor? dy, Tensor? dsum, Tensor sum, int n_dims, Tensor? weight, Tensor? bias,"
        " Tensor mean, Tensor rstd, float eps, bool center, str? activation, bool[] needs)"
        " -> (Tensor d, Tensor dweight, Tensor dbias)",
        check=check,
        reference=reference,
        backward=backward,
        fake=fake,
        backward_fake=backward_fake,
        differentiable=(0, 1, 3, 4),
        gradients=(0, 0, 1, 2),
        differentiable_outputs=(0, 1),
        saved_outputs=(1, 2, 3),
        backward_args=backward_args,
        samples=samples,
        error_samples=error_samples,
    )
)
"""(x, residual, n_dims, weight, bias, eps, center, activation) -> (y, x + residual, mean, rstd)."""
