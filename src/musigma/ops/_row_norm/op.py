"""LayerNorm and RMSNorm: every row is normalized by its own mean and spread, or by its root mean square."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from musigma.ops._activations import ACTIVATIONS, activate, check_activation, slope
from musigma.ops._define import ErrorSample, Op, Sample, define
from musigma.ops._numerics import accumulator, first, none, parameter_dtype


def check(
    x: Tensor,
    n_dims: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    center: bool,
    activation: str | None,
) -> None:
    """The last `n_dims` dims are the row; weight and bias have its shape; the activation is known."""
    if not x.is_floating_point():
        raise RuntimeError(f"x must be floating point, got {x.dtype}; convert it first, x.float()")
    if not 1 <= n_dims <= x.dim():
        raise RuntimeError(f"n_dims must lie between 1 and x.dim() ({x.dim()}), got {n_dims}")
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None and parameter.shape != x.shape[-n_dims:]:
            raise RuntimeError(
                f"{name} must have the row's shape {tuple(x.shape[-n_dims:])}, got {tuple(parameter.shape)}"
            )
    check_activation(activation)


def _standardized(x: Tensor, n_dims: int, eps: float, center: bool) -> tuple[Tensor, Tensor, Tensor]:
    """x̂ as (*rows, width), and each row's mean and rstd as (*rows, 1), in the accumulator type."""
    # Contiguous, so that a row is summed in one order wherever it lies.
    rows = x.to(accumulator(x)).flatten(-n_dims).contiguous()  # (*rows, width)
    mean = torch.zeros_like(rows[..., :1])
    centered = rows
    if center:
        pivot = first(rows)
        offset = (rows - pivot).mean(-1, keepdim=True)
        centered, mean = rows - pivot - offset, pivot + offset
    rstd = (centered.square().mean(-1, keepdim=True) + eps).rsqrt()
    return centered * rstd, mean, rstd


