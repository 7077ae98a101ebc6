"""The native affine under a mask: what the mask drops and is not finite counts as 0, forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from musigma import ops

pytestmark = pytest.mark.skipif(
    all(k.runs != "native" for k in ops.kernels()), reason="the native kernels are not built"
)

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# 2-D to 5-D, more rows than a block, an odd tail, one position
SHAPES = ((70, 17), (3, 4, 9), (2, 20, 3, 5), (5, 3, 1, 1), (1, 2, 9000), (2, 3, 2, 2, 2))
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def masks(shape: tuple[int, ...]) -> list[Tensor]:
    one_each = (1,) * (len(shape) - 2)
    kinds = ((shape[0], 1, *shape[2:]), (shape[0], 1, *one_each), (1, shape[1], *one_each), shape, shape[-1:])
    return [draw(*kind, seed=k) > -0.3 for k, kind in enumerate(kinds)]


@pytest.mark.parametrize("bad", [0.0, torch.nan, torch.inf], ids=str)
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels last"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_layout_and_mask_against_the_reference(shape: tuple[int, ...], last: bool, bad: float) -> None:
    """Values that are kept may be NaN too, and stay so; what is dropped and finite is normalized."""
    for k, mask in enumerate(masks(shape)):
        dtype = DTYPES[k % 4]
        x = torch.where((draw(*shape, seed=9) > 1) & ~mask, bad, draw(*shape) + 2).to(dtype)
        if last and len(shape) in FORMATS:
            x = x.to(memory_format=FORMATS[len(shape)])
        c = shape[1]
        statistics = draw(c, seed=1).double(), draw(c, seed=2).double().square() + 0.1
        add = draw(*shape, seed=3).to(dtype) if k % 2 else None
        weight, bias, act = (
            draw(c, seed=4).to(dtype),
            draw(c, seed=5).to(dtype),
            (None, "silu", "relu")[k % 3],
        )
        wanted = mask.float() * 1.5 if k % 2 else mask
        results = []
        for mode in ("auto", "reference"):
            leaves = [t.detach().requires_grad_() for t in (x, *statistics, weight, bias)]
            with ops.use_kernels(mode):
                y = ops.affine(*leaves, 1e-5, add, act, wanted)
                results.append((y, *torch.autograd.grad(y, leaves, draw(*shape, seed=6).to(dtype))))
        for got, want in zip(*results, strict=True):
            assert got.dtype == want.dtype
            assert got.shape == want.shape
            assert got.isfinite().all()
            # both rounded to the dtype, from sums whose last digits differ
            unit = max(torch.finfo(got.dtype).eps, torch.finfo(dtype).eps if got.dim() == 1 else 0.0)
            scale = want.double().abs().max() + (len(x) if got.dim() == 1 else 0)
            assert (got.double() - want.double()).abs().max() <= 4 * unit * scale
        assert not results[0][1][~mask.expand(shape) & ~x.isfinite()].any()


def test_what_is_kept_and_not_finite_is_seen() -> None:
    x = torch.tensor([[[1.0, torch.nan, 3.0], [4.0, 5.0, torch.inf]]])
    mask = torch.tensor([[[True, True, False]]])
    y = ops.affine(x, torch.zeros(2).double(), torch.ones(2).double(), None, None, 0.0, None, None, mask)
    torch.testing.assert_close(
        y, torch.tensor([[[1.0, torch.nan, 3.0], [4.0, 5.0, 0.0]]]), equal_nan=True, rtol=0, atol=0
    )


def test_the_input_is_not_written() -> None:
    x = torch.full((2, 3, 4), torch.nan)
    ops.affine(
        x, torch.zeros(3).double(), torch.ones(3).double(), None, None, 1e-5, None, None, torch.zeros(1) > 0
    )
    assert x.isnan().all()
