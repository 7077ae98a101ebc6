"""Any chunking, order or tree of merges gives the statistics of the whole, to the truth of exact sums."""

from __future__ import annotations

import copy
import math
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from musigma.inputs import Standardizer

EPS = np.finfo(np.float64).eps


def truth(values: list[float], weights: list[float] | None = None) -> tuple[float, float]:
    """Mean and biased variance in exact rational arithmetic, rounded once."""
    exact = [Fraction(v) for v in values]
    w = [Fraction(1)] * len(exact) if weights is None else [Fraction(v) for v in weights]
    total = sum(w)
    mean = sum(a * v for a, v in zip(w, exact, strict=True)) / total
    return float(mean), float(sum(a * (v - mean) ** 2 for a, v in zip(w, exact, strict=True)) / total)


def fit_in_chunks(x: Tensor, cuts: list[int]) -> Standardizer:
    s = Standardizer()
    edges = [0, *sorted(c % (len(x) + 1) for c in cuts), len(x)]
    for start, stop in pairwise(edges):
        s.partial_fit(x[start:stop])
    return s


@given(
    seed=st.integers(0, 2**31),
    n=st.integers(1, 200),
    cuts=st.lists(st.integers(0, 200), max_size=8),
    ratio=st.sampled_from([0.0, 1.0, 1e3, 1e6, 1e8]),
    scale=st.sampled_from([1e-30, 1.0, 1e12]),
    ordered=st.booleans(),
)
def test_any_chunking_is_the_truth(
    seed: int, n: int, cuts: list[int], ratio: float, scale: float, ordered: bool
) -> None:
    z = torch.randn(n, 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    x = (z + ratio) * scale
    if ordered:  # chunks with different means: the merge must not lose what lies between them
        x = x.sort(0).values
    s = fit_in_chunks(x, cuts)
    mean, var = truth(x[:, 0].tolist())
    # the mean is a float64, so ½ ulp of it; deviations and squares add a few ε each, n of them at most n·ε
    assert s.mean_.item() == pytest.approx(mean, rel=4 * EPS, abs=4 * EPS * math.sqrt(var))
    assert s.var_.item() == pytest.approx(var, rel=(n + 20) * EPS, abs=0)
    assert s.n_samples_seen_ == n


@given(data=st.data(), n=st.integers(1, 30))
def test_arbitrary_floats_and_missing(data: st.DataObject, n: int) -> None:
    finite = st.floats(-1e100, 1e100, allow_nan=False, allow_subnormal=False)
    column = data.draw(st.lists(st.one_of(st.just(math.nan), finite), min_size=n, max_size=n))
    cuts = data.draw(st.lists(st.integers(0, 30), max_size=4))
    s = fit_in_chunks(torch.tensor(column, dtype=torch.float64)[:, None], cuts)
    seen = [v for v in column if not math.isnan(v)]
    assert s.n_samples_seen_ == len(seen)
    if seen:
        mean, var = truth(seen)
        # a mean near 0 of large values keeps the error of the values
        assert s.mean_.item() == pytest.approx(mean, rel=1e-14, abs=4 * EPS * max(map(abs, seen)))
        # 60 ε·(spread between chunks)² at most, relative to a variance of at least 1/n of it
        assert s.var_.item() == pytest.approx(var, rel=1e-11, abs=0)
    else:
        assert math.isnan(s.mean_.item())


@given(data=st.data(), n=st.integers(1, 20))
def test_weighted_truth(data: st.DataObject, n: int) -> None:
    values = data.draw(st.lists(st.floats(-1e6, 1e6), min_size=n, max_size=n))
    weights = data.draw(st.lists(st.sampled_from([0.0, 1e-3, 0.5, 1.0, 3.0]), min_size=n, max_size=n))
    if sum(weights) == 0:
        weights[0] = 2.0
    x = torch.tensor(values, dtype=torch.float64)[:, None]
    s = Standardizer().fit(x, sample_weight=weights)
    mean, var = truth(values, weights)
    assert s.mean_.item() == pytest.approx(mean, rel=1e-14, abs=1e-9)
    # 1e-300: variances of denormal values have no relative precision
    assert s.var_.item() == pytest.approx(var, rel=1e-10, abs=1e-300)
    kept = torch.tensor(weights) > 0
    dropped = Standardizer().fit(x[kept], sample_weight=torch.tensor(weights, dtype=torch.float64)[kept])
    # the same numbers, added up in another order
    assert dropped.mean_.item() == pytest.approx(s.mean_.item(), rel=1e-14, abs=1e-9)
    assert dropped.var_.item() == pytest.approx(s.var_.item(), rel=1e-13, abs=1e-300)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_weight_zero_hides_any_value(bad: float) -> None:
    x = torch.tensor([[1.0], [bad], [4.0]])
    s = Standardizer().fit(x, sample_weight=[1.0, 0.0, 1.0])
    assert (s.mean_.item(), s.var_.item(), s.n_samples_seen_) == (2.5, 2.25, 2)
    m = Standardizer().fit(x, mask=torch.tensor([[True], [False], [True]]))
    assert (m.mean_.item(), m.var_.item(), m.n_samples_seen_) == (2.5, 2.25, 2)


def test_integer_weights_repeat_rows() -> None:
    x = torch.randn(30, 2, dtype=torch.float64)
    weights = torch.randint(0, 4, (30,))
    s = Standardizer().fit(x, sample_weight=weights)
    repeated = Standardizer().fit(x.repeat_interleave(weights, 0))
    torch.testing.assert_close(s.mean_, repeated.mean_, rtol=1e-14, atol=1e-15)
    torch.testing.assert_close(s.var_, repeated.var_, rtol=1e-13, atol=0)
    assert s.n_samples_seen_ == int(weights.sum())


def test_weights_and_mask_and_nan_together() -> None:
    x = torch.randn(40, 3, dtype=torch.float64)
    x[3, 0] = x[7, 2] = math.nan
    keep = torch.rand(40, 3) > 0.3
    weights = torch.rand(40, dtype=torch.float64)
    s = Standardizer()
    for rows in torch.arange(40).split(7):
        s.partial_fit(x[rows], sample_weight=weights[rows], mask=keep[rows])
    for j in range(3):
        rows = keep[:, j] & ~x[:, j].isnan()
        mean, var = truth(x[rows, j].tolist(), weights[rows].tolist())
        assert s.mean_[j].item() == pytest.approx(mean, rel=1e-13)
        assert s.var_[j].item() == pytest.approx(var, rel=1e-13)


def test_empty_and_all_nan_chunks_change_no_bit() -> None:
    x = torch.randn(50, 3) * 3 + 7
    s = Standardizer().fit(x)
    twin = copy.deepcopy(s)
    twin.partial_fit(x[:0]).partial_fit(torch.full((4, 3), math.nan)).partial_fit(x[:5], sample_weight=0.0)
    assert torch.equal(twin.mean_, s.mean_)
    assert torch.equal(twin.var_, s.var_)
    assert twin.n_samples_seen_ == s.n_samples_seen_
    first = Standardizer().partial_fit(x[:0]).partial_fit(torch.full((1, 3), math.nan)).partial_fit(x)
    assert torch.equal(first.mean_, s.mean_)
    assert torch.equal(first.scale_, s.scale_)


@given(seed=st.integers(0, 1000), shift=st.sampled_from([0.0, 1e3, 1e8]))
def test_merge_is_associative_and_commutative_up_to_rounding(seed: int, shift: float) -> None:
    x = torch.randn(60, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    x = x + shift * torch.tensor([1.0, -1.0], dtype=torch.float64)
    a, b, c = (Standardizer().fit(part) for part in (x[:7], x[7:8], x[8:]))
    nothing = Standardizer()
    whole = Standardizer().fit(x)
    for merged in (
        a.merge(b).merge(c),
        a.merge(b.merge(c)),
        c.merge(a, b),
        nothing.merge(b, a, nothing, c),
        b.merge(nothing, c, a),
    ):
        assert merged.n_samples_seen_ == 60
        torch.testing.assert_close(merged.mean_, whole.mean_, rtol=4 * EPS, atol=1e-15)
        torch.testing.assert_close(merged.var_, whole.var_, rtol=100 * EPS, atol=0)


def test_merge_leaves_its_parts_alone() -> None:
    a, b = Standardizer().fit(torch.randn(5, 2)), Standardizer().fit(torch.randn(6, 2))
    before = a.mean_.clone(), b.mean_.clone()
    merged = a.merge(b)
    merged.partial_fit(torch.randn(9, 2))
    assert (a.n_samples_seen_, b.n_samples_seen_, merged.n_samples_seen_) == (5, 6, 20)
    assert torch.equal(a.mean_, before[0])
    assert torch.equal(b.mean_, before[1])


def test_merge_refuses_other_features_and_axes() -> None:
    a = Standardizer().fit(torch.randn(5, 2))
    with pytest.raises(ValueError, match=r"the Standardizer to merge has 3 features.* 2 features"):
        a.merge(Standardizer().fit(torch.randn(5, 3)))
    with pytest.raises(ValueError, match="only the same axis can be merged: 1 and -1"):
        a.merge(Standardizer(axis=-1).fit(torch.randn(5, 2)))


def test_a_block_boundary_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays are read in blocks; weights, masks and images must be cut with them."""
    x = torch.randn(23, 3, 2, 2, dtype=torch.float64)
    weights, keep = torch.rand(23), torch.rand(23, 1, 2, 2) > 0.4
    whole = Standardizer().fit(x, sample_weight=weights, mask=keep)
    monkeypatch.setattr("musigma.inputs._arrays.BLOCK_VALUES", 50)
    pieces = Standardizer().fit(x.numpy(), sample_weight=weights, mask=keep)
    np.testing.assert_allclose(pieces.mean_, whole.mean_, rtol=1e-13)
    np.testing.assert_allclose(pieces.var_, whole.var_, rtol=1e-13)
    np.testing.assert_array_equal(pieces.transform(x.numpy()), pieces.transform(x).numpy())


@pytest.mark.parametrize("scale", [1e-320, 1e-300, 1e-160, 1e160, 1e307])
def test_squares_outside_float64(scale: float) -> None:
    """Squares of numbers below 1e-162 are 0: an absolute threshold in disguise."""
    x = torch.rand(100, 1, dtype=torch.float64) * scale
    s = Standardizer().fit([*x.split(7)])
    assert not s.constant_.item()
    # denormals near 1e-320 hold 3 digits
    torch.testing.assert_close(
        s.scale_ / scale, (x / scale).std(0, correction=0), rtol=1e-12 if scale > 1e-310 else 1e-2, atol=0
    )


def test_constant_chunk_before_a_tiny_spread() -> None:
    x = torch.cat([torch.zeros(5, 1), torch.full((1, 1), 3.0)]).double() * 1e-200
    s = Standardizer()
    for chunk in x.split(5):
        s.partial_fit(chunk)
    assert s.scale_.item() == pytest.approx(math.sqrt(5) / 6 * 3e-200, rel=1e-14, abs=0)


@pytest.mark.parametrize("array", [np.asarray, torch.as_tensor])
@pytest.mark.parametrize("base", [0, 2**53, 2**62, -(2**62), 2**62 - 2**40])
def test_integers_to_two_to_the_62(array: object, base: int) -> None:
    """float64 steps by 512 at 2⁶²: the spread would be gone."""
    offsets = [0, 1, 5, 1000, 123456]
    x = array(np.array([[base + o] for o in offsets], dtype=np.int64))  # type: ignore[operator]
    s = Standardizer()
    for i in range(len(offsets)):
        s.partial_fit(x[i : i + 1])
    mean, var = truth([float(o) for o in offsets])
    assert float(s.var_[0]) == pytest.approx(var, rel=1e-14)
    assert float(s.mean_[0]) == pytest.approx(base + mean, rel=EPS)
    expected = [(o - mean) / math.sqrt(var) for o in offsets]
    assert [float(v) for v in s.transform(x)[:, 0]] == pytest.approx(expected, rel=1e-6)


def test_integers_of_both_signs_do_not_wrap() -> None:
    x = torch.tensor([[2**62], [-(2**62)], [2**63 - 1], [-(2**63)]])
    _, var = truth([float(v) for v in x[:, 0].tolist()])
    s = Standardizer().fit(x)
    assert s.var_.item() == pytest.approx(var, rel=1e-14)
    assert s.mean_.item() == pytest.approx(-0.5, abs=512)


def test_unsigned_64_bit() -> None:
    x = np.array([[2**63 + 5], [2**63 + 9], [2**64 - 1]], dtype=np.uint64)
    mean, var = truth([float(2**63 + 5), float(2**63 + 9), float(2**64 - 1)])
    for given_as in (x, torch.from_numpy(x.copy())):
        s = Standardizer().fit(given_as)
        assert float(s.mean_[0]) == pytest.approx(mean, rel=1e-15)
        assert float(s.var_[0]) == pytest.approx(var, rel=1e-14)
        # (max − mean)/std of two equal values and one apart is √2
        assert float(s.transform(given_as)[2, 0]) == pytest.approx(math.sqrt(2), rel=1e-6)