def _affine(z: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if weight is not None:
        z = z * weight
    if bias is not None:
        z = z + bias
    return z


def reference(
    x: Tensor,
    n_dims: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    center: bool,
    activation: str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """y = activation((x − μ) · rstd · weight + bias), rstd = 1/√(σ² + eps) over the last `n_dims` dims of x.

    Ba et al. 2016 (seed note "Why Normalize a Neuron?"); without centering Zhang & Sennrich 2019.
    """
    normalized, mean, rstd = _standardized(x, n_dims, eps, center)
    y = activate(_affine(normalized.unflatten(-1, x.shape[-n_dims:]), weight, bias), activation)
    return y.to(x.dtype).contiguous(), mean.squeeze(-1).detach().clone(), rstd.squeeze(-1).detach().clone()


def backward(
    dy: Tensor,
    x: Tensor,
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
    """The three paths of the notes (x itself, μ, σ²), gathered.

    With dz = dy · activation'(x̂ · weight + bias), g = dz · weight and x̂ the standardized row,

        dx = rstd · (g − mean(g) − x̂ · mean(g · x̂)),   dweight = Σ dz · x̂,   dbias = Σ dz

    where mean(g) falls away without centering. Everything is formed again from x, so this can itself be
    differentiated; a kernel reads `mean` and `rstd` instead.
    """
    normalized, _, scale = _standardized(x, n_dims, eps, center)
    normalized = normalized.unflatten(-1, x.shape[-n_dims:])
    scale = scale.reshape(*scale.shape[:-1], *[1] * n_dims)
    upstream = dy.to(normalized.dtype)
    if activation is not None:
        upstream = upstream * slope(_affine(normalized, weight, bias), activation)
    row, rows = list(range(-n_dims, 0)), list(range(x.dim() - n_dims))
    dx, dweight, dbias = none(x), none(x), none(x)
    if needs[0]:
        g = upstream if weight is None else upstream * weight
        path = g - normalized * (g * normalized).mean(row, keepdim=True)
        if center:
            path = path - g.mean(row, keepdim=True)
        dx = (scale * path).to(x.dtype).contiguous()
    if needs[1]:
        dweight = _sum(upstream * normalized, rows).to(parameter_dtype(x, weight))
    if needs[2]:
        dbias = _sum(upstream, rows).to(parameter_dtype(x, weight if bias is None else bias))
    return dx, dweight, dbias


def _sum(terms: Tensor, dims: list[int]) -> Tensor:
    # sum over no dims would be the sum over all of them
    return terms.sum(dims) if dims else terms.clone()


def fake(
    x: Tensor,
    n_dims: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    center: bool,
    activation: str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    check(x, n_dims, weight, bias, eps, center, activation)
    rows = x.shape[: x.dim() - n_dims]
    dtype = accumulator(x)
    return x.new_empty(x.shape), x.new_empty(rows, dtype=dtype), x.new_empty(rows, dtype=dtype)


def backward_fake(
    dy: Tensor,
    x: Tensor,
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
    row = x.shape[-n_dims:]
    bias = weight if bias is None else bias
    return (
        x.new_empty(x.shape) if needs[0] else none(x),
        x.new_empty(row, dtype=parameter_dtype(x, weight)) if needs[1] else none(x),
        x.new_empty(row, dtype=parameter_dtype(x, bias)) if needs[2] else none(x),
    )


def backward_args(
    grads: Sequence[Tensor | None], inputs: Sequence[Any], outputs: dict[int, Tensor], needs: list[bool]
) -> tuple[Any, ...]:
    x, n_dims, weight, bias, eps, center, activation = inputs
    return grads[0], x, n_dims, weight, bias, outputs[1], outputs[2], eps, center, activation, needs


def samples(device: str = "cpu", dtype: torch.dtype = torch.float64) -> Iterator[Sample]:
    """Rows of every awkward length, one to three dims wide, with and without each optional part."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int, mean: float = 0.0) -> Tensor:
        return (torch.randn(shape, generator=generator, device=device) + mean).to(dtype)

    for shape, n_dims in (((4, 8), 1), ((3, 1), 1), ((2, 3, 5), 2), ((7,), 1), ((0, 4), 1), ((2, 3, 63), 1)):
        row = shape[-n_dims:]
        for center in (True, False):
            for weight, bias in (
                (None, None),
                (draw(*row), None),
                (None, draw(*row)),
                (draw(*row), draw(*row)),
            ):
                kind = "center" if center else "rms"
                name = f"{shape}-{n_dims}-{kind}-{weight is not None}-{bias is not None}"
                yield Sample((draw(*shape, mean=3.0), n_dims, weight, bias, 1e-5, center, None), name)
    for activation in ACTIVATIONS:
        yield Sample((draw(2, 3, 17), 1, draw(17), draw(17), 1e-5, True, activation), activation)
        yield Sample((draw(3, 2, 9), 2, None, None, 1e-5, False, activation), f"{activation}-plain")
    strided = draw(6, 5, mean=1.0).t()
    yield Sample((strided, 1, draw(6), draw(6), 1e-5, True, None), "transposed")
    yield Sample((draw(1, 6).expand(5, 6), 1, draw(6), None, 1e-5, True, None), "expanded")
    constant = torch.full((3, 9), 0.1, device=device, dtype=dtype)
    yield Sample((constant, 1, draw(9), draw(9), 1e-5, True, None), "constant")


def error_samples() -> Iterator[ErrorSample]:
    x = torch.ones(2, 3)
    yield ErrorSample((x.long(), 1, None, None, 1e-5, True, None), RuntimeError, "floating point", "integer")
    yield ErrorSample((x, 3, None, None, 1e-5, True, None), RuntimeError, "n_dims", "too many dims")
    yield ErrorSample(
        (x, 1, torch.ones(2), None, 1e-5, True, None), RuntimeError, r"weight .*\(3,\)", "weight shape"
    )
    yield ErrorSample(
        (x, 1, None, torch.ones(2), 1e-5, True, None), RuntimeError, r"bias .*\(3,\)", "bias shape"
    )
    yield ErrorSample((x, 1, None, None, 1e-5, True, "tanh"), ValueError, "activation", "unknown activation")


row_norm = define(
    Op(
        name="row_norm",
        schema="(Tensor x, int n_dims, Tensor? weight, Tensor? bias, float eps, bool center,"
        " str? activation) -> (Tensor y, Tensor mean, Tensor rstd)",
        backward_schema="(Tensor dy, Tensor x, int n_dims, Tensor? weight, Tensor? bias, Tensor mean,"
        " Tensor rstd, float eps, bool center, str? activation, bool[] needs)"
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
"""(x, n_dims, weight, bias, eps, center, activation) -> (y, mean, rstd); mean and rstd: one a row."""
