"""The residual structure of a recorded model: streams, their branches, and the layers these belong to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from musigma.graph import Branch, Edge, Graph, Node, Source, kinds

_MIXING = kinds.PRODUCTS | kinds.CONVOLUTIONS | kinds.TRANSPOSED_CONVOLUTIONS | {"multi_head_attention"}


@dataclass(frozen=True)
class Block:
    """One residual branch, as recipes count it.

    Attributes:
        branch: the branch.
        number: its place among the branches of its stream, from 1.
        layer: the Transformer layer it belongs to, from 1; without attention each branch is a layer.
        kind: "attention", "cross" (attention to another stream) or "other".
        nodes: its weight layers in execution order, with those that read another stream (keys and values).
        last: the weight layers that no other weight layer of the branch follows.
    """

    branch: Branch
    number: int
    layer: int
    kind: str
    nodes: tuple[Node, ...]
    last: tuple[Node, ...]


@dataclass(frozen=True)
class Stream:
    """The branches that add to one signal, in order: an encoder, a decoder, a ResNet.

    Attributes:
        blocks: the branches.
        layers: how many Transformer layers they make.
        decodes: whether one of them attends to another stream.
        encodes: whether another stream attends to it.
    """

    blocks: tuple[Block, ...]
    layers: int
    decodes: bool
    encodes: bool


def streams(graph: Graph) -> tuple[Stream, ...]:
    """The residual streams of a recorded model, in execution order.

    Args:
        graph: the model as it ran.

    Returns:
        A stream each; none if nothing is added to a skip path.

    Example:
        >>> import torch
        >>> from musigma.graph import record
        >>> model = torch.nn.Transformer(8, 2, 3, 2, 16, batch_first=True)
        >>> x = torch.zeros(1, 3, 8)
        >>> [(s.layers, len(s.blocks), s.encodes) for s in streams(record(model, (x, x)))]
        [(3, 6, True), (2, 6, False)]

    References:
        None.
    """
    chains = _chains(graph)
    adds = {branch.add.index: i for i, chain in enumerate(chains) for branch in chain}
    encoders = {adds[add] for chain in chains for branch in chain for add in _others(graph, branch, adds)}
    return tuple(_stream(graph, chain, adds, encodes=i in encoders) for i, chain in enumerate(chains))


def heads(graph: Graph) -> list[Node]:
    """The weight layers whose output reaches the model's through no other one and no residual sum.

    Args:
        graph: the model as it ran.

    Returns:
        The nodes, from the output back.
    """
    sums = {branch.add.index for branch in graph.residual_branches()}
    found, pending, seen = [], [int(s) for s in graph.output if isinstance(s, Edge)], set()
    while pending:
        index = pending.pop()
        node = graph.nodes[index]
        if index in seen or index in sums:
            continue
        seen.add(index)
        if graph.weights(node):
            found.append(node)
        else:
            pending += [int(s) for s in node.inputs if isinstance(s, Edge) and graph.is_live(s)]
    return found


def _stream(graph: Graph, chain: list[Branch], adds: dict[int, int], *, encodes: bool) -> Stream:
    kinds_of = [_kind(graph, branch, adds) for branch in chain]
    attends = "attention" in kinds_of
    blocks, layer = [], 0
    for number, (branch, kind) in enumerate(zip(chain, kinds_of, strict=True), 1):
        # A Transformer's layer begins with its self-attention.
        layer += kind == "attention" or not attends or layer == 0
        nodes = _weight_nodes(graph, branch, adds)
        blocks.append(Block(branch, number, layer, kind, nodes, _last(graph, nodes, branch)))
    return Stream(tuple(blocks), layer, "cross" in kinds_of, encodes)


def _chains(graph: Graph) -> list[list[Branch]]:
    """Branches in groups, each of which starts where the one before was added."""
    chains: list[list[Branch]] = []
    tips: dict[object, list[Branch]] = {}
    for branch in graph.residual_branches():
        # A parallel branch starts where the one before it started, and skips over that one's sum.
        skipped: list[object] = [node.index for node in branch.skip if node.index in tips]
        found = skipped or [key for key in _behind(graph, branch.start) if key in tips]
        chain = tips.pop(found[0]) if found else []
        if not chain:
            chains.append(chain)
        chain.append(branch)
        tips[branch.add.index] = chain
    return chains


def _key(source: Source) -> object:
    return int(source) if isinstance(source, Edge) else source


def _behind(graph: Graph, source: Source) -> Iterator[object]:
    """A value and those it was made from, for as long as each is made from one other."""
    yield _key(source)
    while isinstance(source, Edge):
        live = [s for s in graph.nodes[source].inputs if graph.is_live(s)]
        if len({_key(s) for s in live}) != 1:
            return
        source = live[0]
        yield _key(source)


def _inside(graph: Graph, branch: Branch, adds: dict[int, int]) -> tuple[Node, ...]:
    """The nodes that a branch's end is made from, back to its start and to other streams."""
    start = _key(branch.start)
    seen, pending = {branch.end.index}, [branch.end.index]
    while pending:
        for source in graph.nodes[pending.pop()].inputs:
            if isinstance(source, Edge) and int(source) not in seen and int(source) != start:
                if int(source) in adds or not graph.is_live(source):
                    continue
                seen.add(int(source))
                pending.append(int(source))
    # What runs before the start and needs nothing of it (masks, positions) mixes no features of the branch.
    return tuple(graph.nodes[index] for index in sorted(seen))


def _weight_nodes(graph: Graph, branch: Branch, adds: dict[int, int]) -> tuple[Node, ...]:
    return tuple(n for n in _inside(graph, branch, adds) if n.op in _MIXING and graph.weights(n))


def _last(graph: Graph, nodes: tuple[Node, ...], branch: Branch) -> tuple[Node, ...]:
    indices = {node.index for node in nodes}
    within = {node.index for node in branch.nodes}
    return tuple(n for n in nodes if n.index in within and not _reaches(graph, n, indices, branch))


def _reaches(graph: Graph, node: Node, others: set[int], branch: Branch) -> bool:
    pending, seen = [node.index], {node.index}
    while pending:
        for reader in graph.consumers(graph.nodes[pending.pop()]):
            if reader.index in seen or reader.index > branch.end.index:
                continue
            if reader.index in others:
                return True
            seen.add(reader.index)
            pending.append(reader.index)
    return False


def _others(graph: Graph, branch: Branch, adds: dict[int, int]) -> set[int]:
    """The sums of other streams that a branch reads."""
    sources = (s for node in _inside(graph, branch, adds) for s in node.inputs if isinstance(s, Edge))
    return {int(s) for s in sources if int(s) in adds and adds[int(s)] != adds[branch.add.index]}


def _kind(graph: Graph, branch: Branch, adds: dict[int, int]) -> str:
    if not any(node.op in kinds.ATTENTIONS | kinds.SOFTMAXES for node in branch.nodes):
        return "other"
    return "cross" if _others(graph, branch, adds) else "attention"
