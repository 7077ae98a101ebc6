"""Intervals for what a net of finite width really does: one layer's chance, accumulated over layers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

from torch import Tensor

from musigma.init.meanfield._activations import Activation
from musigma.init.meanfield._critical import critical
from musigma.init.meanfield._curve import Curve, curve_of
from musigma.init.meanfield._maps import check_positive, check_variances, next_variance

# Relative step for second derivatives in log q: they need two digits.
_STEP = 0.05


@dataclass(frozen=True)
class WidthInterval:
    """Where chance may put a layer's standard deviation and a gradient's ratio.

    Attributes:
        target: standard deviation the theory of infinite width gives the layer.
        std: lower and upper bound of the layer's realised standard deviation (about zero, over all units
            and samples).
        gradient: the same of the gradient's mean square at the first layer over that at this one.
        log_var: variance of the log of the layer's mean square.
        gradient_log_var: variance of the log of the gradient's ratio.

    Example:
        >>> import torch, musigma as ms
        >>> near = ms.init.meanfield.width_interval("relu", width=512, depth=2)
        >>> [round(bound, 2) for bound in near.std]
        [0.82, 1.21]
    """

    target: float
    std: tuple[float, float]
    gradient: tuple[float, float]
    log_var: float
    gradient_log_var: float


def width_interval(
    activation: Activation,
    *,
    width: int | Sequence[int],
    depth: int,
    samples: int = 1,
    std: float | None = None,
    weight_var: float | None = None,
    bias_var: float = 0.0,
    correlation: float = 0.0,
    coverage: float = 0.999,
    orthogonal: bool = False,
) -> WidthInterval:
    """Interval of a layer's realised standard deviation, and of a gradient's ratio, at a finite width.

    Given a layer of width n its successor's pre-activations are normal with a common variance, the mean of
    n terms σw²φ(zᵢ)² + σb². So each layer adds (share of φ²)²·(E[φ⁴]/E[φ²]² − 1)/n to the variance of
    log q, and passes on what it got times its log slope squared; a gradient's log gets
    (3E[φ'⁴]/E[φ'²]² − 1)/n a layer, and what strayed q's do to χ. Samples share the weights: what they
    average out is known from the correlation that the correlation map gives them at each layer.

    Orthogonal weights keep a norm to the bit. A layer's q is then off only by what φ makes of z beyond its
    norm, and a gradient's log by 3(E[φ'⁴]/E[φ'²]² − 1)/n less the norm's part: nothing for a linear φ.

    Args:
        activation: φ, the same after every layer.
        width: units of each layer; or one number a layer, `depth` of them.
        depth: weight layers up to and with the one asked about; the first has a known q.
        samples: inputs whose mean square is taken together.
        std: standard deviation of the first pre-activations; of `critical` if None.
        weight_var: σw², the weights' variance times the fan-in; with `bias_var` of `critical` if None.
        bias_var: σb².
        correlation: of two inputs' first pre-activations.
        coverage: share of random nets that lie within.
        orthogonal: the weights are square orthogonal matrices times σw, not independent normals.

    Returns:
        The interval. Gradients of different samples are taken to point alike, which is the worst case.

    Raises:
        ValueError: an argument is out of range; unknown name; φ or φ⁴ without an expectation.
        TypeError: φ is not a fixed elementwise function.

    Example:
        >>> import torch, musigma as ms
        >>> far = ms.init.meanfield.width_interval("tanh", width=512, depth=50, samples=32)
        >>> 0.9 * far.target < far.std[0] < far.target < far.std[1] < 1.1 * far.target
        True

    References:
        Hanin 2018; Hanin & Nica 2020 (the log-normal law of ReLU nets).
    """
    widths = _widths(width, depth)
    if samples < 1:
        raise ValueError(f"samples must be at least 1, got {samples}")
    if not 0.0 < coverage < 1.0:
        raise ValueError(f"coverage must lie between 0 and 1, got {coverage}")
    if not -1.0 <= correlation <= 1.0:
        raise ValueError(f"a correlation must lie between -1 and 1, got correlation={correlation}")
    if weight_var is None:
        point = critical(activation, std=std, depth=depth)
        std, weight_var, bias_var = point.std, point.weight_var, point.bias_var
    first = 1.0 if std is None else std
    check_positive(std=first, weight_var=weight_var)
    check_variances(bias_var=bias_var)
    run = _Run(curve_of(activation), weight_var, bias_var, samples, first**2, correlation, orthogonal)
    for n in widths[:-1]:
        run.cross(n)
    return run.interval(widths[-1], NormalDist().inv_cdf((1 + coverage) / 2))


def _widths(width: int | Sequence[int], depth: int) -> list[int]:
    if depth < 1:
        raise ValueError(f"depth must be at least 1 layer, got {depth}")
    widths = [width] * depth if isinstance(width, int) else list(width)
    if len(widths) != depth:
        raise ValueError(f"width must be one number or one a layer, got {len(widths)} for {depth} layers")
    if min(widths) < 1:
        raise ValueError(f"width must be at least 1 unit, got {min(widths)}")
    return widths


class _Local(NamedTuple):
    """What a layer does near its q, in logs: slopes and curvatures of V and χ; chance and shifts of n = 1."""

    share: float
    passed: float
    passed_rate: float
    pull: float
    pull_rate: float
    noise: float
    slope_noise: float
    both: float
    shift: float
    slope_shift: float
    across_shift: float


class _Logs:
    """Means and covariance of log q and of the log of the gradient's ratio, for so many samples."""

    def __init__(self) -> None:
        self.signal = self.cross = self.gradient = 0.0
        self.signal_mean = self.gradient_mean = 0.0
        self.along = 1.0

    def cross_layer(self, at: _Local, n: int, noise: float, slope_noise: float, both: float) -> None:
        self.gradient_mean += at.pull * self.signal_mean + at.pull_rate / 2 * self.signal
        # A random gradient points along the signal with 1/n of its square; <gradient, signal> shrinks like a
        # deviation of q, and what is left lies across.
        self.gradient_mean += (at.slope_shift + (1 - self.along) * at.across_shift) / n - slope_noise / 2
        self.along *= min(1.0, at.passed**2)
        self.signal_mean = at.passed * self.signal_mean + at.passed_rate / 2 * self.signal
        self.signal_mean += at.shift / n - noise / 2
        self.signal, self.cross, self.gradient = (
            at.passed**2 * self.signal + noise,
            at.passed * (self.cross + at.pull * self.signal) + both,
            # Rounding may leave less than nothing where orthogonal weights leave no chance.
            max(0.0, self.gradient + 2 * at.pull * self.cross + at.pull**2 * self.signal + slope_noise),
        )


class _Run:
    """A net's state as one goes through its layers: q, correlation, and the logs' spread."""

    def __init__(
        self,
        curve: Curve,
        weight_var: float,
        bias_var: float,
        samples: int,
        var: float,
        c: float,
        orthogonal: bool,
    ) -> None:
        self.orthogonal = orthogonal
        self.curve, self.weight_var, self.bias_var, self.samples = curve, weight_var, bias_var, samples
        self.var, self.c, self.c_var, self.ratio = var, c, 0.0, 1.0
        self.one, self.all = _Logs(), _Logs()

    def cross(self, n: int) -> None:
        """From one layer of n units to the next."""
        at = self._local()
        noise, slope_noise, both = at.noise / n, at.slope_noise / n, at.both / n
        self.one.cross_layer(at, n, math.log1p(noise), math.log1p(slope_noise), both)
        alone = 1 / self.samples
        shared, slope_shared, both_shared = self._shared() if self.samples > 1 else (1.0, 1.0, 1.0)
        self.all.cross_layer(
            at,
            n,
            math.log1p(noise * (alone + (1 - alone) * shared)),
            math.log1p(slope_noise * (alone + (1 - alone) * slope_shared)),
            both * (alone + (1 - alone) * both_shared),
        )
        after = next_variance(self.curve, self.var, self.weight_var, self.bias_var)
        if self.samples > 1:
            self._cross_correlation(n, after)
        self.ratio *= self.weight_var * self.curve.point(self.var).slope_square
        # At a fixed point q stays to the bit, and so nothing is computed again.
        self.var = self.var if math.isclose(after, self.var, rel_tol=1e-6) else after

    def interval(self, n: int, z: float) -> WidthInterval:
        alone = 1 / self.samples
        # The mean of n normals squared, over samples whose squares correlate by c².
        # Orthogonal weights leave no chance to the last layer's norm but the biases'.
        chance = 2 * (1 - self._local().share ** 2) if self.orthogonal else 2.0
        last = math.log1p(chance / n * (alone + (1 - alone) * min(1.0, self.c**2 + self.c_var)))
        log_var = self.all.signal + last
        # The log of the samples' mean: that of one, and what averaging takes of the variance.
        center = self.one.signal_mean + (self.one.signal - self.all.signal - last) / 2
        slope_center = self.one.gradient_mean + (self.one.gradient - self.all.gradient) / 2
        target = math.sqrt(self.var)
        return WidthInterval(
            target=target,
            std=_bounds(target, center / 2, z * math.sqrt(log_var) / 2),
            gradient=_bounds(self.ratio, slope_center, z * math.sqrt(self.all.gradient)),
            log_var=log_var,
            gradient_log_var=self.all.gradient,
        )

    def _cross_correlation(self, n: int, after: float) -> None:
        """The correlation map, and the walk that chance adds: 1/n a layer where inputs are unrelated."""
        values, squares, _ = self.curve.series(self.var)
        c, square = self.c, self.curve.point(self.var).square
        product = _at(values, values, c)
        rate = self.weight_var * sum(k * a * a * c ** (k - 1) for k, a in enumerate(values.tolist()) if k > 0)
        # Of n products φ₁φ₂. Of a normal's 1 + c² all but (1 − c²)² only changes the norms.
        noise = (_at(squares, squares, c) - product**2) / square**2 * (1 - c**2) ** 2 / (1 + c**2) / n
        share = self.weight_var * square / after
        self.c_var = min(1.0, (rate / after) ** 2 * self.c_var + share**2 * noise)
        self.c = max(-1.0, min(1.0, (self.weight_var * product + self.bias_var) / after))

    def _local(self) -> _Local:
        key = ("local", self.var, self.weight_var, self.bias_var, self.orthogonal)
        return self.curve.remember(key, self._derive)

    def _derive(self) -> _Local:
        below, at, above = (self._slopes(self.var * math.exp(h)) for h in (-_STEP, 0.0, _STEP))
        fourth = self.curve.fourth(self.var)
        share = self.weight_var * self.curve.point(self.var).square
        share /= share + self.bias_var
        passed, pull = at
        noise, both = share**2 * (fourth.value - 1), share * (fourth.cross - 1)
        slope_noise = 3 * fourth.slope - 1
        passed_rate, pull_rate = ((high - low) / (2 * _STEP) for low, high in zip(below, above, strict=True))
        shift = slope_shift = 0.0
        # Across the signal φ'² weighs (E[φ'²] − E[z²φ'²]/nq)/(1 − 1/n), and n − 1 of n directions are new.
        across_shift = -2 * pull - 1
        if self.orthogonal:
            # On a sphere of n dimensions E[f] is short of the normal's by q²·f''(q)/n.
            shift = -(passed_rate - passed + passed**2)
            slope_shift = -(pull_rate - pull + pull**2)
            across_shift += 1
            # By Stein Cov(φ², z²/q)/E[φ²] is 2·passed/share, and 2·pull for φ'²: what the norm explains,
            # whose Var(z²/q) is 2. The biases change the norm still.
            noise += 2 * (1 - share**2) * passed**2 - 2 * passed**2
            both += 2 * (1 - share**2) * passed * pull - 2 * passed * pull
            slope_noise += -2 + 2 * (1 - share**2) * pull**2 - 2 * pull**2
        return _Local(
            share=share,
            passed=passed,
            passed_rate=passed_rate,
            pull=pull,
            pull_rate=pull_rate,
            noise=max(noise, 0.0),
            slope_noise=max(slope_noise, 0.0),
            both=both,
            shift=shift,
            slope_shift=slope_shift,
            across_shift=across_shift,
        )

    def _slopes(self, var: float) -> tuple[float, float]:
        """d log q'/d log q and d log χ/d log q."""
        point = self.curve.point(var)
        after = self.weight_var * point.square + self.bias_var
        return (
            var * self.weight_var * point.square_rate / after,
            var * point.slope_square_rate / point.slope_square,
        )

    def _shared(self) -> tuple[float, float, float]:
        """Which part of each noise two samples of correlation c have in common."""
        _, squares, slopes = self.curve.series(self.var)
        strays = math.sqrt(self.c_var)
        ends = [max(-1.0, min(1.0, self.c + s)) for s in (-strays, strays)]
        value, slope, both = (
            sum(_common(a, b, c) for c in ends) / 2
            for a, b in ((squares, squares), (slopes, slopes), (squares, slopes))
        )
        kurtosis = self.curve.fourth(self.var).slope
        # E[g₁²g₂²φ'²φ'²] = 3E[φ'²φ'²] for gradients that point alike.
        slope = (3 * (1 + slope * (kurtosis - 1)) - 1) / (3 * kurtosis - 1)
        return value, slope, both


def _at(a: Tensor, b: Tensor, c: float) -> float:
    """Σ aₖbₖcᵏ."""
    return float(sum(x * c**k for k, x in enumerate((a * b).tolist())))


def _common(a: Tensor, b: Tensor, c: float) -> float:
    """The covariance at correlation c over that at 1; 1 where there is none to share."""
    whole = _at(a, b, 1.0) - float(a[0] * b[0])
    return (_at(a, b, c) - float(a[0] * b[0])) / whole if abs(whole) > 1e-12 * float(a[0] * b[0]) else 1.0


def _bounds(center: float, shift: float, half: float) -> tuple[float, float]:
    low, high = shift - half, shift + half
    return center * math.exp(low), center * math.exp(min(high, 700.0))
