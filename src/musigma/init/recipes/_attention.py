"""Laws for a Transformer's branch: values, outputs and MLPs by one gain, queries and keys by another."""

from __future__ import annotations

from typing import TYPE_CHECKING

from musigma.graph import Graph, Node, kinds
from musigma.init._fans import Fans
from musigma.init.recipes._recipe import Weights, redrawn
from musigma.init.recipes._structure import Block
from musigma.init.recipes._values import value_rows

if TYPE_CHECKING:
    from musigma.init.planning import Entry


def scaled_block(
    graph: Graph, weights: Weights, block: Block, gain: float, *, scheme: str, reason: str
) -> dict[str, Entry]:
    """The weights of one branch from one of Glorot's schemes: scaled, all but queries and keys.

    Args:
        graph: the model as it ran.
        weights: the plan's entries.
        block: the branch.
        gain: the factor for values, output projection and MLP; queries and keys get 1.
        scheme: "xavier_normal" or "xavier_uniform".
        reason: why, for the entries.

    Returns:
        Tensor → new entry.
    """
    values = value_rows(graph, block)
    before = _before_attention(graph, block)
    entries: dict[str, Entry] = {}
    for node in block.nodes:
        for name in graph.weights(node):
            entry = weights.get(name)
            if entry is None:
                continue
            fans = weights.fans(entry)
            if sizes := values.get(name):
                entries[entry.tensor] = _packed(entry, node, sizes, fans.fan_in, gain, scheme, reason)
                continue
            ends = name in {s.name for s in node.arguments.get("out_proj_weight", ()) if hasattr(s, "name")}
            asks = not ends and name not in values and (node.index in before or node.op in kinds.ATTENTIONS)
            said = f"makes queries or keys: gain 1 ({reason})" if asks else reason
            options = {"gain": 1.0 if asks else gain, "fans": fans}
            entries[entry.tensor] = redrawn(entry, scheme, said, **options)
    return entries


def _before_attention(graph: Graph, block: Block) -> frozenset[int]:
    """The nodes that attention reads its queries, keys and values from."""
    found: frozenset[int] = frozenset()
    for node in block.branch.nodes:
        if node.op in kinds.ATTENTIONS | kinds.SOFTMAXES:
            found |= graph.ancestors(node) - {node.index}
    return found


def _packed(
    entry: Entry,
    node: Node,
    sizes: tuple[int, ...],
    fan_in: float,
    gain: float,
    scheme: str,
    reason: str,
) -> Entry:
    # Alternately what is asked with and what is answered, as `value_rows` tells it.
    gains = tuple(gain if i % 2 else 1.0 for i in range(len(sizes)))
    answered = sum(sizes[1::2])
    # addmm and matmul hold their weight as (in, out).
    dim = 0 if "weight" in node.arguments or node.op in kinds.ATTENTIONS else 1
    return redrawn(
        entry,
        "stacked",
        f"values by gain {gain:.3g}, queries and keys by 1 ({reason})",
        gains=gains,
        sizes=sizes,
        dim=dim,
        scheme=scheme,
        fans=Fans(fan_in, answered),
    )
