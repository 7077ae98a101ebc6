"""The expectations of one activation under N(0, q), computed once per activation and q."""

import functools
import math
import weakref
from collections.abc import Callable, MutableMapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from musigma.init.meanfield._activations import Activation, Function, canonical_name, resolve
from musigma.init.meanfield._derivative import Pair, differentiate, has_jumps
from musigma.init.meanfield._partition import breaks
from musigma.init.meanfield._quadrature import expect

Store = dict[Any, Any]
# Hermite polynomials up to here: at correlation 1/2 the rest is 2^-33.
_DEGREE = 32
# What names and torch's own modules stand for never changes; other callables are remembered while they live.
_BY_VALUE: dict[Any, Store] = {}
_BY_IDENTITY: MutableMapping[Any, tuple[bytes, Store]] = weakref.WeakKeyDictionary()
_PROBES = torch.linspace(-6.0, 6.0, 193, dtype=torch.float64, device="cpu")


class Point(NamedTuple):
    """Expectations over z ~ N(0, q): E[φ], E[φ²], its derivative in q, E[φ'²], its derivative in q.

    E[φ'²] is inf where it does not exist.
    """

    mean: float
    square: float
    square_rate: float
    slope_square: float
    slope_square_rate: float


class Fourth(NamedTuple):
    """E[φ⁴]/E[φ²]², E[φ'⁴]/E[φ'²]² and E[φ²φ'²]/(E[φ²]E[φ'²]) over z ~ N(0, q)."""

    value: float
    slope: float
    cross: float


class Curve:
    """One activation's expectations, each computed when it is first asked for."""

    def __init__(self, activation: Activation, store: Store) -> None:
        self._activation = activation
        self._store = store

    def remember(self, key: Any, make: Callable[[], Any]) -> Any:
        """What `make` gives, computed once."""
        if key not in self._store:
            self._store[key] = make()
        return self._store[key]

    @property
    def label(self) -> str:
        return str(self.remember("label", lambda: self.pair[1]))

    @property
    def jumps(self) -> bool:
        return bool(self.remember("jumps", lambda: has_jumps(self._activation)))

    @property
    def by_autograd(self) -> bool:
        return bool(self.remember("autograd", lambda: self.pair[2]))

    @property
    def breaks(self) -> Tensor:
        return self.remember("breaks", lambda: breaks(self.pair[0]))

    @functools.cached_property
    def pair(self) -> tuple[Pair, str, bool]:
        return differentiate(self._activation)

    @functools.cached_property
    def _function(self) -> tuple[Function, str]:
        return resolve(self._activation)

    def point(self, var: float) -> Point:
        return self.remember(("point", var), lambda: self._point(var))

    def _point(self, var: float) -> Point:
        pair, label, by_autograd = self.pair
        if var == 0.0:
            value, slope = (float(v) for v in pair(torch.zeros(1, dtype=torch.float64, device="cpu")))
            return Point(value, value**2, math.nan, slope**2, math.nan)
        std = math.sqrt(var)

        def terms(z: Tensor) -> Tensor:
            value, slope = pair(z)
            # Stein: d/dq E[f(√q t)] = E[f(√q t)(t² − 1)]/(2q), which asks nothing of f at kinks and jumps.
            stein = ((z / std).square() - 1) / (2 * var)
            value2, slope2 = value.square(), slope.square()
            return torch.stack([value, value2, value2 * stein, slope2, slope2 * stein])

        # Where differences stand in for a derivative, those over a jump grow as the step shrinks.
        if not by_autograd and self.jumps:
            return self._without_slope(terms, std, label)
        try:
            return Point(*expect(terms, 0.0, std, label, breaks=self.breaks).tolist())
        except ValueError:
            # √|z|: φ has its expectations, φ'² none. If φ has none either this raises for good.
            return self._without_slope(terms, std, label)

    def _without_slope(self, terms: Function, std: float, label: str) -> Point:
        found = expect(lambda z: terms(z)[:3], 0.0, std, label, breaks=self.breaks)
        mean, square, square_rate = found.tolist()
        return Point(mean, square, square_rate, math.inf, math.nan)

    def square(self, var: float) -> float:
        """E[φ²] alone, which exists also where the derivative's square has no expectation."""
        known = self._store.get(("point", var))
        return known.square if known else float(self.remember(("square", var), lambda: self._square(var)))

    def _square(self, var: float) -> float:
        function, label = self._function
        if var == 0.0:
            return float(function(torch.zeros(1, dtype=torch.float64, device="cpu"))) ** 2
        squared = expect(lambda z: function(z).square()[None], 0.0, math.sqrt(var), label, breaks=self.breaks)
        return squared.item()

    def fourth(self, var: float) -> Fourth:
        return self.remember(("fourth", var), lambda: self._fourth(var))

    def _fourth(self, var: float) -> Fourth:
        pair, label, _ = self.pair

        def terms(z: Tensor) -> Tensor:
            value, slope = (v.square() for v in pair(z))
            return torch.stack([value, slope, value.square(), slope.square(), value * slope])

        a, b, aa, bb, ab = expect(terms, 0.0, math.sqrt(var), label, breaks=self.breaks).tolist()
        return Fourth(*(x / y if y else math.nan for x, y in ((aa, a * a), (bb, b * b), (ab, a * b))))

    def series(self, var: float) -> tuple[Tensor, Tensor, Tensor]:
        """Coefficients of φ, φ² and φ'² in normalized Hermite polynomials of z/√q, whose products say what
        two normals of correlation c have in common: E[f(z₁)g(z₂)] = Σ fₖgₖcᵏ.

        The last coefficient stands for all beyond it: for f = g and c = 1 the sum is right, and for |c| < 1
        what is beyond has a higher power still.
        """
        return self.remember(("series", var), lambda: self._series(var))

    def _series(self, var: float) -> tuple[Tensor, Tensor, Tensor]:
        pair, label, _ = self.pair
        std = math.sqrt(var)

        def terms(z: Tensor) -> Tensor:
            value, slope = pair(z)
            square, slope = value.square(), slope.square()
            t = z / std
            h = [torch.ones_like(t), t]
            for k in range(1, _DEGREE):
                h.append((t * h[k] - math.sqrt(k) * h[k - 1]) / math.sqrt(k + 1))
            basis = torch.stack(h)
            return torch.cat(
                [value * basis, square * basis, slope * basis, torch.stack([square, square**2, slope**2])]
            )

        found = expect(terms, 0.0, std, label, breaks=self.breaks)
        value, square, slope = found[:-3].view(3, _DEGREE + 1)
        rests = [
            (w - s.square().sum()).clamp_min(0).sqrt()
            for w, s in zip(found[-3:], (value, square, slope), strict=True)
        ]
        ends = [torch.cat([s, rest[None]]) for s, rest in zip((value, square, slope), rests, strict=True)]
        return ends[0], ends[1], ends[2]


