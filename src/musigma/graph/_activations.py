"""Which activation follows a layer, also one that is written out in elementwise arithmetic."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import torch.nn.functional as F

from musigma.graph import _kinds as kinds
from musigma.graph._nodes import Edge, Node
from musigma.graph._recognize import Elementwise, bends, known, recognize
from musigma.graph._replay import Function, can_rerun
from musigma.graph._residual import adds

if TYPE_CHECKING:
    from musigma.graph._graph import Graph


@dataclass(frozen=True)
class Activation:
    """The activation behind a layer.

    Attributes:
        name: `relu`, `leaky_relu`, `gelu`, ...; what arithmetic computes is named by its values where
            they are a known activation's (`x * sigmoid(x)` is `silu`, `x.clamp(min=0)` is `relu`), else
            by its ops: `sin*square`.
        node: the node that gives the result, scale included.
        kwargs: its numbers, such as `{"negative_slope": 0.2}`.
        fn: the activation, and the constant scale that directly follows it, as a function of one tensor;
            None where it takes more (glu, or a PReLU whose slopes differ).
        use: the node that used the parameter.
        between: the nodes between use and activation, in execution order.
        nodes: the nodes that the activation consists of, `node` last.
        only: whether the layer's output goes nowhere else.
    """

    name: str
    node: Node
    kwargs: Mapping[str, object]
    fn: Elementwise | None
    use: Node
    between: tuple[Node, ...]
    nodes: tuple[Node, ...]
    only: bool


def find_activation(graph: Graph, parameter: str) -> Activation | None:
    """The nearest activation behind the first use of a parameter that has one.

    May lie between: views, casts, dropout, pooling, padding, upsampling, norms, sums with and products
    by something that doesn't depend on the example (a bias, a scale), and a sum with another signal if
    that sum goes nowhere but into the activation (the end of a ResNet block; not the stream of a
    pre-norm Transformer, which many layers add to). A product of two signals ends the way: in
    `silu(gate(x)) * up(x)` the gate is followed by silu and `up` by nothing. Softmax is no activation
    in this sense. Of several readers the one that ran first counts, and `only` is False.
    """
    for use in graph.uses(parameter):
        found = _search(graph, use)
        if found is not None:
            return found
    return None


def _search(graph: Graph, use: Node) -> Activation | None:
    if _fused(use):
        return _made_fused(graph, use, use, {})
    pending: list[tuple[int, int]] = [(use.index, output) for output in range(len(use.outputs))]
    came_from: dict[int, tuple[int, int]] = {}
    while pending:
        key = heapq.heappop(pending)
        edge = Edge(*key)
        core = _activation_at(graph, edge)
        if core:
            return _made(graph, use, edge, core, came_from)
        for reader in graph.consumers(edge):
            if reader.index not in came_from and _fused(reader) and _reads_as_signal(reader, edge):
                came_from[reader.index] = key
                return _made_fused(graph, use, reader, came_from)
            if reader.index not in came_from and _carries(graph, reader):
                came_from[reader.index] = key
                for output in range(len(reader.outputs)):
                    heapq.heappush(pending, (reader.index, output))
    return None


def _made(
    graph: Graph,
    use: Node,
    edge: Edge,
    core: tuple[Node, ...],
    came_from: Mapping[int, tuple[int, int]],
) -> Activation:
    nodes = _with_scale(graph, edge, core)
    name, kwargs = _name(edge, core, nodes)
    between = _between(graph, use, int(edge), came_from)
    only = _feeds_only(graph, edge, {node.index for node in nodes}) and _is_only_way(graph, [use, *between])
    return Activation(name, nodes[-1], kwargs, _function(edge, nodes), use, between, nodes, only)


def _fused(node: Node) -> str | None:
    """The activation that a norm of musigma applies to its own result."""
    name = node.options.get("activation")
    return name if isinstance(name, str) else None


def _made_fused(graph: Graph, use: Node, node: Node, came_from: Mapping[int, tuple[int, int]]) -> Activation:
    name = str(_fused(node))
    between = () if node is use else _between(graph, use, came_from[node.index][0], came_from)
    only = node is use or _is_only_way(graph, [use, *between, node])
    return Activation(name, node, {}, known(name), use, between, (node,), only)


def _between(
    graph: Graph, use: Node, step: int, came_from: Mapping[int, tuple[int, int]]
) -> tuple[Node, ...]:
    """The nodes from a use to a step of the search, without the use."""
    between: list[Node] = []
    while step != use.index:
        between.append(graph.nodes[step])
        step = came_from[step][0]
    return tuple(reversed(between))


def _is_only_way(graph: Graph, way: list[Node]) -> bool:
    return all(
        _feeds_only(graph, Edge(node.index, output), {after.index})
        for node, after in pairwise(way)
        for output in range(len(node.outputs))
    )


def _name(edge: Edge, core: tuple[Node, ...], nodes: tuple[Node, ...]) -> tuple[str, dict[str, object]]:
    scaled = all(node.op in _AFFINE for node in nodes[len(core) :])
    if len(core) == 1 and _is_named(core[0]) and scaled:
        numbers = _numbers(core[0])
        name = "gelu_tanh" if numbers.pop("approximate", "none") == "tanh" else core[0].op
        return name, numbers
    function = _function(edge, nodes)
    found = None if function is None else recognize(function)
    if found is None and scaled and nodes != core:
        return _name(edge, core, core)  # a constant scale leaves an activation its name
    return found or ("*".join(node.op for node in nodes), {})


def _feeds_only(graph: Graph, edge: Edge, readers: set[int]) -> bool:
    return not _returned(graph, edge) and all(node.index in readers for node in graph.consumers(edge))


def _returned(graph: Graph, edge: Edge) -> bool:
    return any(isinstance(source, Edge) and source.key == edge.key for source in graph.output)


def _activation_at(graph: Graph, edge: Edge) -> tuple[Node, ...]:
    """The elementwise nodes that take in all of a value and bend it; else an activation that reads it too."""
    region = list(_region(graph, edge))
    whole = _first_part(graph, edge, region, partly=False)
    if whole and _is_activation(edge, whole):
        return whole
    if not whole:
        # Of several readers, arithmetic such as a square may be the start of anything: of a norm, say.
        part = _first_part(graph, edge, region, partly=True)
        if any(map(_is_named, part)) and _is_activation(edge, part):
            return part
    # glu and a PReLU with many slopes are no functions of one number, and so in no region.
    direct = [node for node in graph.consumers(edge) if _is_named(node) and _reads_as_signal(node, edge)]
    return (direct[0],) if direct and direct[0] not in region else ()


def _is_activation(edge: Edge, nodes: tuple[Node, ...]) -> bool:
    return (len(nodes) == 1 and _is_named(nodes[0])) or bends(Function(nodes, edge))


def _first_part(graph: Graph, edge: Edge, region: list[Node], *, partly: bool) -> tuple[Node, ...]:
    """The smallest part of a region with one result, that takes in all of the value unless `partly`."""
    for count in range(1, len(region) + 1):
        inside = _behind(graph, region[:count])
        indices = {node.index for node in inside}
        takes_all = _feeds_only(graph, edge, indices) or (
            partly and not _meets_again(graph, inside[-1], region)
        )
        if takes_all and all(_feeds_only(graph, Edge(node.index), indices) for node in inside[:-1]):
            return inside
    return ()


def _meets_again(graph: Graph, node: Node, region: list[Node]) -> bool:
    """Whether a result meets the value that it comes from, as sigmoid does in `x * sigmoid(x)`."""
    return any(
        reader in region and sum(graph.is_live(source) for source in reader.inputs) > 1
        for reader in graph.consumers(node)
    )


# No activation is written in more steps than this; mish in exp, log, tanh and mul takes six.
_LONGEST: Final = 24


def _region(graph: Graph, edge: Edge) -> Iterator[Node]:
    """The elementwise nodes that depend on one value alone, in execution order."""
    known: dict[object, object] = {edge.key: None}
    pending = [node.index for node in graph.consumers(edge)]
    seen = set(pending)
    heapq.heapify(pending)
    while pending and len(known) <= _LONGEST:
        node = graph.nodes[heapq.heappop(pending)]
        if not can_rerun(node, known):
            continue
        known[(node.index, 0)] = None
        yield node
        for reader in graph.consumers(node):
            if reader.index not in seen:
                seen.add(reader.index)
                heapq.heappush(pending, reader.index)


def _behind(graph: Graph, region: list[Node]) -> tuple[Node, ...]:
    """The nodes of a region that its last one depends on, itself included."""
    needed = {region[-1].index}
    for node in reversed(region):
        if node.index in needed:
            needed |= {int(source) for source in node.inputs if isinstance(source, Edge)}
    return tuple(node for node in region if node.index in needed)


_SHAPERS: Final = kinds.ELEMENTWISE - kinds.ACTIVATIONS


def _with_scale(graph: Graph, edge: Edge, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    """Take in what is done to the activation's result before anyone else sees it: `relu(x) ** 2`."""
    while True:
        result = Edge(nodes[-1].index)
        readers = graph.consumers(result)
        known = {edge.key: None} | {(node.index, 0): None for node in nodes}
        if len(readers) != 1 or readers[0].op not in _SHAPERS or not can_rerun(readers[0], known):
            return nodes
        if not _feeds_only(graph, result, {readers[0].index}):
            return nodes
        nodes = (*nodes, readers[0])


