"""The weight and bias variance at which an activation passes signals and gradients on unchanged."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from musigma.init.meanfield._activations import Activation, resolve
from musigma.init.meanfield._curve import Curve, curve_of
from musigma.init.meanfield._maps import check_positive
from musigma.init.meanfield._spread import Spread, spread

# Standard deviations that are tried, nearest to 1 first: activations bend where z is of order 1. Above 5.7
# nearly every activation is a ReLU or a step, below 1/11 nearly every one linear: the deepest nets want that.
_STDS = sorted((2 ** (k / 4) for k in range(-40, 11)), key=lambda s: (abs(math.log(s)), s))
_LEAST_STD = 2**-3.5
# A point is stable if chance spreads log q and the log of the gradient's ratio there no more than √2 times as
# far as in a ReLU net of the same width and depth, 5·depth/n, which is the least any kin of ReLU's has. It
# must hold a factor 2 in q off the point too: that is where such a net strays (√(5·50/512) = 0.7 in log q).
_MOST_SPREAD = 2.0
_OFF = (0.5, 1.0, 2.0)
_RELU = 5.0
# Two unrelated inputs should keep half of their distance through all layers, where an activation can; in nets
# deeper than 50 layers more. Those stand on orthogonal weights, which leave to chance only what φ' spreads:
# for tanh 12·(what is lost)/n in the log of the gradient's ratio. √(50/depth) holds it within a tenth at
# 10,000 layers of width 64 (tests/init/meanfield/test_deep_nets.py).
_MOST_CORRELATION = 0.5
_SHALLOW = 50
# What the quadrature may leave of a bias variance that is 0 in truth.
_ROUNDING = 1e-8


@dataclass(frozen=True)
class Critical:
    """Weights and biases for one activation: what they keep and what they cannot.

    Attributes:
        std: standard deviation the pre-activations have and keep.
        weight_var: σw²: the weights' variance is σw²/fan_in.
        bias_var: σb²: the biases' variance.
        chi: factor on a gradient's variance per layer.
        slope: dq'/dq: what a deviation of the variance is multiplied by per layer.
        stable: chance of a finite width spreads signal and gradient about as little as in a ReLU net.
        reachable: χ = 1 at this std, with a bias variance that isn't negative.
        note: what can't be had and what to do about it; empty where all is well.

    Example:
        >>> import torch, musigma as ms
        >>> point = ms.init.meanfield.critical("relu")
        >>> point.std, point.weight_var, point.bias_var, point.chi, point.stable
        (1.0, 2.0, 0.0, 1.0, True)
    """

    std: float
    weight_var: float
    bias_var: float
    chi: float
    slope: float
    stable: bool
    reachable: bool
    note: str = ""


def critical(activation: Activation, *, std: float | None = None, depth: int = 50) -> Critical:
    """The point where signals keep their variance and gradients theirs, layer after layer.

    Law: for pre-activations of variance q, σw² = 1/E[φ'(√q z)²] makes χ = 1, and σb² = q − σw²·E[φ(√q z)²]
    keeps q. Such a point is `reachable` if σb² ≥ 0, and `stable` if deviations don't grow: over `depth`
    layers the spread that a finite width causes, in q and in the gradient, may be √2 times that of a ReLU
    net at most, at the point and a factor 2 to either side.

    Without `std` the reachable, stable one nearest to 1 is taken at which two unrelated inputs still
    correlate by at most 1/2 after all layers (less by √(50/depth) beyond 50); if there is none (all kin of
    ReLU pull inputs together), the reachable, stable one nearest to 1. Where no std up to 5.7 is reachable
    (sigmoid, softplus), the law keeps the variance forward, σw² = q/E[φ²], at the std whose χ is nearest
    to 1.

    Args:
        activation: φ: a name, (name, keywords), a callable or an activation module.
        std: the pre-activations' standard deviation; chosen if None.
        depth: layers over which the point must be stable.

    Returns:
        The point.

    Raises:
        ValueError: std not positive, depth below 1; unknown name; φ is 0 almost everywhere or not finite.
        TypeError: φ is not a fixed elementwise function.

    Example:
        >>> import torch, musigma as ms
        >>> point = ms.init.meanfield.critical("tanh", std=1.0)
        >>> round(point.weight_var, 4), round(point.bias_var, 4), round(point.slope, 4)
        (2.1533, 0.151, 0.3915)
        >>> ms.init.meanfield.critical("sigmoid").reachable
        False

    References:
        Schoenholz et al. 2017 (criticality); Hayou et al. 2019 (the critical line from its fixed points).
    """
    if std is not None:
        check_positive(std=std)
    if depth < 1:
        raise ValueError(f"depth must be at least 1 layer, got {depth}")
    curve = curve_of(activation)
    return curve.remember(("critical", std, depth), lambda: _find(curve, activation, std, depth))


def _find(curve: Curve, activation: Activation, std: float | None, depth: int) -> Critical:
    if std is None:
        # At every scale alike: one will do.
        stds = [s for s in _STDS if s >= _LEAST_STD or depth > _SHALLOW]
        stds = [1.0] if is_homogeneous(activation) else stds
        return _choose(curve, (p for s in stds if (p := _try(curve, s, depth)) is not None), depth)
    return _point(curve, std * std, depth)


def _try(curve: Curve, std: float, depth: int) -> Critical | None:
    """The point at a std, or None where an expectation doesn't exist there (exp under a wide density)."""
    try:
        return _point(curve, std * std, depth)
    except ValueError:
        if std == 1.0:
            raise
        return None


def _choose(curve: Curve, candidates: Iterator[Critical], depth: int) -> Critical:
    """The best of the points, which come in order of preference."""
    most = _MOST_CORRELATION * math.sqrt(min(1.0, _SHALLOW / depth))
    points = []
    for point in candidates:
        # Chance may stand a slope above 1 for a few layers, but training may add to what it amounts to.
        attracts = point.reachable and point.stable and point.slope <= 1 + _ROUNDING
        if attracts and _last_correlation(curve, point, depth, most) <= most:
            return point
        points.append(point)
    good = [p for p in points if p.reachable and p.stable]
    good = [p for p in good if p.slope <= 1 + _ROUNDING] or good
    if good:
        return good[0]
    reachable = [p for p in points if p.reachable]
    if reachable:
        return min(reachable, key=lambda p: float(f"{max(_excess(curve, p, depth)):.6g}"))
    return min(points, key=lambda p: abs(math.log(p.chi)) if 0 < p.chi < math.inf else math.inf)


def _point(curve: Curve, var: float, depth: int) -> Critical:
    at = curve.point(var)
    if curve.square(var) == 0.0:
        raise ValueError(
            f"an activation must pass something on, but {curve.label} is 0 for (almost) every "
            f"z ~ N(0, {var:g}); no weights make up for that"
        )
    if 0.0 < at.slope_square < math.inf:
        weight_var = 1 / at.slope_square
        bias_var = var - weight_var * at.square
        if abs(bias_var) <= _ROUNDING * var:
            bias_var = 0.0
        if bias_var >= 0.0:
            return _judged(curve, var, weight_var, bias_var, depth, reachable=True)
    return _judged(curve, var, var / at.square, 0.0, depth, reachable=False)


def _judged(
    curve: Curve, var: float, weight_var: float, bias_var: float, depth: int, *, reachable: bool
) -> Critical:
    at = curve.point(var)
    found = Critical(
        std=math.sqrt(var),
        weight_var=weight_var,
        bias_var=bias_var,
        chi=1.0 if reachable else weight_var * at.slope_square,
        slope=weight_var * at.square_rate,
        stable=True,
        reachable=reachable,
    )
    stable = max(_excess(curve, found, depth)) <= _MOST_SPREAD
    note = _note(curve, found, stable, depth)
    return Critical(**{**vars(found), "stable": stable, "note": note})


def _excess(curve: Curve, point: Critical, depth: int) -> Spread:
    """The worst spread near a point, in units of a ReLU net's."""
    if not 0.0 < point.chi < math.inf:
        return Spread(math.inf, math.inf)
    var = point.std**2
    try:
        seen = [spread(curve, var * off, point.weight_var, point.bias_var, depth) for off in _OFF]
    except (ValueError, ZeroDivisionError):
        return Spread(math.inf, math.inf)
    worst = [max(values) / (_RELU * depth) for values in zip(*seen, strict=True)]
    return Spread(*(math.inf if math.isnan(value) else value for value in worst))


def _last_correlation(curve: Curve, point: Critical, depth: int, most: float) -> float:
    """Correlation of two unrelated inputs after all layers, or the first value above the bound."""
    var, c = point.std**2, 0.0
    values, _, _ = curve.series(var)
    squares = values.square().tolist()
    for _ in range(depth):
        product = sum(square * c**k for k, square in enumerate(squares))
        c = (point.weight_var * product + point.bias_var) / var
        if c > most:
            break
    return c


def _note(curve: Curve, point: Critical, stable: bool, depth: int) -> str:
    said = []
    if point.chi == 0.0:
        said.append(f"no gradient passes {curve.label}: its derivative is 0 almost everywhere")
    elif math.isinf(point.chi):
        what = "jumps, and autograd does not follow it" if curve.jumps else "is infinitely steep somewhere"
        said.append(f"{curve.label} {what}: no weights keep a gradient's variance, its χ is infinite")
    elif not point.reachable:
        said.append(
            f"χ = 1 at std {point.std:.3g} would take a negative bias variance: the law keeps the signal, "
            f"and a gradient's variance changes by {point.chi:.3g} a layer "
            f"({point.chi**depth:.1g} over {depth}); put a norm before {curve.label}"
        )
    elif not stable:
        said.append(
            f"at std {point.std:.3g} a deviation of the variance is multiplied by {point.slope:.3g} a layer, "
            f"which a finite width does not stand for {depth} layers; put a norm before {curve.label}"
        )
    if curve.jumps and not math.isinf(point.chi) and point.chi != 0.0:
        said.append(f"{curve.label} jumps: χ is the gradient's, and nearby inputs part faster than it says")
    return "; ".join(said)


def is_homogeneous(activation: Activation) -> bool:
    """φ(2z) = 2φ(z): ReLU's kin, the same at every std."""
    function, _ = resolve(activation)
    z = torch.linspace(-8.0, 8.0, 129, dtype=torch.float64, device="cpu")
    # Doubling is exact, and so is what a piecewise linear function does with it.
    return bool(torch.equal(function(2 * z), 2 * function(z)))
