"""What one layer does to the variance of a signal, to the correlation of two, and to a gradient."""

import math

from musigma.init.meanfield._activations import Activation, resolve
from musigma.init.meanfield._curve import Curve, curve_of
from musigma.init.meanfield._pairs import REACH, expect_product
from musigma.init.meanfield._partition import partition


def variance_map(activation: Activation, var: float, *, weight_var: float, bias_var: float = 0.0) -> float:
    """Variance of the next layer's pre-activations, from that of this layer's.

    Law: q' = σw²·E[φ(√q z)²] + σb², z ~ N(0, 1); the weights have variance σw²/fan_in, the biases σb².

    Args:
        activation: φ: a name, (name, keywords), a callable or an activation module.
        var: q, at least 0.
        weight_var: σw², the weights' variance times the fan-in, at least 0.
        bias_var: σb², at least 0.

    Returns:
        q'.

    Raises:
        ValueError: a variance is negative or not finite; unknown name; φ not finite.
        TypeError: φ is not a fixed elementwise function.

    Example:
        >>> import torch, musigma as ms
        >>> ms.init.meanfield.variance_map("relu", 3.0, weight_var=2.0)      # He: kept
        3.0

    References:
        Poole et al. 2016, eq. 3.
    """
    check_variances(var=var, weight_var=weight_var, bias_var=bias_var)
    return next_variance(curve_of(activation), var, weight_var, bias_var)


def correlation_map(
    activation: Activation, c: float, *, var: float, weight_var: float, bias_var: float = 0.0
) -> float:
    """Correlation of two inputs' pre-activations in the next layer, from that in this one.

    Law: c' = (σw²·E[φ(z₁)φ(z₂)] + σb²)/q', z₁, z₂ ~ N(0, q) with correlation c, q' = V(q).

    At a fixed point of the variance map c = 1 stays 1, and the map's slope there is `chi`. Elsewhere
    both signals have the same q, and so the same q'.

    Args:
        activation: φ: a name, (name, keywords), a callable or an activation module.
        c: correlation, −1 to 1 (about zero: E[z₁z₂]/q).
        var: q, positive.
        weight_var: σw², the weights' variance times the fan-in, at least 0.
        bias_var: σb², at least 0.

    Returns:
        c', to about nine digits.

    Raises:
        ValueError: c outside [−1, 1]; a variance is out of range; q' is 0; unknown name; φ not finite.
        TypeError: φ is not a fixed elementwise function.

    Example:
        >>> import torch, musigma as ms
        >>> round(ms.init.meanfield.correlation_map("relu", 0.0, var=1.0, weight_var=2.0), 6)      # 1/π
        0.31831

    References:
        Poole et al. 2016, eq. 5; Cho & Saul 2009 (ReLU's in closed form).
    """
    check_variances(weight_var=weight_var, bias_var=bias_var)
    check_positive(var=var)
    if not -1.0 <= c <= 1.0:
        raise ValueError(f"a correlation must lie between -1 and 1, got c={c}")
    curve = curve_of(activation)
    after = next_variance(curve, var, weight_var, bias_var)
    if after == 0.0:
        raise ValueError(
            f"a correlation needs a signal, but {curve.label} leaves variance 0 after this layer"
        )
    if c == 1.0:
        return 1.0
    function, label = resolve(activation)
    edges = curve.remember(("partition", var), lambda: partition(function, var, REACH))
    product = curve.remember(("product", var, c), lambda: expect_product(function, edges, var, c, label))
    # The quadrature may leave the interval by its own error.
    return min(1.0, max(-1.0, (weight_var * product + bias_var) / after))


def chi(activation: Activation, *, var: float, weight_var: float) -> float:
    """Factor on a gradient's variance per layer, backward; and the correlation map's slope at c = 1.

    Law: χ = σw²·E[φ'(√q z)²], z ~ N(0, 1). Below 1 gradients vanish and inputs grow alike, above 1
    gradients explode and inputs grow apart.

    φ' is what autograd multiplies by. At a jump that is not the slope of the correlation map, which is
    infinite there; a callable that autograd cannot follow gives inf where it has a jump, and √|z| and the
    like, whose E[φ'²] does not exist, give inf too.

    Args:
        activation: φ: a name, (name, keywords), a callable or an activation module.
        var: q, at least 0.
        weight_var: σw², the weights' variance times the fan-in, at least 0.

    Returns:
        χ.

    Raises:
        ValueError: a variance is negative or not finite; unknown name; φ or φ' not finite.
        TypeError: φ is not a fixed elementwise function.

    Example:
        >>> import torch, musigma as ms
        >>> ms.init.meanfield.chi("relu", var=1.0, weight_var=2.0)
        1.0

    References:
        Poole et al. 2016, eq. 6; Schoenholz et al. 2017, eq. 11.
    """
    check_variances(var=var, weight_var=weight_var)
    return weight_var * curve_of(activation).point(var).slope_square


def slope(activation: Activation, *, var: float, weight_var: float) -> float:
    """Slope of the variance map, dq'/dq: what a deviation of the variance is multiplied by per layer.

    Law: dq'/dq = σw²·E[φ'² + φφ''] at √q z = σw²·E[φ(√q z)²(z² − 1)]/(2q), z ~ N(0, 1), the second by
    Stein's identity: no derivative is taken, so that kinks and jumps count in full.

    Args:
        activation: φ: a name, (name, keywords), a callable or an activation module.
        var: q, positive.
        weight_var: σw², the weights' variance times the fan-in, at least 0.

    Returns:
        The slope.

    Raises:
        ValueError: a variance is out of range or not finite; unknown name; φ not finite.
        TypeError: φ is not a fixed elementwise function.

    Example:
        >>> import torch, musigma as ms
        >>> round(ms.init.meanfield.slope("gelu", var=1.0, weight_var=ms.init.gain("gelu") ** 2), 4)
        1.1441

    References:
        Schoenholz et al. 2017, eq. 7.
    """
    check_variances(weight_var=weight_var)
    check_positive(var=var)
    return weight_var * curve_of(activation).point(var).square_rate


def next_variance(curve: Curve, var: float, weight_var: float, bias_var: float) -> float:
    """`variance_map` of a curve, unchecked."""
    return weight_var * curve.square(var) + bias_var


def check_variances(**values: float) -> None:
    """Refuse what is no variance.

    Raises:
        ValueError: one is negative or not finite.
    """
    for name, value in values.items():
        if not 0.0 <= value < math.inf:
            raise ValueError(f"{name} must be at least 0 and finite, got {value}")


def check_positive(**values: float) -> None:
    """Refuse a variance or std that must not be 0.

    Raises:
        ValueError: one is not positive or not finite.
    """
    for name, value in values.items():
        if not 0.0 < value < math.inf:
            raise ValueError(f"{name} must be positive and finite, got {value}")