def _is_named(node: Node) -> bool:
    return node.op in kinds.ACTIVATIONS


def _reads_as_signal(node: Node, edge: Edge) -> bool:
    signal = node.arguments.get("input", ())
    return any(isinstance(source, Edge) and source.key == edge.key for source in signal)


def _function(edge: Edge, nodes: tuple[Node, ...]) -> Elementwise | None:
    if nodes[0].op == "rrelu" and len(nodes) == 1:  # its slopes are drawn: the mean slope stands for them
        lower, upper = float(nodes[0].options["lower"]), float(nodes[0].options["upper"])  # type: ignore[arg-type]
        return lambda x: F.leaky_relu(x, (lower + upper) / 2)
    known: dict[object, object] = {edge.key: None}
    for node in nodes:
        if node.op in kinds.GATES or not can_rerun(node, known):
            return None
        known[(node.index, 0)] = None
    return Function(nodes, edge)


_CARRIERS: Final = (
    kinds.VIEWS | kinds.DROPOUTS | kinds.POOLINGS | kinds.UPSAMPLINGS | kinds.PADDINGS | kinds.NORMS
) - kinds.ADDITIONS
_AFFINE: Final = kinds.SCALINGS | kinds.SUBTRACTIONS | frozenset(("add",))


def _carries(graph: Graph, node: Node) -> bool:
    if node.op in _CARRIERS and not adds(node):
        return True
    signals = sum(graph.is_live(source) for source in node.inputs)
    if node.op in _AFFINE and signals == 1:
        return True
    return adds(node) and _ends_in_activation(graph, node)


def _ends_in_activation(graph: Graph, node: Node) -> bool:
    """Whether a sum goes into one activation and nowhere else."""
    while True:
        edge = Edge(node.index)
        if _activation_at(graph, edge):
            return bool(_first_part(graph, edge, list(_region(graph, edge)), partly=False)) or (
                len(graph.consumers(edge)) == 1
            )
        readers = graph.consumers(edge)
        if len(readers) != 1 or readers[0].op not in _CARRIERS or _returned(graph, edge):
            return False
        (node,) = readers


_SWITCHES: Final = frozenset(("inplace", "training", "dim", "dtype"))


def _numbers(node: Node) -> dict[str, object]:
    return {name: value for name, value in node.options.items() if name not in _SWITCHES}
