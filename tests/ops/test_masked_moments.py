"""The native moments under a mask, and over any dims: against the reference, for all layouts and masks."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import musigma as ms
from musigma import ops

pytestmark = pytest.mark.skipif(
    all(k.runs != "native" for k in ops.kernels()), reason="the native kernels are not built"
)

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# 2-D to 5-D; several parts along the batch and along the positions; more channels than a panel; odd tails
SHAPES = (
    (5,),
    (4, 3),
    (300, 17),
    (3, 300),
    (3, 4, 9),
    (2, 20, 3, 5),
    (70, 3, 7, 7),
    (2, 2, 9000),
    (2, 3, 2, 2, 2),
)
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def laid_out(x: Tensor, layout: str) -> Tensor:
    if layout == "channels last":
        return x.to(memory_format=FORMATS[x.dim()]) if x.dim() in FORMATS else x
    if layout == "transposed":
        return x.mT.contiguous().mT if x.dim() > 1 else x
    if layout == "sliced":  # every other value of something that must not be read
        apart = torch.full((*x.shape[:-1], 2 * x.shape[-1]), torch.nan, dtype=x.dtype)
        apart[..., ::2] = x
        return apart[..., ::2]
    return x


def masks(shape: tuple[int, ...], generator: torch.Generator) -> list[Tensor]:
    """Boolean and weights: one an example, one a position, one a channel, one a value, one for all."""
    ones = (1,) * (len(shape) - 2)
    kinds = {shape, (shape[0], *(1,) * (len(shape) - 1)), shape[-1:], (1,) * len(shape), ()}
    if len(shape) > 1:
        kinds |= {(shape[0], 1, *shape[2:]), (1, shape[1], *ones), (*shape[:2], *ones)}
    kept = [torch.rand(kind, generator=generator) > 0.4 for kind in sorted(kinds)]
    return kept + [k * (torch.rand(k.shape, generator=generator) + 0.5) for k in kept]


def assert_like_the_reference(x: Tensor, dims: list[int], mask: Tensor | None, seed: int = 1) -> None:
    x = x.detach().requires_grad_()
    generator = torch.Generator().manual_seed(seed)
    got = ops.moments(x, dims, mask)
    up = [torch.randn(got[1].shape, generator=generator, dtype=torch.float64) for _ in range(2)]
    (dx,) = torch.autograd.grad((got[1] * up[0] + got[2] * up[1]).sum(), x)
    with ops.use_kernels("reference"):
        want = ops.moments(x, dims, mask)
        (dx_want,) = torch.autograd.grad((want[1] * up[0] + want[2] * up[1]).sum(), x)
    for a, b in zip(got, want, strict=True):
        # Two orders of a sum in float64 differ by its eps for each of a few roundings; values reach 10.
        assert_close(a, b, rtol=1e-13, atol=1e-12)
    unit = torch.finfo(x.dtype).eps
    assert dx.dtype == x.dtype
    assert dx.stride() == dx_want.stride()
    assert (dx - dx_want).abs().max() <= 2 * unit * dx_want.abs().max()
    if mask is not None:
        assert not dx[(mask == 0).expand(x.shape)].any()


@pytest.mark.parametrize("layout", ["contiguous", "channels last", "transposed", "sliced"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_a_mask_drops_may_be_anything(shape: tuple[int, ...], layout: str) -> None:
    """Every kind of mask over the dims that layers reduce; NaN and inf stand in what is dropped."""
    generator = torch.Generator().manual_seed(0)
    last, rows = [len(shape) - 1], [0, *range(2, len(shape))]
    for k, mask in enumerate(masks(shape, generator)):
        dtype = DTYPES[k % 4]
        x = torch.randn(shape, generator=generator).add(3).to(dtype)
        bad = torch.tensor([torch.nan, torch.inf])[torch.arange(x.numel()).reshape(shape) % 2].to(dtype)
        x = laid_out(torch.where(mask != 0, x, bad), layout)
        for dims in (rows, last, list(range(len(shape)))):
            assert_like_the_reference(x, dims, mask)


@pytest.mark.parametrize("layout", ["contiguous", "channels last", "transposed", "sliced"])
def test_any_dims_are_reduced_natively(layout: str) -> None:
    """Kept dims side by side in memory or not: with a mask and without."""
    generator = torch.Generator().manual_seed(0)
    x = laid_out(torch.randn(3, 4, 5, 6, generator=generator) + 3, layout)
    mask = torch.rand(3, 1, 5, 1, generator=generator) > 0.3
    for size in range(1, 5):
        for dims in itertools.combinations(range(4), size):
            assert_like_the_reference(x, list(dims), None)
            assert_like_the_reference(x, list(dims), mask)


def reference_calls(*args: object) -> int:
    """How often a call of moments comes to the reference."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        ops.moments(*args)
    return sum(event.name.endswith("_reference") for event in profile.events())


