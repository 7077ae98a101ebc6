"""samples-collapse: the activations keep a size, but no longer differ between examples.

Torch's default holds the standard deviation of a deep ReLU net up by its biases: 0.028 after twenty layers,
of which 1e-12 tells examples apart, so that the output is one number for all inputs. It is said where less
than a hundred-thousandth of the second moment is between examples (a gradient step on what is common to them
is then three hundred times one on what tells them apart: a learning rate that one bears starves the other),
and less than a hundredth of what a critical ReLU net of that depth would have kept: healthy nets make
examples alike too, but only as a power of the depth.
"""

import math
from collections.abc import Iterator

from musigma.graph import Node, kinds
from musigma.init.auditing._chains import Chain, blame, chains
from musigma.init.auditing._report import Finding
from musigma.init.auditing._scene import Scene, check

_ALIKE = 1e-5
_BELOW_CRITICAL = 0.01


@check("samples-collapse")
def check_collapse(scene: Scene) -> Iterator[Finding]:
    """One finding for every weight whose gain is to blame."""
    if scene.trained or scene.signal is None or (scene.signal.batch or 0) < 2:
        return
    collapsed = list(_collapsed(scene))
    for chain, critical, (facts, factor, wanted) in blame(scene, collapsed, -1):
        last = chain.received
        share = math.sqrt(last.share or 0.0)
        yield Finding(
            facts.name,
            f"samples-collapse: after {chain.depth} layers what differs between examples is {share:.2g} of "
            f"the rms ({last.rms:.3g}), {math.sqrt(critical):.2g} in a critical net; E[z²]/E[x²] is "
            f"{factor:.3g} here where {wanted:.3g} is wanted.",
            {
                "realised": facts.std,
                "expected": facts.std * math.sqrt(wanted / factor) if factor > 0 else None,
                "between_over_rms": share,
                "critical_between_over_rms": math.sqrt(critical),
                "rms": last.rms,
                "std_between": share * last.rms,
                "layers": chain.depth,
                "factor": factor,
                "wanted": wanted,
                "var_times_fan_in": None if facts.fans is None else facts.std**2 * facts.fans.fan_in,
                "n": facts.count,
            },
            _remedy(scene.as_planned(facts), wanted),
        )


def _remedy(planned: bool, wanted: float) -> str:
    if planned:
        return "normalize over the batch between layers: no law of the weights keeps examples apart here"
    return (
        f"draw it with Var(W) = {wanted:.3g}/fan_in and biases of 0 (musigma.init.initialize does), or "
        f"normalize over the batch between layers"
    )


def _restores(node: Node) -> bool:
    """BatchNorm makes what differs between examples large again; norms of one example don't."""
    return node.op in kinds.BATCH_NORMS | kinds.EMBEDDINGS


def _collapsed(scene: Scene) -> Iterator[tuple[Chain, float]]:
    """Chains whose last layer receives next to nothing that differs, and what a critical net keeps there."""
    assert scene.signal is not None
    whole = 1 - 1 / (scene.signal.batch or 1)
    cosines: dict[int, float] = {}
    for chain in chains(scene, _restores):
        start, share = chain.start.share, chain.received.share
        if start is None or not start > 0:
            continue
        if chain.parent is None or chain.parent.node.index not in cosines:
            cosines[chain.node.index] = 1 - min(start / whole, 1.0)
            continue
        cosine = cosines[chain.node.index] = _relu_cosine(cosines[chain.parent.node.index])
        critical = (1 - cosine) * whole
        if share is not None and share < _ALIKE and share < _BELOW_CRITICAL * critical:
            yield chain, critical


def _relu_cosine(c: float) -> float:
    """The cosine of two examples after a ReLU layer with He's variance (Cho & Saul 2009, eq. 6, n = 1)."""
    c = max(-1.0, min(1.0, c))
    return (math.sqrt(1 - c * c) + c * (math.pi - math.acos(c))) / math.pi
