"""Moments: merged however, they are those of the whole."""

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import musigma as ms
from musigma import Moments


def test_the_notes_example() -> None:
    m = ms.moments(torch.tensor([1.0, 2.0, 3.0]), 0)
    normalized = (torch.tensor([1.0, 2.0, 3.0]).double() - m.mean) * m.rstd()
    assert normalized.tolist() == pytest.approx([-1.2247, 0, 1.2247], abs=1e-4)
    assert m.var().item() == pytest.approx(2 / 3)
    assert m.var(correction=1).item() == pytest.approx(1)
    assert m.std().item() == pytest.approx(math.sqrt(2 / 3))
    assert m.rstd(eps=1.0).item() == pytest.approx(1 / math.sqrt(2 / 3 + 1))


def fsum_moments(values: Sequence[float]) -> tuple[float, float]:
    mean = math.fsum(values) / len(values)
    return mean, math.fsum((v - mean) ** 2 for v in values)


@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=8).filter(lambda s: sum(s) > 0),
    mean=st.sampled_from([0.0, 1.0, -1e4, 1e6]),
    scale=st.sampled_from([1e-30, 1e-3, 1.0, 1e30]),
    seed=st.integers(0, 1000),
)
def test_any_chunking_gives_the_moments_of_the_whole(
    sizes: list[int], mean: float, scale: float, seed: int
) -> None:
    g = torch.Generator().manual_seed(seed)
    x = (torch.randn(sum(sizes), generator=g, dtype=torch.float64) + mean) * scale
    merged = Moments.merge(ms.moments(chunk, 0) for chunk in x.split(sizes))
    true_mean, true_m2 = fsum_moments(x.tolist())
    # A merge rounds the mean to float64: an error of eps·|mean| a merge, whose square M2 sees n times; and
    # the truth's own squares are off by as much.
    off = 8 * 2.0**-52 * max(abs(true_mean), scale) * len(sizes)
    assert merged.count == len(x)
    assert abs(merged.mean.item() - true_mean) <= off
    assert abs(merged.m2.item() - true_m2) <= 1e-12 * true_m2 + len(x) * off * (off + 10 * scale)


@given(seed=st.integers(0, 1000), sizes=st.lists(st.integers(0, 9), min_size=3, max_size=3))
def test_merging_is_associative_and_commutative_up_to_rounding(seed: int, sizes: list[int]) -> None:
    g = torch.Generator().manual_seed(seed)
    a, b, c = (ms.moments(torch.randn(n, 2, generator=g).double() + 3, 0) for n in sizes)
    for one, other in (((a + b) + c, a + (b + c)), (a + b, b + a)):
        torch.testing.assert_close(one.count, other.count)
        torch.testing.assert_close(one.mean, other.mean, rtol=1e-14, atol=1e-14)
        torch.testing.assert_close(one.m2, other.m2, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("first", "second"), [(2, 5), (5, 2), (1, 6), (0, 7), (7, 0)])
def test_counts_of_any_order_of_size(first: int, second: int) -> None:
    # C68: scikit-learn 0.22 divided the counts as integers
    x = torch.tensor([1.0, 3.0, 2.0, 4.0, 9.0, -1.0, 6.0], dtype=torch.float64)
    merged = ms.moments(x[:first], 0) + ms.moments(x[first : first + second], 0)
    assert merged.var().item() == pytest.approx(9.387755102040815, rel=1e-12)


def test_the_empty_set_is_the_identity_of_merging() -> None:
    empty, some = ms.moments(torch.empty(0, 3), 0), ms.moments(torch.randn(4, 3), 0)
    assert empty.count == 0
    assert empty.var().isnan().all()
    for merged in (empty + some, some + empty):
        assert torch.equal(merged.mean, some.mean)
        assert torch.equal(merged.m2, some.m2)
    assert (empty + empty).count == 0
    assert not (empty + empty).mean.isnan().any()
    with pytest.raises(ValueError, match="at least one part"):
        Moments.merge([])


