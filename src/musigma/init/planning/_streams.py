"""Which residual branches add up to one signal, and in what order."""

from __future__ import annotations

from dataclasses import dataclass

from musigma.graph import Branch, Edge, Graph, Source, kinds


@dataclass(frozen=True)
class Place:
    """Where a branch stands in its stream.

    Attributes:
        branch: the branch.
        index: 1 for the first one.
        count: how many branches the stream adds up before a norm or a new layer replaces it.
        start: the value that the stream starts from.
    """

    branch: Branch
    index: int
    count: int
    start: Source


def streams(graph: Graph) -> tuple[Place, ...]:
    """Every residual branch with its place in its stream.

    Two branches add to one stream if the second skips over values that the first one's sum is part of:
    through views, dropout, pooling, activations and scales, and not through a norm, which makes them new.
    """
    branches = graph.residual_branches()
    sums = {branch.add.index: branch for branch in branches}
    before = {branch.add.index: _previous(graph, branch, sums) for branch in branches}
    members: dict[int, list[Branch]] = {}
    root: dict[int, int] = {}
    for branch in branches:
        earlier = before[branch.add.index]
        root[branch.add.index] = branch.add.index if earlier is None else root.get(earlier, earlier)
        members.setdefault(root[branch.add.index], []).append(branch)
    return tuple(
        Place(branch, index + 1, len(group), group[0].start)
        for group in members.values()
        for index, branch in enumerate(group)
    )


def _previous(graph: Graph, branch: Branch, sums: dict[int, Branch]) -> int | None:
    """The sum that a branch's skip path comes from."""
    source = branch.start
    for node in branch.skip:
        if node.index in sums and node is not branch.add:
            return node.index
    normed = {norm.node.index for norm in graph.norms()}
    while isinstance(source, Edge):
        node = graph.nodes[source]
        if node.index in sums:
            return node.index
        if node.index in normed or node.op in kinds.NORMS:
            return None
        live = [s for s in node.inputs if graph.is_live(s)]
        if graph.weights(node) or len({_key(s) for s in live}) != 1:
            return None
        source = live[0]
    return None


def _key(source: Source) -> object:
    return source.key if isinstance(source, Edge) else source
