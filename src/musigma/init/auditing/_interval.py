"""How far the moments of n numbers may stray from those of the law they were drawn from."""

import math
from statistics import NormalDist

from musigma.init.schemes._scheme import Law


def critical_z(rate: float, tests: int) -> float:
    """The two-sided normal quantile at which `tests` judgements together err with probability `rate`.

    Formula: z = Φ⁻¹(1 − rate/(2·tests)) (Bonferroni).

    Args:
        rate: the probability of one false alarm or more, all judgements together.
        tests: how many judgements there are, at least 1.

    Returns:
        The quantile, in standard errors.

    Example:
        >>> round(critical_z(0.05, 1), 2), round(critical_z(1e-3, 300), 2)
        (1.96, 4.65)

    References:
        Dunn 1961, Multiple comparisons among means.
    """
    return NormalDist().inv_cdf(1 - rate / (2 * max(tests, 1)))


def std_interval(law: Law, count: int, z: float) -> tuple[float, float]:
    """Where the standard deviation of `count` independent numbers of a law lies, but for z standard errors.

    Formula: σ·(1 ± z·√((κ−1)/(4n))) for large n, with the law's kurtosis κ: the relative standard error of
    the sample variance is √((κ−1)/n), and a square root halves it. For small n the variance is skewed:
    it is taken as a Gamma variable with its first two moments, through Wilson and Hilferty's cube root.

    Args:
        law: the law, with its kurtosis.
        count: how many numbers, at least 1.
        z: the number of standard errors.

    Returns:
        Lower and upper end.

    Example:
        >>> low, high = std_interval(Law(0.0, 1.0), 10_000, 4.0)
        >>> round(low, 3), round(high, 3)
        (0.971, 1.028)

    References:
        Wilson & Hilferty 1931, The distribution of chi-square.
    """
    if law.kurtosis <= 1 or not law.var:
        return law.std, law.std  # two values at fixed places, or one: nothing is left to chance
    if count < 2:
        return 0.0, law.std * z
    # Var(s²)/σ⁴ about the sample's own mean, exactly; (κ−1)/n for large n.
    relative = (law.kurtosis - 3) / count + 2 / (count - 1)
    third = relative / 9
    low, high = (max(1 - third + sign * z * math.sqrt(third), 0.0) ** 1.5 for sign in (-1, 1))
    # Light tails make the variance less skewed than a Gamma variable: the symmetric interval reaches lower.
    low = min(low, math.sqrt(max(1 - z * math.sqrt(relative), 0.0)))
    return law.std * low * math.sqrt(1 - 1 / count), law.std * high


def mean_interval(law: Law, count: int, z: float) -> tuple[float, float]:
    """Where the mean of `count` independent numbers of a law lies, but for z standard errors.

    Formula: μ ± z·σ/√n.

    Args:
        law: the law.
        count: how many numbers, at least 1.
        z: the number of standard errors.

    Returns:
        Lower and upper end.

    Example:
        >>> mean_interval(Law(0.0, 1.0), 100, 4.0)
        (-0.4, 0.4)

    References:
        None.
    """
    reach = z * law.std / math.sqrt(count)
    return law.mean - reach, law.mean + reach
