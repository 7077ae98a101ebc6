"""How far a finite width lets a layer's variance, and a gradient's, stray from the theory."""

import math
from typing import NamedTuple

from musigma.init.meanfield._curve import Curve


class Spread(NamedTuple):
    """n times the variance of log q (signal) and of the log of the gradient's ratio, over some depth."""

    signal: float
    gradient: float


def spread(curve: Curve, var: float, weight_var: float, bias_var: float, depth: int) -> Spread:
    """What chance of width n adds up to over a depth, to first order in 1/n, times n.

    Given a layer's q the next layer's n pre-activations are independent normals, so its q' is the mean of
    n independent terms: a relative variance (σw²E[φ²]/q')²·(E[φ⁴]/E[φ²]² − 1)/n, multiplied by the log
    slope of the variance map squared in every layer that follows. A gradient crosses the same layer with
    factor σw²·mean(φ'²) times a mean of n normals squared: (3·E[φ'⁴]/E[φ'²]² − 1)/n, plus what the strayed
    q does to χ. Both draw on the same z, hence the covariance.

    Args:
        curve: the activation's.
        var: q.
        weight_var: σw².
        bias_var: σb².
        depth: layers.

    Returns:
        The two variances times n; inf where they grow past any use.

    Raises:
        ValueError: φ⁴ has no expectation.

    Example:
        >>> from musigma.init.meanfield._curve import curve_of
        >>> spread(curve_of("relu"), 1.0, 2.0, 0.0, 50)      # 5 a layer, forward and backward
        Spread(signal=250.0, gradient=250.0)

    References:
        Hanin 2018 (ReLU's forward and backward moments at finite width).
    """
    point, fourth = curve.point(var), curve.fourth(var)
    after = weight_var * point.square + bias_var
    share = weight_var * point.square / after
    passed = var * weight_var * point.square_rate / after
    pull = var * point.slope_square_rate / point.slope_square
    noise = share**2 * (fourth.value - 1)
    slope_noise = 3 * fourth.slope - 1
    both = share * (fourth.cross - 1)
    signal = cross = gradient = 0.0
    for _ in range(depth):
        signal, cross, gradient = (
            passed**2 * signal + noise,
            passed * (cross + pull * signal) + both,
            gradient + 2 * pull * cross + pull**2 * signal + slope_noise,
        )
        if not signal + gradient < 1e100:
            return Spread(math.inf, math.inf)
    return Spread(signal, gradient)
