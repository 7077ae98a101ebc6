"""tied-scaled-twice: a weight with two names, whose scale factor was applied once for every name.

A loop over names (or over the modules that share a weight) multiplies a tied tensor as often as it has names:
σ/(2L) stands where σ/√(2L) was meant, 1/d where 1/√d was. It is said where the spread is a usual one times a
usual factor to the power of two or more, up to the number of names, and neither the usual one itself nor that
times the factor once.
"""

import math
from collections.abc import Iterator

from musigma.init.auditing._facts import Facts
from musigma.init.auditing._identify import FEW
from musigma.init.auditing._interval import std_interval
from musigma.init.auditing._report import Finding
from musigma.init.auditing._scene import Scene, check
from musigma.init.schemes._scheme import Law

_KURTOSIS = {"normal": 3.0, "uniform": 1.8, "truncated": 2.37}


@check("tied-scaled-twice")
def check_ties(scene: Scene) -> Iterator[Finding]:
    """One finding a tied tensor."""
    for facts in scene.facts:
        family, names = scene.family(facts), facts.names
        told = _is_told(scene, facts) or scene.as_planned(facts)
        if len(names) < 2 or not family or facts.count < FEW or told:
            continue
        found = _twice(scene, facts, family)
        if found is None:
            continue
        base, factor, times, what = found
        wanted = base * factor
        yield Finding(
            facts.name,
            f"tied-scaled-twice: std {facts.std:.4g} is {base:.4g} times {what} {times} times over, once for "
            f"each of its {len(names)} names ({', '.join(names)}); once makes {wanted:.4g}.",
            {
                "realised": facts.std,
                "expected": wanted,
                "interval": list(_interval(facts, family, wanted, scene.z)),
                "ratio": facts.std / wanted,
                "factor": factor,
                "times": times,
                "names": list(names),
                "n": facts.count,
            },
            f"multiply it by {1 / factor ** (times - 1):.4g}, and scale tensors, not names: "
            f"model.parameters() gives a tied one once",
        )


def _is_told(scene: Scene, facts: Facts) -> bool:
    """Whether a law in use explains the spread; a fixed one may be a coincidence."""
    found = scene.laws[facts.name]
    return found.named and not (found.label or "").startswith(("normal(", "truncated_normal(", "uniform("))


def _twice(scene: Scene, facts: Facts, family: str) -> tuple[float, float, int, str] | None:
    """(base, factor, power, the factor in words) that explain a spread which nothing simpler does."""
    pairs = [(base, factor, what) for base, factors in _histories(scene, facts) for factor, what in factors]
    if any(_is(facts, family, base * once, scene.z) for base, factor, _ in pairs for once in (1.0, factor)):
        return None
    for times in range(2, len(facts.names) + 1):
        for base, factor, what in pairs:
            if _is(facts, family, base * factor**times, scene.z):
                return base, factor, times, what
    return None


_Factors = list[tuple[float, str]]


def _histories(scene: Scene, facts: Facts) -> Iterator[tuple[float, _Factors]]:
    """Spreads before any scaling, each with the factors it is usually scaled by."""
    counts = [len(scene.branches)] if scene.graph is not None else [len(facts.names), 2 * len(facts.names)]
    roots = [(1 / math.sqrt(count), f"1/√{count}") for count in counts if count > 1]
    width = [(1 / math.sqrt(facts.shape[-1]), f"1/√{facts.shape[-1]}")] if facts.values.dim() == 2 else []
    plain = [(0.5, "1/2"), (math.sqrt(0.5), "1/√2")]
    peers = [other for other in scene.facts if other.shape == facts.shape and len(other.names) < 2]
    for law in (scene.laws[peer.name].law for peer in peers if scene.laws[peer.name].named):
        if law is not None and law.std > 0:
            yield law.std, [*roots, *width, *plain]
    yield 0.02, roots
    yield 1.0, [*roots, *width]
    if facts.fans is None or not facts.fans.fan_in > 0:
        return
    for variance in (2 / sum(facts.fans), *(c / facts.fans.fan_in for c in (1.0, 2.0, 1 / 3))):
        # A factor that is no root of a count is believed where a weight of the same shape has it once.
        seen = [
            (factor, what)
            for factor, what in plain
            if any(_is(peer, "normal", math.sqrt(variance) * factor, scene.z) for peer in peers)
        ]
        yield math.sqrt(variance), [*roots, *seen]


def _is(facts: Facts, family: str, std: float, z: float) -> bool:
    low, high = _interval(facts, family, std, z)
    return low <= facts.std <= high


def _interval(facts: Facts, family: str, std: float, z: float) -> tuple[float, float]:
    return std_interval(Law(0.0, std**2, _KURTOSIS[family]), facts.count, z)
