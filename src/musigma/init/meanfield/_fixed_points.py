"""Where the maps come to rest, how fast, and which weight variance is critical for a given bias."""

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

from musigma.init.meanfield._activations import Activation
from musigma.init.meanfield._critical import is_homogeneous
from musigma.init.meanfield._curve import Curve, curve_of
from musigma.init.meanfield._maps import check_positive, check_variances, correlation_map, next_variance
from musigma.init.meanfield._pairs import REACH, expect_product
from musigma.init.meanfield._partition import partition

# Steps in q at which a change of sign is looked for: two roots nearer than that may be missed.
_STEP = 2**0.25
_LARGEST, _SMALLEST = 1e12, 1e-8
# What the quadrature leaves of V(q) − q, relative to q.
_ROUNDING = 1e-9
# A slope that is 1 up to this has a depth scale of millions of layers: nothing can tell it from infinite.
_FLAT = 1e-7


class DepthScales(NamedTuple):
    """Layers over which a deviation shrinks by e: of the variance, and of two inputs' correlation.

    Example:
        >>> import torch, musigma as ms
        >>> ms.init.meanfield.depth_scales("relu", weight_var=2.0)
        DepthScales(signal=inf, correlation=inf)
    """

    signal: float
    correlation: float


def fixed_point(
    activation: Activation, *, weight_var: float, bias_var: float = 0.0, start: float = 1.0
) -> float:
    """The variance q* at which pre-activations come to rest in a deep net.

    Law: q* = σw²·E[φ(√q* z)²] + σb², the first solution in the direction in which the map moves `start`.

    Args:
        activation: φ: a name, (name, keywords), a callable or an activation module.
        weight_var: σw², the weights' variance times the fan-in, at least 0.
        bias_var: σb², at least 0.
        start: the first layer's variance, positive.

    Returns:
        q*: `start` itself where the map changes nothing (ReLU with σw² = 2), 0 where the signal dies out,
        inf where it grows without bound.

    Raises:
        ValueError: a variance is out of range; unknown name; φ not finite.
        TypeError: φ is not a fixed elementwise function.

    Example:
        >>> import torch, musigma as ms
        >>> fixed = ms.init.meanfield.fixed_point("relu", weight_var=1.0, bias_var=0.25)
        >>> round(fixed, 9)      # q = q/2 + 1/4
        0.5

    References:
        Poole et al. 2016, section 2.
    """
    check_variances(weight_var=weight_var, bias_var=bias_var)
    check_positive(start=start)
    return rest(curve_of(activation), weight_var, bias_var, start)


def rest(curve: Curve, weight_var: float, bias_var: float, start: float) -> float:
    """`fixed_point` of a curve, unchecked."""

    def gain(q: float) -> float:
        """(V(q) − q)/q, and 0 where the quadrature can't tell."""
        relative = next_variance(curve, q, weight_var, bias_var) / q - 1
        return 0.0 if abs(relative) <= _ROUNDING else relative

    moves = gain(start)
    if moves == 0.0:
        return start
    step = _STEP if moves > 0 else 1 / _STEP
    q, beyond = start, start * step
    while (there := gain(beyond)) * moves > 0:
        q, beyond = beyond, beyond * step
        if beyond > _LARGEST:
            return math.inf
        if beyond < _SMALLEST and next_variance(curve, 0.0, weight_var, bias_var) == 0.0:
            return 0.0
    if there == 0.0:
        return beyond
    return bisect(gain, q, beyond)


def bisect(function: Callable[[float], float], low: float, high: float) -> float:
    """A root between two points where the function has different signs, to the last bits or its first 0."""
    sign = function(low) > 0
    for _ in range(200):
        # False position would need fewer steps, and each costs milliseconds; bisection needs no care.
        middle = (low + high) / 2
        value = function(middle)
        if value == 0.0 or middle in (low, high):
            return middle
        low, high = (middle, high) if (value > 0) == sign else (low, middle)
    return (low + high) / 2