def test_variance_without_freedom_is_nan() -> None:
    m = ms.moments(torch.tensor([5.0]), 0)
    assert m.var() == 0
    assert m.var(correction=1).isnan()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_integers_are_promoted_before_they_are_squared(dtype: torch.dtype) -> None:
    # C74: uint8 squares wrap
    top = min(torch.iinfo(dtype).max, 2**40)
    x = torch.tensor([0, top // 5, top // 2, top], dtype=dtype)
    want = x.double()
    assert ms.moments(x, 0).mean == want.mean()
    assert ms.moments(x, 0).var().item() == pytest.approx(want.var(correction=0).item(), rel=1e-14)


def test_booleans_and_halves() -> None:
    assert ms.moments(torch.tensor([True, False, True, True]), 0).mean == 0.75
    x = torch.full((10_000,), 10.0, dtype=torch.float16)  # C66: the sum is inf in half
    assert (ms.moments(x, 0).mean, ms.moments(x, 0).m2) == (10, 0)


@pytest.mark.parametrize("dim", [0, -1, (0, 2), (1,), None, ()])
@pytest.mark.parametrize("keepdim", [False, True])
def test_dims_follow_torch(dim: int | tuple[int, ...] | None, keepdim: bool) -> None:
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    m = ms.moments(x, dim, keepdim=keepdim)
    if dim == ():  # torch reads no dims as all of them; here no dims are no dims
        assert torch.equal(m.mean, x)
        assert m.count == 1
        return
    var, mean = torch.var_mean(x, dim, correction=0, keepdim=keepdim)
    torch.testing.assert_close(m.mean, mean)
    torch.testing.assert_close(m.var(), var)


def test_a_single_number_is_a_set_of_one() -> None:
    m = ms.moments(torch.tensor(3.5))
    assert (m.count, m.mean, m.m2) == (1, 3.5, 0)


def test_weights_equal_repetition_and_weight_zero_equals_dropping() -> None:
    x = torch.tensor([[1.0, 5.0], [2.0, 7.0], [10.0, float("nan")]])
    w = torch.tensor([[2.0], [3.0], [0.0]])
    weighted = ms.moments(x, 0, mask=w)
    repeated = ms.moments(x[[0, 0, 1, 1, 1]], 0)
    torch.testing.assert_close(weighted.mean, repeated.mean)
    torch.testing.assert_close(weighted.m2, repeated.m2)
    assert weighted.count.tolist() == [5, 5]


@pytest.mark.parametrize("bad", [-0.5, float("nan")])
def test_negative_and_nan_weights_are_refused(bad: float) -> None:
    # C78: a negative variance, silently
    with pytest.raises(ValueError, match=r"negative or NaN; got .* at \[2\]"):
        ms.moments(torch.tensor([1.0, 2.0, 10.0]), 0, mask=torch.tensor([1.0, 1.0, bad]))


def test_float32_sums_of_millions_of_values() -> None:
    # C65: a float32 sum gives mean 1000.47 and variance 65.56
    g = torch.Generator().manual_seed(0)
    parts = [1000 + torch.rand(2000, generator=g) for _ in range(500)]
    m = Moments.merge(ms.moments(p, 0) for p in parts)
    whole = torch.cat(parts).double()
    assert m.mean.item() == pytest.approx(whole.mean().item(), abs=1e-9)
    assert m.var().item() == pytest.approx((whole - 1000).var(correction=0).item(), abs=1e-9)


def test_a_set_of_equal_values_has_no_spread_at_all() -> None:
    for value in (0.1, 1e-30, -7.3e9, 14.62):
        for dtype in (torch.float32, torch.float64):
            m = ms.moments(torch.full((1001,), value, dtype=dtype), 0)
            assert m.m2 == 0
            assert m.mean == torch.tensor(value, dtype=dtype).double()


def test_bad_input_is_refused_by_name() -> None:
    x = torch.ones(2, 3)
    with pytest.raises(TypeError, match="real numbers"):
        ms.moments(x.to(torch.complex64), 0)
    with pytest.raises(IndexError, match="out of range"):
        ms.moments(x, 5)
    with pytest.raises(ValueError, match="broadcast"):
        ms.moments(x, 0, mask=torch.ones(5, dtype=torch.bool))
    with pytest.raises(ValueError, match="same sets"):
        _ = ms.moments(x, 0) + ms.moments(x, 1)
    with pytest.raises(ValueError, match="one shape"):
        Moments(torch.ones(()), torch.ones(2), torch.ones(3))
    with pytest.raises(TypeError):
        _ = ms.moments(x, 0) + 1


def test_gradients_flow_through_merging() -> None:
    x = torch.randn(7, 2, dtype=torch.float64, requires_grad=True)

    def split(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        m = Moments.merge(ms.moments(c, 0) for c in x.split([3, 0, 4]))
        return m.mean, m.rstd(1e-5)

    assert torch.autograd.gradcheck(split, x)


def test_without_a_process_group_all_reduce_is_the_identity() -> None:
    m = ms.moments(torch.randn(3), 0)
    assert m.all_reduce() is m


@pytest.mark.parametrize("bad", [-1, float("inf"), float("nan"), -1.0])
def test_impossible_weights_of_any_type_are_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="weights must be finite and not negative"):
        ms.moments(torch.ones(3), 0, mask=torch.tensor([1, bad, 1]))
