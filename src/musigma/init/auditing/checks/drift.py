"""signal-vanishes, signal-explodes: the activations' size falls or grows geometrically with depth.

Measured between norms: from what the first layer receives (or 1, where less comes in than biases hold up or
more than is right) to what the last one receives or puts out. It must change by four orders of magnitude
downward or three upward in E[x²] (a hundred and thirty times in the standard deviation), and by more than the
widths explain by chance.
"""

import math
from collections.abc import Iterator

from musigma.init.auditing._chains import Chain, blame, chains, normalizes
from musigma.init.auditing._report import Finding
from musigma.init.auditing._scene import Scene, check

# What a gradient step changes shrinks by the square root: a hundred steps where a healthy stack takes one.
# Healthy nets stay within it: tanh with Xavier falls to 1/200 of E[x²] at a hundred layers.
_VANISHED = math.log(1e4)
# A softmax over logits thirty times too large is sure of a guess.
_EXPLODED = math.log(1e3)
_SIGMAS = 3.0


@check("signal-vanishes")
def check_vanishing(scene: Scene) -> Iterator[Finding]:
    """One finding for every weight whose gain is to blame."""
    yield from _check(scene, "signal-vanishes", -1)


@check("signal-explodes")
def check_exploding(scene: Scene) -> Iterator[Finding]:
    """One finding for every weight whose gain is to blame."""
    yield from _check(scene, "signal-explodes", 1)


def _check(scene: Scene, code: str, sign: int) -> Iterator[Finding]:
    if scene.trained or scene.signal is None:
        return
    drifting = [
        (chain, total) for chain in chains(scene, normalizes) if (total := _drift(chain, sign)) is not None
    ]
    for chain, total, (facts, factor, wanted) in blame(scene, drifting, sign):
        yield Finding(
            facts.name,
            f"{code}: {_words(chain, total, factor, wanted)}.",
            _evidence(facts.std, facts.fans, chain, total, factor, wanted),
            _remedy(factor, wanted),
        )


def _drift(chain: Chain, sign: int) -> float | None:
    """ln of the factor by which E[x²] has changed where the chain ends; None where that is in order."""
    first = chain.start.square
    crossed = chain.depth if sign < 0 else chain.depth + 1
    last = (chain.received if sign < 0 else chain.produced).square
    if crossed < 2 or not 0 < first < math.inf or not last >= 0:
        return None
    if last == 0 or math.isinf(last):
        return sign * math.inf if (last == 0) == (sign < 0) else None
    total = math.log(last / first)
    from_one = math.log(last / (min(first, 1.0) if sign < 0 else max(first, 1.0)))
    spread = math.sqrt(chain.chance + (0 if sign < 0 else 5 / max(chain.produced.units, 1)))
    # A log-normal factor of mean 1 has a logarithm of mean −½·spread².
    significant = abs(total + spread**2 / 2) > _SIGMAS * spread
    large = sign * from_one > (_VANISHED if sign < 0 else _EXPLODED)
    return total if large and significant and sign * total > 0 else None


def _words(chain: Chain, total: float, factor: float, wanted: float) -> str:
    return (
        f"E[z²]/E[x²] is {factor:.3g} here where what follows wants {wanted:.3g}; over "
        f"{chain.depth + 1} layers the mean square changes by a factor {_exp(total):.3g}"
    )


def _evidence(
    std: float, fans: tuple[float, float] | None, chain: Chain, total: float, factor: float, wanted: float
) -> dict[str, float | None]:
    scale = math.sqrt(wanted / factor) if factor > 0 else math.inf
    return {
        "realised": std,
        "expected": std * scale,
        "ratio": 1 / scale if scale > 0 else math.inf,
        "var_times_fan_in": None if fans is None else std**2 * fans[0],
        "factor": factor,
        "wanted": wanted,
        "layers": chain.depth + 1,
        "total": _exp(total),
    }


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf


def _remedy(factor: float, wanted: float) -> str:
    if math.isclose(factor, wanted, rel_tol=0.1):
        return "scale the residual branches, or normalize between layers: no gain of one layer is to blame"
    return (
        f"draw it with Var(W) = {wanted:.3g}/fan_in (musigma.init.initialize does), or normalize in between"
    )
