"""Standardizer: the public failures of area `standardize`, and their relatives."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import musigma as ms
from musigma.inputs import Standardizer

NAN = float("nan")
EPS = torch.finfo(torch.float64).eps


def test_long_float32_column_keeps_its_mean() -> None:
    """C65: 6e6 values 1000 + U(0, 1); float32 sums give a mean of 1000.47 and a variance of 65."""
    generator = torch.Generator().manual_seed(0)
    s, parts = Standardizer(), []
    for _ in range(60):
        x = 1000 + torch.rand(100_000, 1, generator=generator)
        parts.append((x.double() - 1000).sum().item())
        s.partial_fit(x)
    # 1000 + a sum of exact float64 numbers around ½: the truth to 1e-13
    assert s.mean_.item() == pytest.approx(1000 + math.fsum(parts) / 6e6, abs=1e-12)
    assert s.mean_.item() == pytest.approx(1000.5, abs=5e-4)  # 4σ of the sample mean
    assert s.var_.item() == pytest.approx(1 / 12, abs=2e-4)
    assert s.n_samples_seen_ == 6_000_000


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [10.0, 60000.0])
def test_half_sums_would_overflow(dtype: torch.dtype, value: float) -> None:
    """C66: 10,000 halves of 10 sum past 65504."""
    x = torch.full((10_000, 1), value).to(dtype)
    s = Standardizer()
    for chunk in x.split(100):
        s.partial_fit(chunk)
    assert s.mean_.item() == x[0, 0].item()
    assert s.var_.item() == 0.0
    z = s.transform(x)
    assert z.dtype == dtype
    assert torch.equal(z, torch.zeros_like(x))


@pytest.mark.parametrize("sizes", [(2, 5), (5, 2), (1, 6), (6, 1), (0, 7), (7, 0), (1, 0, 6), (3, 3, 1)])
def test_chunks_of_unequal_size(sizes: tuple[int, ...]) -> None:
    """C68: a count ratio in integers is 0 when the second chunk is larger."""
    x = torch.tensor([1.0, 3.0, 2.0, 4.0, 9.0, -1.0, 6.0])[:, None]
    s = Standardizer()
    for chunk in x.split(list(sizes)):
        s.partial_fit(chunk)
    assert s.var_.item() == pytest.approx(9.387755102040815, rel=1e-14)
    assert s.mean_.item() == pytest.approx(24 / 7, rel=1e-15)


def test_nan_is_counted_per_column_and_kept() -> None:
    """C69: an all-NaN chunk and an all-NaN column poison nothing."""
    chunks = [
        torch.tensor([[1.0, NAN, 5.0], [3.0, NAN, NAN]]),
        torch.tensor([[NAN, NAN, NAN]]),
        torch.tensor([[5.0, NAN, 7.0], [7.0, NAN, NAN]]),
    ]
    s = Standardizer()
    for chunk in chunks:
        s.partial_fit(chunk)
    assert s.n_samples_seen_.tolist() == [4, 0, 2]
    assert s.mean_.tolist() == pytest.approx([4, NAN, 6], nan_ok=True)
    assert s.var_.tolist() == pytest.approx([5, NAN, 1], nan_ok=True)
    z = s.transform(torch.cat(chunks))
    assert torch.equal(z.isnan()[:, [0, 2]], torch.cat(chunks).isnan()[:, [0, 2]])
    with pytest.raises(ValueError, match="feature 1 had no value"):
        s.layer()


@pytest.mark.parametrize("scale", [1e-30, 1e-15, 1e-8, 1.0, 1e12, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_small_units_are_not_constant(scale: float, dtype: torch.dtype) -> None:
    """C71: no absolute variance threshold."""
    x = (torch.randn(500, 2, dtype=torch.float64) * scale).to(dtype)
    z = Standardizer().fit_transform(x)
    assert z.dtype == dtype
    torch.testing.assert_close(
        z.double().std(0, correction=0), torch.ones(2, dtype=torch.float64), rtol=1e-6, atol=0
    )


def test_unseen_value_of_a_constant_feature_is_not_blown_up() -> None:
    """C72: dividing by an epsilon gives 2549999872."""
    train = torch.zeros(100, 2)
    train[:, 1] = torch.arange(100.0)
    s = Standardizer().fit(train)
    assert s.constant_.tolist() == [True, False]
    assert s.transform(torch.tensor([[255.0, 49.5]])).tolist() == [[255.0, 0.0]]
    assert s.layer()(torch.tensor([[255.0, 49.5]])).tolist() == [[255.0, 0.0]]
    assert Standardizer(clip=10.0).fit(train).transform(torch.tensor([[255.0, 49.5]])).tolist() == [
        [10.0, 0.0]
    ]


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32]
)
def test_integers_are_promoted_before_squaring(dtype: torch.dtype) -> None:
    """C74: uint8 squares wrap and the variance comes out negative."""
    x = torch.tensor([0, 50, 100, 150, 200, 250]).to(dtype)[:, None]
    s = Standardizer().fit(x)
    assert s.mean_.item() == 125.0
    assert s.scale_.item() == pytest.approx(85.39125638299666, rel=1e-15)
    assert s.transform(x).dtype == torch.float32


def test_integer_image_becomes_float() -> None:
    """C75: the result must not be cut back to integers."""
    x = torch.arange(1, 7).reshape(1, 2, 3)
    expected = [-1.4639, -0.8783, -0.2928, 0.2928, 0.8783, 1.4639]
    z = Standardizer(axis=None).fit_transform(x)
    assert z.dtype == torch.float32
    assert z.flatten().tolist() == pytest.approx(expected, abs=5e-5)
    assert Standardizer(axis=None).fit_transform(x.numpy()).ravel().tolist() == pytest.approx(
        expected, abs=5e-5
    )


def test_near_constant_feature_far_from_zero() -> None:
    """C77: one float32 pass gives a negative variance and |z| of 4986."""
    x = torch.full((400, 1), -15.9424)
    x[17] += 0.05
    z = Standardizer().fit_transform(x)
    # one of n values apart stands at (n − 1)/√(n − 1)
    assert z.abs().max().item() == pytest.approx(math.sqrt(399), rel=1e-6)


@pytest.mark.parametrize(
    "weights", [[1.0, 1.0, -0.5], [1.0, NAN, 1.0], [0.0, 0.0, 0.0], [1.0, math.inf, 1.0]]
)
def test_bad_weights_are_refused(weights: list[float]) -> None:
    """C78: a negative weight makes a negative variance and a silent scale of 1."""
    x = torch.tensor([[1.0], [2.0], [10.0]])
    with pytest.raises(ValueError, match="weight"):
        Standardizer().fit(x, sample_weight=torch.tensor(weights))
    with pytest.raises(ValueError, match="weight"):
        Standardizer().fit(x.numpy(), sample_weight=np.array(weights))


def test_moments_are_the_house_s() -> None:
    x = torch.randn(63, 3)
    m, expected = Standardizer().fit(x).moments_, ms.moments(x, 0)
    torch.testing.assert_close(m.mean, expected.mean, rtol=1e-14, atol=1e-16)
    torch.testing.assert_close(m.m2, expected.m2, rtol=1e-13, atol=0)


def test_small_negative_int64_is_as_exact_as_float64() -> None:
    # the halves of −3 are −2³² and 2³² − 3: a mean added to either is rounded to 5e-7
    x = torch.tensor([[-3], [8], [8], [8], [17]])
    fitted = Standardizer().fit(x)
    assert abs(fitted.mean_.item() - 7.6) <= 2 * 2.0**-50  # two roundings of a number below 8
    exact = (x.double() - 7.6) / x.double().var(correction=0).sqrt()
    # float32 result: half a unit in its last place
    torch.testing.assert_close(fitted.transform(x).double(), exact, rtol=2.0**-23, atol=0.0)
    torch.testing.assert_close(fitted.layer()(x).double(), exact, rtol=2.0**-23, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64])
def test_large_64_bit_integers_beyond_float64(dtype: torch.dtype) -> None:
    x = torch.tensor([[2**62 + 1], [2**62 + 3], [2**62 + 5]]).to(dtype)
    fitted = Standardizer().fit(x)
    assert abs(fitted.var_.item() - 8 / 3) < 1e-15
    torch.testing.assert_close(
        fitted.transform(x).double().flatten(), torch.tensor([-1.5, 0.0, 1.5]).double().sign() * 1.5**0.5,
        rtol=2.0**-23, atol=0.0,
    )  # fmt: skip


def test_another_default_device_plays_no_part() -> None:
    x = torch.tensor([[1.0], [3.0]])
    with torch.device("meta"):
        fitted = Standardizer().fit(x)
    assert fitted.mean_.item() == 2.0
