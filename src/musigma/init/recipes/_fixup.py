"""Fixup: residual networks without normalization."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from musigma.graph import Edge, Graph, Node
from musigma.init.recipes._recipe import (
    Weights,
    changed,
    graph_of,
    redrawn,
    register,
    streams_of,
)
from musigma.init.recipes._structure import heads

if TYPE_CHECKING:
    from musigma.init.planning import Entry, Plan
    from musigma.init.recipes._structure import Block

_SOURCE = "Zhang, Dauphin & Ma 2019"
_NORMED = (
    "Fixup takes the place of normalization, but {} norms ran: take them out (nn.Identity), or use "
    "scheme='zero_gamma'"
)


@dataclass(frozen=True)
class Fixup:
    """The last layer of every branch and the head at 0, the branch's others scaled down by the depth.

    Formula: std = L^(−1/(2m−2))·gain/√fan_in for the layers of a branch that has m of them, L branches in
    all, but the last one, which is 0, as is the head. A step of gradient descent then changes the
    network's output by an amount that doesn't depend on L. Learned scales in a branch start at 1 and biases
    at 0 (the paper adds one of each: `nn.Parameter(torch.ones(()))` on the branch, a scalar bias before
    every layer and activation).

    Example:
        >>> import torch, musigma as ms
        >>> class Block(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.a, self.b = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        ...     def forward(self, x):
        ...         return x + self.b(torch.relu(self.a(x)))
        >>> net = torch.nn.Sequential(*(Block() for _ in range(4)), torch.nn.Linear(8, 2))
        >>> plan = ms.init.plan(net, torch.ones(2, 8), scheme="fixup")
        >>> plan["0.a.weight"].std, plan["0.b.weight"].std, plan["4.weight"].std   # 4^(−1/2)·√(2/8)
        (0.25, 0.0, 0.0)

    References:
        Zhang, Dauphin & Ma 2019, Fixup Initialization: Residual Learning Without Normalization, section 3.
    """

    name: str = "fixup"

    def __call__(self, plan: Plan, model: nn.Module) -> Plan:
        """The plan with Fixup's laws; see `Recipe`."""
        graph, weights = graph_of(plan), Weights(plan, model)
        blocks = [block for stream in streams_of(plan, "Fixup") for block in stream.blocks]
        count = len(blocks)
        entries: dict[str, Entry] = {}
        ends: dict[str, Entry] = {}
        for block in blocks:
            inside = weights.of(block.nodes)
            last = weights.ends(block)
            ends |= {e.tensor: redrawn(e, "zeros", f"ends a branch: 0 ({_SOURCE})") for e in last}
            depth = _depth(graph, block)
            power = -1 / (2 * depth - 2) if depth > 1 else 0.0
            for entry in inside:
                std = count**power * weights.he_std(entry)
                said = f"in a branch of {depth} layers: {count}^({power:.3g})·He's ({_SOURCE})"
                entries[entry.tensor] = redrawn(entry, "normal", said, std=std)
            for node in (*block.branch.scalings, *_scales(graph, block.branch.nodes)):
                entries |= _scale_at_one(graph, weights, node)
        entries |= ends
        norms = len(graph.norms())
        notes = [_NORMED.format(norms)] if norms else []
        for entry in weights.of(heads(graph)):
            if entry.tied or entry.op in ("embedding",):
                notes.append(f"{entry.tensor} is the head and tied to an embedding: Fixup's 0 was left out")
            elif entry.tensor not in entries:
                entries[entry.tensor] = redrawn(entry, "zeros", f"the head: 0 ({_SOURCE})")
        return changed(plan, entries, notes, scheme=self.name)


def _scales(graph: Graph, nodes: tuple[Node, ...]) -> list[Node]:
    return [n for n in nodes if n.op == "mul" and n.parameters and not graph.weights(n)]


def _scale_at_one(graph: Graph, weights: Weights, node: Node) -> dict[str, Entry]:
    found = {}
    for name in node.parameters:
        entry = weights.blank(name, node)
        said = f"a scale in a branch starts at 1 ({_SOURCE})"
        found[entry.tensor] = redrawn(entry, "ones", said)
    return found


def _depth(graph: Graph, block: Block) -> int:
    """The most layers that a signal passes one after the other in a branch."""
    layers = {node.index for node in block.nodes}
    longest: dict[int, int] = {}
    for node in block.branch.nodes:
        own = 0 if node.index not in layers else 2 if node.op == "multi_head_attention" else 1
        behind = (longest.get(int(s), 0) for s in node.inputs if isinstance(s, Edge))
        longest[node.index] = own + max(behind, default=0)
    return longest[block.branch.end.index]


register(Fixup())