def curve_of(activation: Activation) -> Curve:
    """The curve of an activation, with everything already computed for it.

    Args:
        activation: a name, (name, keywords), a callable or an activation module.

    Returns:
        Its curve.

    Raises:
        ValueError: unknown name.
        TypeError: φ is not a fixed elementwise function.

    Example:
        >>> curve_of("relu").point(1.0).slope_square
        0.5

    References:
        None.
    """
    key = _value_key(activation)
    if key is not None:
        return Curve(activation, _BY_VALUE.setdefault(key, {}))
    function, _ = resolve(activation)
    # A closure may read what changes later: values on a fixed grid tell.
    seen = function(_PROBES).numpy().tobytes()
    try:
        known = _BY_IDENTITY.get(activation)
        if known is None or known[0] != seen:
            known = _BY_IDENTITY[activation] = (seen, {})
    except TypeError:  # neither hashable nor weakly referable
        known = (seen, {})
    return Curve(activation, known[1])


def _value_key(activation: Activation) -> Any:
    """What a name or one of torch's own modules stands for, hashable; None for anything else."""
    if isinstance(activation, str):
        return canonical_name(activation)
    if isinstance(activation, tuple) and len(activation) == 2 and isinstance(activation[0], str):
        return canonical_name(activation[0]), repr(sorted(activation[1].items()))
    if isinstance(activation, nn.Module) and type(activation).__module__.startswith("torch.nn.modules."):
        if next(activation.children(), None) is not None:
            return None
        state = tuple(v.detach().cpu().double().numpy().tobytes() for v in activation.state_dict().values())
        return type(activation), repr(activation), activation.training, state
    return None
