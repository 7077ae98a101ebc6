"""Orthogonal, delta-orthogonal and identity schemes: lengths are kept, exactly where that is promised."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from musigma.init import (
    blocks,
    delta_orthogonal_,
    dirac_,
    identity_,
    orthogonal_,
    sparse_,
)
from musigma.statistics import moments

# float64 QR is orthogonal to about 10·n·eps; float32 and half precision are that, rounded: an entry of
# size 1/√n is off by eps/2 of itself, and n of them add up at random.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-7, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def gram(w: Tensor) -> Tensor:
    """The smaller of W Wᵀ and Wᵀ W, in float64."""
    m = w.double().flatten(1)
    return m @ m.T if m.shape[0] <= m.shape[1] else m.T @ m


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 1), (1, 63), (63, 1), (100, 100), (30, 101), (101, 30), (16, 4, 3, 3), (8, 9, 1)], ids=str
)
def test_singular_values_equal_the_gain(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    w = orthogonal_(torch.empty(shape, dtype=dtype), gain=1.5, generator=torch.Generator().manual_seed(0))
    g = gram(w)
    assert torch.allclose(
        g, 2.25 * torch.eye(len(g), dtype=torch.float64), rtol=0, atol=2.25 * TOLERANCE[dtype]
    )


def test_half_precision_is_the_rounded_matrix() -> None:
    def make(dtype: torch.dtype) -> Tensor:
        return orthogonal_(torch.empty(20, 30, dtype=dtype), generator=torch.Generator().manual_seed(1))

    exact = make(torch.float64)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert torch.equal(make(dtype), exact.to(dtype))


def test_rotations_are_uniform_not_biased_by_the_algorithm() -> None:
    """LAPACK's QR alone gives a diagonal of one sign; the trace of a uniform 4×4 rotation is N(0, 1)-like."""
    g = torch.Generator().manual_seed(2)
    traces = torch.stack([orthogonal_(torch.empty(4, 4), generator=g).trace() for _ in range(2000)])
    m = moments(traces, None)
    assert abs(m.mean.item()) < 5 / 2000**0.5
    assert m.var().item() == pytest.approx(1.0, abs=5 * (2 / 2000) ** 0.5)


def test_a_thousand_layers_keep_the_length() -> None:
    g = torch.Generator().manual_seed(3)
    x = torch.randn(5, 32, generator=g, dtype=torch.float64)
    before = x.norm(dim=1)
    for _ in range(1000):
        x = x @ orthogonal_(torch.empty(32, 32, dtype=torch.float64), generator=g).T
    assert torch.allclose(x.norm(dim=1), before, rtol=1e-11)


@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize(("dims", "kernel"), [(1, 5), (2, 3), (3, 3)])
def test_delta_orthogonal_keeps_the_norm_under_circular_padding(dims: int, kernel: int, groups: int) -> None:
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    conv = kind(12, 18, kernel, groups=groups, padding=kernel // 2, padding_mode="circular", bias=False)
    conv = conv.double()
    delta_orthogonal_(conv.weight, groups=groups, generator=torch.Generator().manual_seed(4))
    x = torch.randn(3, 12, *[7] * dims, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    kept = conv(x).flatten(1).norm(dim=1) / x.flatten(1).norm(dim=1)
    assert torch.allclose(kept, torch.ones(3, dtype=torch.float64), rtol=1e-12)


def test_delta_orthogonal_with_fewer_outputs_keeps_the_gradient() -> None:
    conv = nn.Conv2d(18, 12, 3, padding=1, padding_mode="circular", bias=False).double()
    delta_orthogonal_(conv.weight, generator=torch.Generator().manual_seed(6))
    x = torch.randn(2, 18, 7, 7, dtype=torch.float64).requires_grad_()
    z = conv(x)
    upstream = torch.randn_like(z)
    z.backward(upstream)
    assert x.grad.norm().item() == pytest.approx(upstream.norm().item(), rel=1e-12)


def test_orthogonal_flattened_kernels_do_not_keep_it() -> None:
    """What the delta is for: the flattened kernel of an orthogonal convolution loses length."""
    conv = nn.Conv2d(12, 12, 3, padding=1, padding_mode="circular", bias=False)
    orthogonal_(conv.weight, generator=torch.Generator().manual_seed(7))
    x = torch.randn(3, 12, 7, 7, generator=torch.Generator().manual_seed(8))
    kept = (conv(x).flatten(1).norm(dim=1) / x.flatten(1).norm(dim=1)).detach()
    assert (kept - 1).abs().max() > 0.01


def test_groups_are_matrices_of_their_own() -> None:
    attention = nn.MultiheadAttention(12, 3)
    orthogonal_(attention.in_proj_weight, groups=3, generator=torch.Generator().manual_seed(9))
    pieces = blocks(attention, "in_proj_weight")
    assert list(pieces) == ["query", "key", "value"]
    for piece in pieces.values():
        assert torch.allclose(gram(piece), torch.eye(12, dtype=torch.float64), atol=2e-7)
    assert not torch.equal(pieces["query"], pieces["key"])

    whole = orthogonal_(torch.empty(36, 12), generator=torch.Generator().manual_seed(9))
    # Taken as one matrix each projection keeps a third of the mean square only.
    assert gram(whole[:12]).diagonal().mean().item() == pytest.approx(1 / 3, abs=0.1)


@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize(("dims", "kernel"), [(1, 1), (1, 3), (2, 5), (3, 3)])
def test_dirac_convolutions_copy_their_input(dims: int, kernel: int, groups: int) -> None:
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    conv = kind(8, 8, kernel, groups=groups, padding=kernel // 2, bias=False)
    dirac_(conv.weight, groups=groups)
    x = torch.randn(2, 8, *[6] * dims)
    assert torch.equal(conv(x), x)


@pytest.mark.parametrize("groups", [1, 4])
def test_dirac_transposed_convolutions_copy_their_input(groups: int) -> None:
    conv = nn.ConvTranspose2d(8, 8, 3, groups=groups, padding=1, bias=False)
    dirac_(conv.weight, groups=groups)
    x = torch.randn(2, 8, 5, 5)
    assert torch.equal(conv(x), x)


def test_identity_of_packed_gates() -> None:
    gru = nn.GRU(4, 4)
    identity_(gru.weight_hh_l0, groups=3, gain=0.5)
    for gate in blocks(gru, "weight_hh_l0").values():
        assert torch.equal(gate, 0.5 * torch.eye(4))


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("sparsity", [0.0, 0.3, 0.99, 1.0])
def test_every_line_has_the_same_number_of_zeros(dim: int, sparsity: float) -> None:
    import math

    w = sparse_(torch.empty(63, 40), sparsity=sparsity, dim=dim, generator=torch.Generator().manual_seed(10))
    size = w.shape[dim]
    assert bool(((w == 0).sum(dim) == math.ceil(sparsity * size)).all())
    if 0 < sparsity < 0.5:
        # ... in different places.
        assert len({tuple(line.tolist()) for line in (w == 0).unbind(1 - dim)}) > 30