@pytest.mark.parametrize("dims", [[0, 1, 2, 3], [3], [2, 3], [0, 2, 3], [0], [1], [1, 3]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.int64], ids=str)
def test_no_float64_copy_of_the_input_is_made(dims: list[int], dtype: torch.dtype) -> None:
    x = torch.randint(0, 9, (3, 4, 5, 6)).to(dtype)
    for mask in (None, torch.ones(3, 1, 5, 1, dtype=torch.bool)):
        assert reference_calls(x, dims, mask) == 0
    assert reference_calls(torch.empty(0, 3), [0], None) == 1  # so that the count is known to count


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool]
)
def test_integers_do_not_overflow(dtype: torch.dtype) -> None:
    high = 1 if dtype is torch.bool else min(torch.iinfo(dtype).max, 2**53)
    x = torch.tensor([[high, high, 0], [high, 0, 0]]).to(dtype)
    got = ms.moments(x, 0)
    assert got.mean.tolist() == [high, high / 2, 0]
    assert got.m2.tolist() == pytest.approx([0, high * high / 2, 0], rel=2.3e-16, abs=0)  # one rounding


@pytest.mark.parametrize("ratio", [1e2, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_mean_far_from_zero_costs_no_digits(ratio: float, dtype: torch.dtype) -> None:
    """Against exact integers: values around a mean of `ratio` spreads, a third of them dropped."""
    x = torch.arange(1200).remainder(7).reshape(60, 4, 5) + int(ratio) * 2
    mask = torch.arange(60 * 5).remainder(3).ne(1).reshape(60, 1, 5)
    got = ms.moments(x.to(dtype), (0, 2), mask=mask)
    kept = x.transpose(1, 2)[mask.squeeze(1)]  # (count, 4), integers
    n, total, squares = len(kept), kept.sum(0), (kept * kept).sum(0)
    assert got.count.tolist() == [n] * 4
    # one rounding of the mean, in float64; and M2 to a few of its own
    assert_close(got.mean, total.double() / n, rtol=2.3e-16, atol=0)
    assert_close(
        got.m2, (squares * n - total * total).double() / n, rtol=1e-14 if ratio < 1e3 else 1e-13, atol=0
    )


def test_a_channel_of_equal_values_has_m2_zero_whatever_its_weights() -> None:
    x = torch.full((40, 3, 5), 0.1)
    weights = torch.rand(40, 3, 5, generator=torch.Generator().manual_seed(0))
    got = ms.moments(x, (0, 2), mask=weights)
    assert got.m2.tolist() == [0.0, 0.0, 0.0]
    assert got.mean.tolist() == [x[0, 0, 0].item()] * 3


def test_parts_of_which_nothing_is_kept_change_nothing() -> None:
    """The first and the last of many parts are dropped, and one channel wholly."""
    generator = torch.Generator().manual_seed(0)
    for shape, rows, values in (((1000, 3), slice(300, 330), ...), ((2, 3, 30_000), 1, slice(9_000, 9_050))):
        x, keep = torch.randn(shape, generator=generator), torch.zeros(shape, dtype=torch.bool)
        keep[rows, :2, values] = True
        values = torch.where(keep, x, torch.nan)
        got = ms.moments(values, [d for d in range(x.dim()) if d != 1], mask=keep)
        want = [x.movedim(1, 0)[c][keep.movedim(1, 0)[c]].double() for c in range(2)]
        assert got.count.tolist() == [len(want[0]), len(want[1]), 0]
        assert_close(got.mean, torch.stack([*(w.mean() for w in want), torch.zeros(()).double()]))
        assert_close(got.m2[:2] / got.count[:2], torch.stack([w.var(correction=0) for w in want]))
        assert got.m2[2] == 0


def test_the_number_of_threads_changes_no_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 40, 50, generator=generator)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            results.append(ops.moments(x, [0, 2], x[:, :1] > 0))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert_close(other, results[0], rtol=0, atol=0)


def test_masks_that_do_not_fit_are_refused_as_by_the_reference() -> None:
    for sample in ops.OPS["moments"].error_samples():
        with pytest.raises(sample.error, match=sample.match):
            ops.moments(*sample.args)


def test_weights_may_be_of_any_real_dtype() -> None:
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    counts = torch.tensor([0, 1, 2, 3, 0, 1])[:, None]
    want = ms.moments(x.repeat_interleave(counts[:, 0], 0), 0)
    for dtype in (torch.int64, torch.uint8, torch.float16, torch.bfloat16, torch.float32, torch.float64):
        got = ms.moments(x, 0, mask=counts.to(dtype))
        assert_close((got.mean, got.m2), (want.mean, want.m2), rtol=1e-13, atol=1e-13)
        assert got.count.tolist() == [7.0] * 3
