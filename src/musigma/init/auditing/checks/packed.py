"""packed-as-one-matrix: several matrices in one tensor, drawn as if they were one.

Query, key and value of an attention, or the gates of an LSTM, are stacked in one weight. Xavier's variance
counts the outputs of all of them (a packed 3d × d weight gets half of each d × d one's), and an orthogonal
draw makes the columns of the stack orthonormal, not the matrices.
"""

import math
from collections.abc import Iterator

from torch import nn

from musigma.graph import Edge, Node, kinds
from musigma.init._fans import Fans
from musigma.init.auditing._candidates import SUFFIX, cut, normal, uniform
from musigma.init.auditing._facts import Facts
from musigma.init.auditing._identify import within
from musigma.init.auditing._interval import std_interval
from musigma.init.auditing._report import Finding
from musigma.init.auditing._scene import Scene, check

_LAWS = {"normal": normal, "uniform": uniform, "truncated": cut}
_REMEDY = "draw each matrix by itself: musigma.init.apply does, or musigma.init.per_block(scheme, {parts})"


@check("packed-as-one-matrix")
def check_packed(scene: Scene) -> Iterator[Finding]:
    """One finding a packed weight."""
    for facts in scene.facts:
        parts = _parts(scene, facts)
        if parts < 2 or scene.as_planned(facts):
            continue
        found = scene.laws[facts.name]
        if found.label is not None and found.label.startswith("orthogonal as one"):
            yield _orthogonal(facts, parts)
        elif scene.family(facts) and not (found.label or "").startswith("torch_default"):
            yield from _xavier(scene, facts, parts)


def _orthogonal(facts: Facts, parts: int) -> Finding:
    each = 1 / math.sqrt(max(facts.shape[0] // parts, facts.shape[1]))
    return Finding(
        facts.name,
        f"packed-as-one-matrix: its {parts} matrices are orthogonal as one, none of them by itself: "
        f"std {facts.std:.4g} where each needs {each:.4g}.",
        {
            "realised": facts.std,
            "expected": each,
            "ratio": facts.std / each,
            "parts": parts,
            "n": facts.count,
        },
        _REMEDY.format(parts=parts),
    )


def _xavier(scene: Scene, facts: Facts, parts: int) -> Iterator[Finding]:
    shape = _LAWS[scene.family(facts)]
    whole = facts.torch_fans
    assert whole is not None
    one, each = shape(_spread(whole)), shape(_spread(Fans(whole.fan_in, whole.fan_out / parts)))
    if not within(facts, one, scene.z) or within(facts, each, scene.z) or _explained(scene, facts):
        return
    low, high = std_interval(each, facts.count, scene.z)
    yield Finding(
        facts.name,
        f"packed-as-one-matrix: std {facts.std:.4g} is Xavier's for one matrix of {whole.fan_out} outputs; "
        f"each of the {parts} it stacks needs {each.std:.4g}.",
        {
            "realised": facts.std,
            "expected": each.std,
            "interval": [low, high],
            "ratio": facts.std / each.std,
            "parts": parts,
            "n": facts.count,
        },
        _REMEDY.format(parts=parts),
    )


def _spread(fans: Fans) -> float:
    return math.sqrt(2 / (fans.fan_in + fans.fan_out))


def _explained(scene: Scene, facts: Facts) -> bool:
    """Whether a law that scales with the fans of one block, or the layer's own, has this spread too."""
    found = scene.laws[facts.name]
    if isinstance(facts.owner, nn.MultiheadAttention):
        return False  # its constructor does it
    labels = [found.label or "", *found.others]
    fixed = ("normal(", "truncated_normal(", "uniform(")
    # Where the module doesn't know that it stacks several, its own fans are those of one matrix.
    one = "xavier" if facts.fans == facts.torch_fans else "\0"
    return any(
        not label.startswith((*fixed, one)) and not label.endswith(SUFFIX) for label in labels if label
    )


def _parts(scene: Scene, facts: Facts) -> int:
    """How many matrices a weight stacks: known of torch's layers, seen by the cut of its output elsewhere."""
    if facts.kind != "weight":
        return 0
    if facts.parts and not facts.parts[0].startswith("group"):
        return len(facts.parts)
    if facts.parts or facts.values.dim() != 2 or scene.graph is None:
        return 0
    return max((_cuts(scene, use) for use in scene.uses(facts)), default=0)


def _cuts(scene: Scene, use: Node) -> int:
    """3 where an attention takes queries, keys and values from one layer's output alone, else 0."""
    graph = scene.graph
    assert graph is not None
    pending, own = [use], {use.index}
    while pending:
        for reader in graph.consumers(pending.pop()):
            signals = [s for s in reader.inputs if graph.is_live(s)]
            if reader.index in own or not all(isinstance(s, Edge) and int(s) in own for s in signals):
                continue
            if len(signals) > 1 and reader.op in kinds.ATTENTIONS | kinds.PRODUCTS:
                return 3 if use.outputs[0].shape[-1] % 3 == 0 else 0
            # Rotary embeddings and scales are part of the way.
            if reader.op in kinds.VIEWS | kinds.ELEMENTWISE | kinds.CONCATENATIONS:
                own.add(reader.index)
                pending.append(reader)
    return 0
