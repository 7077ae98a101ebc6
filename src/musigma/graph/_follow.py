"""What comes after a layer: the activation that its output goes into, the norm that it feeds."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from musigma.graph import _kinds as kinds
from musigma.graph._nodes import Node

if TYPE_CHECKING:
    from musigma.graph._graph import Graph


@dataclass(frozen=True)
class Activation:
    """The activation behind a layer.

    Attributes:
        name: the op name, such as `leaky_relu`.
        node: the node that applies it.
        kwargs: its numbers, such as `{"negative_slope": 0.2}`.
        use: the node that used the parameter.
        between: the nodes between use and activation, in execution order.
    """

    name: str
    node: Node
    kwargs: Mapping[str, object]
    use: Node
    between: tuple[Node, ...]


@dataclass(frozen=True)
class NormPath:
    """The normalization behind a layer.

    Attributes:
        norm: the node that normalizes.
        between: the views between, in execution order.
        only: whether the layer's output goes nowhere else, at every use of the parameter.
    """

    norm: Node
    between: tuple[Node, ...]
    only: bool


def find_activation(graph: Graph, parameter: str) -> Activation | None:
    """The nearest activation behind the first use of a parameter that has one.

    May lie between: views, casts, dropout, pooling, padding, upsampling, norms, sums with and products
    by something that doesn't depend on the example (a bias, a scale), and a sum with another signal if
    that sum goes nowhere but into the activation (the end of a ResNet block; not the stream of a
    pre-norm Transformer, which many layers add to). A product of two signals ends the way: in
    `silu(gate(x)) * up(x)` the gate is followed by silu and `up` by nothing.
    """
    for use in graph.uses(parameter):
        path = _nearest(graph, use, _is_activation, lambda node: _carries(graph, node))
        if path is not None:
            node = path[-1]
            return Activation(node.op, node, _numbers(node), use, tuple(path[:-1]))
    return None


def find_norm(graph: Graph, parameter: str) -> NormPath | None:
    """The norm that takes the output of a parameter's use, unchanged, as its input."""
    first: list[Node] | None = None
    only = True
    for use in graph.uses(parameter):
        path = _nearest(graph, use, _normalizes, _preserves)
        first = first or path
        only = only and path is not None and _feeds_only(graph, use, path[-1])
    return NormPath(first[-1], tuple(first[:-1]), only) if first else None


def _nearest(
    graph: Graph, start: Node, wanted: Callable[[Node], bool], passes: Callable[[Node], bool]
) -> list[Node] | None:
    """The way from a node (exclusive) to the first wanted node that is reached through passing ones."""
    came_from: dict[int, int] = {}
    pending = [start.index]
    while pending:
        node = graph.nodes[heapq.heappop(pending)]
        if node is not start and wanted(node):
            return _trace(graph, came_from, start.index, node.index)
        if node is not start and not passes(node):
            continue
        for reader in graph.consumers(node):
            if reader.index not in came_from:
                came_from[reader.index] = node.index
                heapq.heappush(pending, reader.index)
    return None


def _trace(graph: Graph, came_from: Mapping[int, int], start: int, end: int) -> list[Node]:
    path = [end]
    while came_from[path[-1]] != start:
        path.append(came_from[path[-1]])
    return [graph.nodes[index] for index in reversed(path)]


def _is_activation(node: Node) -> bool:
    return node.op in kinds.ACTIVATIONS


_CARRIERS = kinds.VIEWS | kinds.DROPOUTS | kinds.POOLINGS | kinds.UPSAMPLINGS | kinds.PADDINGS | kinds.NORMS
_AFFINE = frozenset(("add", "sub", "mul", "div"))


def _carries(graph: Graph, node: Node) -> bool:
    if node.op in _CARRIERS - kinds.ADDITIONS:
        return True
    signals = sum(graph.is_live(source) for source in node.inputs)
    if node.op in _AFFINE and signals == 1:
        return True
    return node.op in kinds.ADDITIONS and _ends_in_activation(graph, node)


def _ends_in_activation(graph: Graph, node: Node) -> bool:
    """Whether a sum goes into one activation and nowhere else."""
    readers = graph.consumers(node)
    while len(readers) == 1 and node.index not in graph.output:
        (node,) = readers
        if _is_activation(node):
            return True
        if node.op not in _CARRIERS:
            return False
        readers = graph.consumers(node)
    return False


_SWITCHES = frozenset(("inplace", "training", "dim", "dtype"))


def _numbers(node: Node) -> dict[str, object]:
    return {name: value for name, value in node.options.items() if name not in _SWITCHES}


def _normalizes(node: Node) -> bool:
    return node.op in kinds.NORMS - kinds.ADDITIONS


def _preserves(node: Node) -> bool:
    if node.op in kinds.DROPOUTS:
        return node.options.get("training") is False or node.options.get("p") == 0
    return node.op in kinds.VIEWS


def _feeds_only(graph: Graph, use: Node, norm: Node) -> bool:
    """Whether everything that a node's output reaches unchanged is one norm, as its input."""
    pending, seen = [use], {use.index}
    while pending:
        node = pending.pop()
        if node.index in graph.output:
            return False
        for reader in graph.consumers(node):
            if reader.index == norm.index:
                if any(node.index in sources for name, sources in norm.arguments.items() if name != "input"):
                    return False
            elif not _preserves(reader):
                return False
            elif reader.index not in seen:
                seen.add(reader.index)
                pending.append(reader)
    return True
