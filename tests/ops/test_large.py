"""More than 2^31 values: every index is 64 bits wide. `make test-large`; at the most 18 GiB at a time."""

import gc

import pytest
import torch
from torch import Tensor

import musigma as ms
from native import BUILT

pytestmark = [
    pytest.mark.large,
    pytest.mark.skipif(not BUILT, reason="the promise is that of the native kernels"),
    pytest.mark.timeout(1800),
]

BEYOND = 2**31 + 2**21  # values; 4.3 GB of bfloat16


@pytest.fixture(autouse=True)
def plain_memory() -> None:
    """Without NaN in fresh memory, whose filling takes longer than the kernels."""
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.set_num_threads(2)
    gc.collect()
    ms.ops.empty_cache()


def pattern(rows: int, width: int) -> Tensor:
    """Rows of bfloat16, no two neighbours alike, made without a second tensor of their size."""
    g = torch.Generator().manual_seed(0)
    x = torch.empty(rows, width, dtype=torch.bfloat16)
    block = torch.randn(97, width, generator=g).to(torch.bfloat16)
    for begin in range(0, rows, 97):
        x[begin : begin + 97] = block[: min(97, rows - begin)]
    return x


def close(got: Tensor, want: Tensor) -> None:
    """To bfloat16's own rounding."""
    assert (got.double() - want).abs().max() <= 2**-8 * want.abs().max()


def reference(x: Tensor, dims: list[int]) -> tuple[Tensor, Tensor]:
    x = x.double()
    rstd = (x.var(dims, correction=0, keepdim=True) + 1e-5).rsqrt()
    return (x - x.mean(dims, keepdim=True)) * rstd, rstd


@pytest.mark.parametrize("width", [1024, 2**20])
def test_rows(width: int) -> None:
    rows = BEYOND // width
    x = pattern(rows, width)
    y = ms.functional.layer_norm(x, (width,))
    for row in (0, rows // 2, rows - 2, rows - 1):
        close(y[row], reference(x[row], [0])[0])


def test_the_backward_of_rows() -> None:
    width = 1024
    rows = BEYOND // width
    x = pattern(rows, width).requires_grad_()
    weight, bias = torch.ones(width, requires_grad=True), torch.zeros(width, requires_grad=True)
    y = ms.functional.layer_norm(x, (width,), weight, bias)
    dy = x.detach()[:, 1:2].clone().expand(rows, width)  # one value a row, without memory of its own
    dx, dweight, dbias = torch.autograd.grad(y, (x, weight, bias), dy)
    del y
    with torch.no_grad():
        for row in (0, rows // 2, rows - 1):
            # of a constant the mean is taken off, and x̂ is orthogonal to it: nothing is left but rounding
            scale = reference(x[row], [0])[1].squeeze() * dy[row, 0].double().abs()
            assert dx[row].double().abs().max() <= 2**-20 * scale
        assert torch.equal(dbias, dbias[:1].expand(width))
        terms = dy[:, 0].double()
        # what 16 float32 terms at a time round off, and the rounding of the result
        bound = 1e-6 * rows**0.5 * terms.std() + 2**-23 * terms.sum().abs()
        assert (dbias[0] - terms.sum()).abs() <= bound
        assert dweight.isfinite().all()


@pytest.mark.parametrize("last", [False, True])
def test_channels(last: bool) -> None:
    c, positions = 64, BEYOND // 128
    flat = pattern(BEYOND // 2**14, 2**14)
    x = flat.view(2, positions, 1, c).permute(0, 3, 1, 2) if last else flat.view(2, c, positions, 1)
    y = ms.functional.batch_norm(x, torch.zeros(c), torch.ones(c), eps=0.0)
    # the last channel's last values are the last in memory
    assert torch.equal(y[-1, -1, -64:], x[-1, -1, -64:])
    del y
    gc.collect()
    y = ms.functional.batch_norm(x, None, None, training=True)
    for channel in (0, c - 1):
        close(y[:, channel], reference(x[:, channel], [0, 1, 2])[0])
