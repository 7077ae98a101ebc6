"""The activations of the native kernels: against float64, value and derivative, everywhere."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from musigma import ops
from musigma.ops._activations import slope as derivative
from native import RUN

ACTIVATIONS = tuple(ops.ACTIVATIONS)
FLOATS = (torch.float32, torch.float64)
HALVES = (torch.bfloat16, torch.float16)
SMALLEST = {torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24}


def through_row_norm(z: Tensor, activation: str, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """activation(z) and its derivative, by a norm whose weight of 0 leaves nothing but the bias z."""
    x = torch.linspace(-1, 1, z.numel(), dtype=dtype or z.dtype)[None]
    bias = z.clone().requires_grad_()
    y = ops.row_norm(x, 1, torch.zeros_like(z), bias, 1e-5, True, activation)[0]
    (slope,) = torch.autograd.grad(y, bias, torch.ones_like(y))
    return y.detach()[0], slope


def exact(z: Tensor, activation: str) -> Tensor:
    """activation(z), in float64 and without cancellation in the tails."""
    z = z.double()
    if activation == "relu":
        return z.relu()
    if activation == "gelu":
        return z * 0.5 * torch.erfc(-z / math.sqrt(2))
    if activation == "gelu_tanh":
        return z * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))
    return z * torch.sigmoid(z)


def grid(dtype: torch.dtype) -> Tensor:
    near = torch.linspace(-12, 12, 40_001, dtype=torch.float64)
    magnitudes = torch.logspace(-40, 2, 500, dtype=torch.float64)
    return torch.cat([near, magnitudes, -magnitudes]).to(dtype)


@pytest.mark.skipif(not RUN, reason="the native kernels are not built")
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_dense_grid_of_values(activation: str, dtype: torch.dtype) -> None:
    z = grid(dtype)
    y, _ = through_row_norm(z, activation)
    want = exact(z, activation)
    # 2.5 units of the result, and more of the ever smaller ones in the negative tail, as rounding z costs; in
    # float64 the reference is as far off again
    units = 2.5 * (1 + z.double().clamp(max=0) ** 2) * (1 if dtype is torch.float32 else 2)
    smallest = 1e-36 if dtype is torch.float32 else 1e-300  # below it the exponential is no normal number
    assert ((y.double() - want).abs() <= units * torch.finfo(dtype).eps * want.abs() + smallest).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_dense_grid_of_slopes(activation: str, dtype: torch.dtype) -> None:
    z = grid(dtype)
    _, slope = through_row_norm(z, activation)
    # the references' formula, which test_every_op holds to autograd's: that one loses z units at a large z
    want = derivative(z.double(), activation)
    # slopes lie within ±1.13; in float64 the reference errs as well
    assert (slope.double() - want).abs().max() <= (2.5 if dtype is torch.float32 else 5) * torch.finfo(
        dtype
    ).eps


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_huge_values_and_what_is_not_a_number(activation: str, dtype: torch.dtype) -> None:
    nan, inf = math.nan, math.inf
    large = torch.finfo(dtype).max
    z = torch.tensor([inf, nan, 1e30, -1e30, large, -large, 0.0, -0.0, -1e3, 1e3], dtype=dtype)
    y, slope = through_row_norm(z, activation)
    torch.testing.assert_close(
        y,
        torch.tensor([inf, nan, 1e30, 0, large, 0, 0, 0, 0, 1e3], dtype=dtype),
        equal_nan=True,
        rtol=0,
        atol=0,
    )
    half = 0.0 if activation == "relu" else 0.5
    wanted = torch.tensor([1, nan, 1, 0, 1, 0, half, half, 0, 1], dtype=dtype)
    if activation == "relu":
        wanted[1] = slope[1]  # torch's threshold lets the gradient of a NaN pass
    torch.testing.assert_close(slope, wanted, equal_nan=True, rtol=0, atol=0)
    below = through_row_norm(torch.full((3,), -inf, dtype=dtype), activation)[0]
    torch.testing.assert_close(
        below, ops.activate(torch.full((3,), -inf, dtype=dtype), activation), equal_nan=True
    )


def test_relu_at_zero_has_slope_zero() -> None:
    _, slope = through_row_norm(torch.zeros(5), "relu")
    assert torch.equal(slope, torch.zeros(5))


@pytest.mark.skipif(not RUN, reason="the native kernels are not built")
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_same_bits_in_every_lane_and_in_partial_vectors(activation: str) -> None:
    for value in (-3.7, -1e-3, 0.3, 2.9):
        for dtype in (*FLOATS, *HALVES):
            bias = torch.full((37,), value, dtype=torch.float64 if dtype is torch.float64 else torch.float32)
            whole, slopes = through_row_norm(bias, activation, dtype)
            assert whole.unique().numel() == slopes.unique().numel() == 1
            for n in (1, 2, 3, 5, 15, 16, 17):
                part, some = through_row_norm(bias[:n], activation, dtype)
                assert torch.equal(part, whole[:n])
                assert torch.equal(some, slopes[:n])


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_half_precision_is_rounded_once_behind_the_activation(activation: str, dtype: torch.dtype) -> None:
    z = grid(torch.float32)
    z = z[z.abs() <= torch.finfo(dtype).max]
    y, slope = through_row_norm(z, activation, dtype)
    want = exact(z, activation)
    # half a unit, the 2^-13 that such an activation may be off before that, and half of the type's smallest
    # step; what is below 1e-36 may be 0
    limit = (0.5 * torch.finfo(dtype).eps + 2.0**-13) * want.abs() + max(0.5 * SMALLEST[dtype], 1e-36)
    assert ((y.double() - want).abs() <= limit).all()
    assert (slope.double() - derivative(z.double(), activation)).abs().max() <= 2.0**-12


@pytest.mark.skipif(not RUN, reason="the native kernels are not built")
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_half_precision_far_out(activation: str, dtype: torch.dtype) -> None:
    nan, inf = math.nan, math.inf
    large = torch.finfo(dtype).max
    z = torch.tensor([inf, nan, large, -large, 0.0, -0.0, -1e3, 1e3], dtype=torch.float32)
    y, slope = through_row_norm(z, activation, dtype)
    wanted = torch.tensor([inf, nan, large, 0, 0, 0, 0, 1e3], dtype=dtype)
    torch.testing.assert_close(y, wanted, equal_nan=True, rtol=0, atol=0)
    half = 0.0 if activation == "relu" else 0.5
    slopes = torch.tensor([1, nan, 1, 0, half, half, 0, 1])
    if activation == "relu":
        slopes[1] = slope[1]  # as torch's threshold
    torch.testing.assert_close(slope, slopes, equal_nan=True, rtol=0, atol=2.0**-12)
    assert slope[[3, 6]].abs().max() < 1e-34  # a dead unit stays dead
