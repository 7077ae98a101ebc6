"""The references against an independent truth: numpy in long double, and torch.nn.functional in float64."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from musigma import ops

ULP = {torch.float32: 2.0**-23, torch.float64: 2.0**-52}


def long_double_row_norm(x: np.ndarray, eps: float) -> np.ndarray:
    x = x.astype(np.longdouble)
    x = x - x[..., :1]  # exact; without it the sum itself is off by 1e-13 at mean/std 1e6, in long double too
    centered = x - x.mean(-1, keepdims=True)
    return centered / np.sqrt((centered**2).mean(-1, keepdims=True) + np.longdouble(eps))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("ratio", [0.0, 1e2, 1e4, 1e6])
@pytest.mark.parametrize("width", [1, 2, 63, 100, 1025])
def test_large_mean_small_variance(dtype: torch.dtype, ratio: float, width: int) -> None:
    g = torch.Generator().manual_seed(width)
    x = (torch.randn(5, width, generator=g, dtype=torch.float64) + ratio).to(dtype)
    want = long_double_row_norm(x.numpy(), 1e-5)
    y = ops.row_norm(x, 1, None, None, 1e-5, True, None)[0].numpy().astype(np.longdouble)
    # the promise of every kernel, for the type that comes out
    assert abs(y - want).max() <= 4 * ULP[dtype] * max(abs(want).max(), 1e-30)


@pytest.mark.parametrize("scale", [1e-30, 1e-15, 1.0, 1e15, 1e30])
def test_scales_that_overflow_a_float32_square(scale: float) -> None:
    g = torch.Generator().manual_seed(0)
    x = (torch.randn(4, 8, 5, 5, generator=g, dtype=torch.float64) * scale).float()
    for got, want in (
        (ops.row_norm(x, 3, None, None, 1e-5, True, None)[0], F.layer_norm(x.double(), x.shape[1:])),
        (ops.row_norm(x, 3, None, None, 1e-6, False, None)[0], F.rms_norm(x.double(), x.shape[1:], eps=1e-6)),
        (ops.group_norm(x, 2, None, None, 1e-5, None)[0], F.group_norm(x.double(), 2)),
    ):
        assert got.isfinite().all()
        assert (got - want).abs().max() <= 4 * ULP[torch.float32] * want.abs().max()


@pytest.mark.parametrize("n_dims", [1, 2, 3])
def test_row_norm_is_torchs_layer_norm_in_float64(n_dims: int) -> None:
    g = torch.Generator().manual_seed(0)
    x, w, b = (
        torch.randn(s, generator=g, dtype=torch.float64)
        for s in ((2, 3, 4), (2, 3, 4)[-n_dims:], (2, 3, 4)[-n_dims:])
    )
    y, mean, rstd = ops.row_norm(x, n_dims, w, b, 1e-5, True, None)
    torch.testing.assert_close(y, F.layer_norm(x, x.shape[-n_dims:], w, b), rtol=1e-12, atol=1e-12)
    dims = tuple(range(-n_dims, 0))
    torch.testing.assert_close(mean, x.mean(dims))
    torch.testing.assert_close(rstd, (x.var(dims, correction=0) + 1e-5).rsqrt())
    torch.testing.assert_close(
        ops.row_norm(x, n_dims, w, None, 1e-6, False, None)[0], F.rms_norm(x, x.shape[-n_dims:], w, 1e-6)
    )


@pytest.mark.parametrize("value", [0.1, 14.62, -7.3e9, 1e30])
@pytest.mark.parametrize("n", [7, 100, 1000])
def test_constant_channel_is_exactly_the_bias(value: float, n: int) -> None:
    # C04: torch gives 94733 for -7.3e9
    bias = torch.tensor([3.0, -1.0])
    for layout in (torch.contiguous_format, torch.channels_last):
        x = torch.full((1, 2, n, 5), value).contiguous(memory_format=layout)
        y = ops.group_norm(x, 1, None, bias, 1e-5, None)[0]
        assert torch.equal(y, bias[:, None, None].expand(1, 2, n, 5))
        count, mean, m2 = ops.moments(x, [0, 2, 3], None)
        y = ops.affine(x, mean, m2 / count, None, bias, 1e-5, None, None, None)
        assert torch.equal(y, bias[:, None, None].expand(1, 2, n, 5))


def test_moments_then_affine_is_batch_norm_with_the_notes_three_paths() -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(6, 3, 4, generator=g, dtype=torch.float64).requires_grad_()
    w = torch.randn(3, generator=g, dtype=torch.float64).requires_grad_()
    b = torch.randn(3, generator=g, dtype=torch.float64).requires_grad_()
    dy = torch.randn(6, 3, 4, generator=g, dtype=torch.float64)
    count, mean, m2 = ops.moments(x, [0, 2], None)
    y = ops.affine(x, mean, m2 / count, w, b, 1e-5, None, None, None)
    ours = torch.autograd.grad(y, (x, w, b), dy)
    theirs = torch.autograd.grad(F.batch_norm(x, None, None, w, b, training=True), (x, w, b), dy)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)

    # the notes' formula itself: dx = dx̂·rstd + dμ/n + dσ²·2(x − μ)/n
    n, centered = 24, (x - x.mean((0, 2), keepdim=True)).detach()
    rstd = (centered.square().mean((0, 2), keepdim=True) + 1e-5).rsqrt()
    dxhat = dy * w.detach()[:, None]
    dvar = -0.5 * (dxhat * centered).sum((0, 2), keepdim=True) * rstd**3
    dmean = -(dxhat * rstd).sum((0, 2), keepdim=True)
    torch.testing.assert_close(
        ours[0], dxhat * rstd + dmean / n + dvar * 2 * centered / n, rtol=1e-10, atol=1e-10
    )
    torch.testing.assert_close(ours[1], (dy * centered * rstd).sum((0, 2)))
    torch.testing.assert_close(ours[2], dy.sum((0, 2)))


def test_half_inputs_keep_their_statistics_out_of_half() -> None:
    # C08: rstd of a zero row is 1/√eps = 1e6, which is inf in float16
    x = torch.zeros(1, 10, dtype=torch.float16, requires_grad=True)
    y, _, rstd = ops.row_norm(x, 1, None, None, 1e-12, True, None)
    (y.float() * torch.arange(10.0) * 1e-3).sum().backward()
    assert rstd.dtype == torch.float64
    assert rstd.item() == pytest.approx(1e6)
    assert x.grad[0, 0].item() == pytest.approx(-4500, rel=1e-3)


def test_channels_last_comes_back_as_it_came_in() -> None:
    x = torch.randn(2, 4, 3, 5).to(memory_format=torch.channels_last).requires_grad_()
    y = ops.group_norm(x, 2, None, None, 1e-5, None)[0]
    assert y.is_contiguous(memory_format=torch.channels_last)
    (dx,) = torch.autograd.grad(y, x, torch.randn(2, 4, 3, 5))
    assert dx.is_contiguous(memory_format=torch.channels_last)
    count, mean, m2 = ops.moments(x, [0, 2, 3], None)
    assert ops.affine(x, mean, m2 / count, None, None, 1e-5, None, None, None).is_contiguous(
        memory_format=torch.channels_last
    )


def test_what_the_mask_drops_is_never_read() -> None:
    x = torch.tensor([[1.0, 2.0], [3.0, float("nan")], [float("inf"), 4.0]], requires_grad=True)
    mask = torch.tensor([[True, True], [True, False], [False, True]])
    count, mean, m2 = ops.moments(x, [0], mask)
    assert (count.tolist(), mean.tolist(), m2.tolist()) == ([2, 2], [2, 3], [2, 2])
    (mean.sum() + m2.sum()).backward()
    # ∂(mean + M2)/∂x = 1/2 + 2(x − mean) where the mask keeps
    assert x.grad.tolist() == [[-1.5, -1.5], [2.5, 0.0], [0.0, 2.5]]


def test_mask_weights_can_be_learned() -> None:
    x = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    w = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda w: ops.moments(x, [0], w), w)


def test_half_and_float32_weights_mix() -> None:
    x = torch.randn(4, 8).bfloat16().requires_grad_()
    w = torch.randn(8, requires_grad=True)
    y = ops.row_norm(x, 1, w, None, 1e-5, True, None)[0]
    y.sum().backward()
    assert (y.dtype, x.grad.dtype, w.grad.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
