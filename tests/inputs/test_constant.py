"""What counts as constant: an error bound relative to the feature, not a threshold."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from musigma.inputs import Standardizer

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


VALUES = [0.0, 0.1, -7.3e-5, 14.62, 1e4, math.log(1e-5), 3.3333333e7, -7.3e9, 1e300, 5e-324]
HELD = [(d, v) for d in FLOATS for v in VALUES if torch.tensor(v, dtype=torch.float64).to(d).isfinite()]


@pytest.mark.parametrize(("dtype", "value"), HELD)
@pytest.mark.parametrize("chunk", [1, 7, 20])
def test_equal_values_become_exactly_zero(dtype: torch.dtype, value: float, chunk: int) -> None:
    x = torch.full((20, 1), value, dtype=torch.float64).to(dtype)
    s = Standardizer()
    for part in x.split(chunk):
        s.partial_fit(part)
    assert s.constant_.item()
    assert (s.var_.item(), s.scale_.item(), s.mean_.item()) == (0.0, 1.0, x[0, 0].item())
    assert torch.equal(s.transform(x), torch.zeros_like(x))
    assert torch.equal(s.layer()(x), torch.zeros_like(x))
    assert torch.equal(s.inverse_transform(torch.zeros_like(x)), x)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64, torch.bool])
def test_equal_integers(dtype: torch.dtype) -> None:
    s = Standardizer().fit(torch.ones(10, 2).to(dtype))
    assert s.constant_.tolist() == [True, True]
    assert s.transform(torch.ones(1, 2).to(dtype)).tolist() == [[0.0, 0.0]]


def test_one_example_is_constant() -> None:
    s = Standardizer().fit(torch.tensor([[3.0, -2.0]]))
    assert s.constant_.tolist() == [True, True]
    assert s.transform(torch.tensor([[5.0, -2.0]])).tolist() == [[2.0, 0.0]]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("value", [0.1, 0.75, 1.5, 100.3, 3e-4, 1000.1])
def test_a_rounded_constant_lands_on_two_neighbours(dtype: torch.dtype, value: float) -> None:
    """0.1 + 0.2 and 0.3 are one ulp apart; scaled to std 1 that rounding error would be a feature."""
    low = torch.tensor(value, dtype=torch.float64).to(dtype)
    high = torch.nextafter(low, torch.tensor(math.inf, dtype=dtype))
    for share in (1, 2, 5):
        x = torch.where((torch.arange(10) < share)[:, None], low, high)
        s = Standardizer().fit(x)
        assert s.var_.item() > 0
        assert s.constant_.item()
        assert s.scale_.item() == 1.0
        # what is left is half the rounding error, not a number of the size of 1
        assert s.transform(x).abs().max().item() <= (high - low).item()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_three_numbers_apart_is_a_feature(dtype: torch.dtype) -> None:
    """Two values that are 2 ulp apart have a standard deviation of 1 ulp: twice the bound.

    (A float64 column may also have the accumulated error of whoever computed it: the next test.)
    """
    low = torch.tensor(100.0, dtype=dtype)
    high = low
    for _ in range(2):
        high = torch.nextafter(high, torch.tensor(math.inf, dtype=dtype))
    x = torch.where((torch.arange(10) % 2 == 0)[:, None], low, high)
    s = Standardizer().fit(x)
    assert not s.constant_.item()
    assert s.scale_.item() == pytest.approx((high.double() - low.double()).item() / 2)


@pytest.mark.parametrize("n", [10, 100, 10_000])
@pytest.mark.parametrize("average", [1e-10, 1.0, 1e10])
def test_the_verdict_is_that_of_scikit_learn_on_ten_rows_whatever_their_number(
    n: int, average: float
) -> None:
    """scikit-learn's bound is n·ε·mean, the error of its own mean; ours has none that grows with n."""
    preprocessing = pytest.importorskip("sklearn.preprocessing")
    scales = np.array([10.0**i for i in range(-30, 20)])
    x = np.empty((n, len(scales)))
    x[: n // 2], x[n // 2 :] = average + scales, average - scales
    ours = Standardizer().fit(x)
    theirs = preprocessing.StandardScaler().fit(x[n // 2 - 5 : n // 2 + 5])
    np.testing.assert_allclose(ours.scale_, theirs.scale_, rtol=1e-7)
    many = preprocessing.StandardScaler().fit(x)
    assert (many.scale_[ours.constant_] == 1).all()  # it never divides by what we don't


@pytest.mark.parametrize("ratio", [1e6, 1e8])
def test_an_honest_feature_far_from_zero(ratio: float) -> None:
    x = torch.randn(100_000, 1, dtype=torch.float64) + ratio
    s = Standardizer().fit(x)
    assert not s.constant_.item()
    assert s.transform(x).std().item() == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize(
    ("mean", "spread"), [(1.7e12, 100.0), (1.7e12, 1.0), (1e9, 0.1), (-1e9, 1e-4), (1e-3, 1e-13)]
)
@pytest.mark.parametrize("chunk", [1_000_000, 300_000])
def test_many_rows_do_not_make_an_honest_feature_constant(mean: float, spread: float, chunk: int) -> None:
    """C71's relative: time stamps in milliseconds as float64. n·ε·mean would be 370 s for a million."""
    noise = torch.randn(1_000_000, 1, dtype=torch.float64)
    x = mean + spread * noise
    s = Standardizer()
    for part in x.split(chunk):
        s.partial_fit(part)
    assert not s.constant_.item()
    # exact: x − mean has no rounding error (Sterbenz)
    assert s.scale_.item() == pytest.approx((x - mean).std(correction=0).item(), rel=1e-10)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e12])
def test_one_value_computed_in_several_ways_is_constant(scale: float) -> None:
    """0.1, 0.3/3, 1 − 0.9 and a sum of ten hundredths are four numbers, up to 2 ulp apart."""
    ways = torch.tensor([0.1, 0.3 / 3, 1 - 0.9, sum([0.01] * 10)], dtype=torch.float64)
    assert len(set(ways.tolist())) >= 3
    for n in (4, 400, 400_000):
        s = Standardizer().fit((ways * scale).repeat(n // 4)[:, None])
        assert s.var_.item() > 0
        assert s.constant_.item()


def test_float32_at_a_million_standard_deviations() -> None:
    x = (torch.randn(10_000, 1, dtype=torch.float64) + 1e6).float()
    assert not Standardizer().fit(x).constant_.item()


def test_nanosecond_time_stamps_are_no_constant() -> None:
    """Integers are exact: an error bound of 10⁴·ε·mean would be 4 ms here."""
    x = (1_700_000_000_000_000_000 + torch.randint(0, 1000, (10_000, 1))).to(torch.int64)
    s = Standardizer().fit(x)
    assert not s.constant_.item()
    assert s.scale_.item() == pytest.approx(1000 / math.sqrt(12), rel=0.02)


def test_a_billion_values_do_not_widen_the_bound() -> None:
    """n·ε·mean with n = 10⁹ would call 10⁷ standard deviations constant. 10⁹ rows by doubling 30 times."""
    s = Standardizer().fit(torch.tensor([[1e7 - 1], [1e7 + 1]], dtype=torch.float64))
    for _ in range(30):
        s = s.merge(s)
    assert s.n_samples_seen_ == 2**31
    assert s.scale_.item() == pytest.approx(1.0, rel=1e-14)
    assert not s.constant_.item()


def test_an_outlier_seen_first_hides_nothing() -> None:
    """The pivot is the first value; were it far away, deviations would be rounded to its size."""
    x = torch.cat([torch.full((1, 1), 1e12), torch.randn(999, 1)]).double()
    s = Standardizer().fit(x)
    assert s.scale_.item() == pytest.approx(x.std(0, correction=0).item(), rel=1e-12)


def test_a_feature_becomes_variable_when_it_varies() -> None:
    s = Standardizer().fit(torch.ones(100, 1))
    assert s.constant_.item()
    s.partial_fit(torch.tensor([[2.0]]))
    assert not s.constant_.item()
    assert s.scale_.item() == pytest.approx(10 / 101, rel=1e-14)


def test_constant_padding_pixel_and_clip() -> None:
    """The keras failure on images: a corner that is 0 in training, 255 once in production."""
    images = torch.randint(0, 256, (50, 1, 4, 4), dtype=torch.uint8)
    images[:, :, 0, 0] = 0
    s = Standardizer(axis=(1, 2, 3), clip=8.0).fit(images)
    odd = images[:1].clone()
    odd[..., 0, 0] = 255
    assert s.transform(odd)[0, 0, 0, 0].item() == 8.0
    assert Standardizer(axis=(1, 2, 3)).fit(images).transform(odd)[0, 0, 0, 0].item() == 255.0
    assert s.constant_[0, 0, 0].item()
    assert int(s.constant_.sum()) == 1
    assert torch.equal(s.layer()(odd), s.transform(odd))
