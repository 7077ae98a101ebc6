"""saturated: pre-activations so large that tanh or a sigmoid is flat for nearly all of them.

A unit at |z| > 3 passes on a hundredth of its gradient. With an rms of 6 that is two units of three at the
start, in every layer: the signal is bounded and looks well, and nothing is learnt.
"""

from collections.abc import Iterator

from musigma.graph import Edge, Graph, Node, kinds
from musigma.init.auditing._report import Finding
from musigma.init.auditing._scene import Scene, check

_BENT = frozenset(("tanh", "sigmoid", "hardtanh", "hardsigmoid"))
# P(|z| > 3) = 0.62 for z ~ N(0, 6²).
_RMS = 6.0


@check("saturated")
def check_saturated(scene: Scene) -> Iterator[Finding]:
    """One finding a weight whose output goes into a saturating activation as it is."""
    if scene.trained or scene.graph is None or scene.signal is None:
        return
    for node in scene.graph.weight_layers():
        made = scene.signal.outputs.get(node.index)
        bent = None if made is None or made.rms < _RMS else _bending(scene.graph, node)
        if made is None or bent is None:
            continue
        for facts in scene.weights(node):
            # Twice He's variance: below that the inputs are too large, not the weights.
            own = facts.fans is None or facts.std**2 * facts.fans.fan_in > 4
            if scene.as_planned(facts) or facts.kind == "embedding" or not own:
                continue
            yield Finding(
                facts.name,
                f"saturated: its pre-activations have an rms of {made.rms:.3g} where {bent.op} is flat "
                f"from 3 on.",
                {
                    "realised": facts.std,
                    "rms": made.rms,
                    "expected": law.std if (law := scene.expected.get(facts.name)) is not None else None,
                    "activation": bent.op,
                    "n": facts.count,
                },
                "draw it with Var(W) = gain²/fan_in, and standardize what comes in",
            )


def _bending(graph: Graph, node: Node) -> Node | None:
    """The saturating activation behind a layer, that is not the model's output."""
    for reader in graph.consumers(node):
        if reader.op in kinds.VIEWS:
            found = _bending(graph, reader)
            if found is not None:
                return found
        returned = any(isinstance(s, Edge) and int(s) == reader.index for s in graph.output)
        if reader.op in _BENT and not returned:
            return reader
    return None
