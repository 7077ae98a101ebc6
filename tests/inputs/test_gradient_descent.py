"""The notes' claim: badly scaled inputs make gradient descent zigzag; standardized, it goes straight."""

from __future__ import annotations

import math

import numpy as np
import pytest

from musigma.inputs import Standardizer

TOLERANCE = 1e-6  # of the loss to be lost


def regression(scales: list[float], means: list[float]) -> tuple[np.ndarray, np.ndarray]:
    """y = x₀/scale₀ + ½·x₁/scale₁: features of like importance, in unlike units."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(500, len(scales))) * scales + means
    return x, ((x - x.mean(0)) / scales) @ [1.0, 0.5]


def descend(x: np.ndarray, y: np.ndarray) -> tuple[float, int, int]:
    """The condition number of the loss ‖xw − y‖²/2n, the steps gradient descent takes, and those it should.

    With the step 1/λ_max the error along eigenvector i shrinks by 1 − λ_i/λ_max a step, so what is left of
    the loss after t steps is Σ λ_i·c_i²·(1 − λ_i/λ_max)^2t: κ/2·ln(1/tolerance) steps for the slowest.
    """
    h, g = x.T @ x / len(x), x.T @ y / len(x)
    eigenvalues, vectors = np.linalg.eigh(h)
    best = np.linalg.solve(h, g)
    weights, steps = np.zeros_like(best), 0
    start = best @ h @ best
    while (weights - best) @ h @ (weights - best) > TOLERANCE * start:
        weights -= (h @ weights - g) / eigenvalues[-1]
        steps += 1
    shares, rates = eigenvalues * (vectors.T @ best) ** 2 / start, 1 - eigenvalues / eigenvalues[-1]
    low, high = 0, 10**7
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if shares @ rates ** (2 * middle) <= TOLERANCE else (middle + 1, high)
    return float(eigenvalues[-1] / eigenvalues[0]), steps, low


@pytest.mark.parametrize(
    ("scales", "means"),
    [([1.0, 100.0], [0.0, 0.0]), ([1.0, 100.0], [5.0, -300.0]), ([1.0, 1.0], [30.0, 30.0])],
)
def test_standardizing_saves_the_steps_the_condition_number_says(
    scales: list[float], means: list[float]
) -> None:
    x, y = regression(scales, means)
    kappa, steps, theory = descend(x, y)
    z = Standardizer().fit_transform(x)
    kappa_after, steps_after, theory_after = descend(z, y)
    assert abs(steps - theory) <= 1 + 1e-6 * theory  # rounding may move the last step
    assert abs(steps_after - theory_after) <= 1
    # two standardized features with correlation r: κ = (1 + |r|)/(1 − |r|)
    r = abs(np.corrcoef(x.T)[0, 1])
    assert kappa_after == pytest.approx((1 + r) / (1 - r), rel=1e-9)
    # the slow direction alone: the loss shrinks by (1 − 1/κ)² a step, and it held at most all of it
    assert steps <= math.ceil(kappa / 2 * math.log(1 / TOLERANCE))
    assert steps / steps_after > kappa / kappa_after / 10


def test_scales_of_1_and_100_cost_tens_of_thousands_of_steps() -> None:
    """The figures the guide quotes: κ = 10⁴, 4/5 of the loss in the slow direction, κ/2·ln(0.8·10⁶) steps."""
    x, y = regression([1.0, 100.0], [0.0, 0.0])
    kappa, steps, _ = descend(x, y)
    assert kappa == pytest.approx(1e4, rel=0.15)  # the sampling error of a ratio of two variances, 500 rows
    assert steps == pytest.approx(kappa / 2 * math.log(0.8 / TOLERANCE), rel=0.05)
    assert descend(Standardizer().fit_transform(x), y)[1] <= 10