def depth_scales(activation: Activation, *, weight_var: float, bias_var: float = 0.0) -> DepthScales:
    """Over how many layers a deviation of the variance, and of the correlation of two inputs, shrinks by e.

    Law: ξ_q = −1/log V'(q*); ξ_c = −1/log χ where χ < 1 (inputs grow alike), else −1/log of the correlation
    map's slope σw²·E[φ'(z₁)φ'(z₂)] at its other fixed point c* < 1. A net trains to about 6 ξ_c layers.

    Args:
        activation: φ: a name, (name, keywords), a callable or an activation module.
        weight_var: σw², the weights' variance times the fan-in, at least 0.
        bias_var: σb², at least 0.

    Returns:
        (ξ_q, ξ_c) in layers; inf where a deviation does not shrink exponentially: ξ_c at χ = 1.

    Raises:
        ValueError: a variance is out of range; signals grow without bound; unknown name; φ not finite.
        TypeError: φ is not a fixed elementwise function.

    Example:
        >>> import torch, musigma as ms
        >>> scales = ms.init.meanfield.depth_scales("relu", weight_var=1.0, bias_var=0.25)
        >>> round(scales.signal * math.log(2), 6), round(scales.correlation * math.log(2), 6)
        (1.0, 1.0)

    References:
        Schoenholz et al. 2017, eqs. 9 and 11.
    """
    check_variances(weight_var=weight_var, bias_var=bias_var)
    curve = curve_of(activation)
    q = rest(curve, weight_var, bias_var, 1.0)
    if math.isinf(q):
        raise ValueError(
            f"depth scales need a variance that comes to rest, but that of {curve.label} grows without bound "
            f"at weight_var={weight_var:g}, bias_var={bias_var:g}; try a smaller weight_var"
        )
    # At 0 the slopes are those just above it.
    q = max(q, 1e-12)
    point = curve.point(q)
    chi = weight_var * point.slope_square
    if chi > 1 + _FLAT:
        chi = _slope_at_rest(curve, activation, q, weight_var, bias_var)
    return DepthScales(_scale(weight_var * point.square_rate), _scale(chi))


def _scale(slope: float) -> float:
    """−1/log|slope|."""
    size = abs(slope)
    if size >= 1 - _FLAT:
        return math.inf
    return -1 / math.log(size) if size > 0 else 0.0


def _slope_at_rest(
    curve: Curve, activation: Activation, q: float, weight_var: float, bias_var: float
) -> float:
    """Slope of the correlation map at its fixed point below 1, where the one at 1 is unstable."""

    def moves(c: float) -> float:
        away = correlation_map(activation, c, var=q, weight_var=weight_var, bias_var=bias_var) - c
        return 0.0 if abs(away) <= _ROUNDING else away

    # Between 0, where the map never falls, and 1, just below which it does.
    c = 0.0 if moves(0.0) <= 0.0 else bisect(moves, 0.0, 1 - 1e-3)
    pair, label, _ = curve.pair
    edges = partition(lambda z: pair(z)[1], q, REACH)
    return weight_var * expect_product(lambda z: pair(z)[1], edges, q, c, f"the slope of {label}")


def critical_weight_var(activation: Activation, bias_var: float = 0.0) -> float:
    """The weight variance at which gradients keep their size, for a given bias variance.

    Law: σw² = 1/E[φ'(√q z)²] with q from σb² = q − E[φ(√q z)²]/E[φ'(√q z)²]: the critical line χ = 1.
    Of several such q the smallest counts.

    Args:
        activation: φ: a name, (name, keywords), a callable or an activation module.
        bias_var: σb², at least 0.

    Returns:
        σw².

    Raises:
        ValueError: bias_var out of range; no q up to 10⁴ is critical with it (a ReLU's σb² is 0); unknown
            name; φ or φ' not finite.
        TypeError: φ is not a fixed elementwise function.

    Example:
        >>> import torch, musigma as ms
        >>> round(ms.init.meanfield.critical_weight_var("tanh", 0.05), 3)
        1.761

    References:
        Poole et al. 2016, figure 2; Schoenholz et al. 2017, section 3.
    """
    check_variances(bias_var=bias_var)
    curve = curve_of(activation)

    def excess(q: float) -> float:
        point = curve.point(q)
        if not 0 < point.slope_square < math.inf:
            return -math.inf
        away = q - point.square / point.slope_square - bias_var
        return 0.0 if abs(away) <= _ROUNDING * max(q, bias_var) else away

    if bias_var == 0.0 and is_homogeneous(activation):
        return 1 / curve.point(1.0).slope_square
    grid = [10 ** (k / 8) for k in range(-96, 33)]
    values = [excess(grid[0])]
    for low, high in itertools.pairwise(grid):
        if values[-1] == 0.0:
            return 1 / curve.point(low).slope_square
        values.append(excess(high))
        if values[-1] * values[-2] < 0 and math.isfinite(values[-2]):
            return 1 / curve.point(bisect(excess, low, high)).slope_square
    raise ValueError(
        f"no variance up to {grid[-1]:g} is critical for {curve.label} with bias_var={bias_var:g}: "
        f"χ = 1 would take {'less' if values[-1] < 0 else 'more'} bias; see `critical` for what can be had"
    )
