"""Which normalization a layer feeds, and which normalizations are written out in arithmetic."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from musigma.graph import _kinds as kinds
from musigma.graph._nodes import Edge, Node, Source

if TYPE_CHECKING:
    from musigma.graph._graph import Graph


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


@dataclass(frozen=True)
class Norm:
    """A normalization, called as one op or written out.

    Attributes:
        node: the node that gives the normalized values.
        nodes: all its nodes, in execution order; one for a called norm.
        source: what it normalizes.
        centered: whether it subtracts a mean.
    """

    node: Node
    nodes: tuple[Node, ...]
    source: Source
    centered: bool


def find_norm(graph: Graph, parameter: str) -> NormPath | None:
    """The norm that takes the output of a parameter's use, unchanged, as its input."""
    first: list[Node] | None = None
    only = True
    for use in graph.uses(parameter):
        path = _nearest(graph, use)
        first = first or path
        only = only and path is not None and _feeds_only(graph, use, path[-1])
    return NormPath(first[-1], tuple(first[:-1]), only) if first else None


def find_norms(graph: Graph) -> tuple[Norm, ...]:
    """Every normalization in execution order: norm ops, L2 normalization, and hand-written ones.

    Hand-written means `(x - mean(x)) / std(x)` or `x * rsqrt(mean(x**2) + eps)` in any of their
    spellings; a weight that is applied afterwards is not part of it.
    """
    found: dict[int, Norm] = {}
    for node in graph.nodes:
        if node.op in kinds.NORMS or node.op == "normalize":
            source = node.inputs[0] if node.inputs else None
            if source is not None:
                found[node.index] = Norm(node, (node,), source, node.op in kinds.CENTERING_NORMS)
        elif node.op in _STATISTICS:
            norm = _written_out(graph, node)
            if norm is not None:
                found.setdefault(norm.node.index, norm)
    return tuple(found[index] for index in sorted(found))


def normalizes(node: Node) -> bool:
    """Whether a node is a norm of its input alone (not of a sum that it forms itself)."""
    return node.op in kinds.NORMS - kinds.ADDITIONS


def preserves(node: Node) -> bool:
    """Whether a node hands on the values that it reads: a view, a cast, dropout that drops nothing."""
    if node.op in kinds.DROPOUTS:
        return node.options.get("training") is False or node.options.get("p") == 0
    return node.op in kinds.VIEWS


def _nearest(graph: Graph, use: Node) -> list[Node] | None:
    """The way from a node (exclusive) to the first norm that is reached through value-preserving ops."""
    came_from: dict[int, int] = {}
    pending = [use.index]
    while pending:
        node = graph.nodes[heapq.heappop(pending)]
        if node is not use and normalizes(node):
            path = [node.index]
            while came_from[path[-1]] != use.index:
                path.append(came_from[path[-1]])
            return [graph.nodes[index] for index in reversed(path)]
        for reader in graph.consumers(node):
            wanted = normalizes(reader) and node.index in reader.arguments.get("input", ())
            if reader.index not in came_from and (wanted or preserves(reader)):
                came_from[reader.index] = node.index
                heapq.heappush(pending, reader.index)
    return None


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
            elif not preserves(reader):
                return False
            elif reader.index not in seen:
                seen.add(reader.index)
                pending.append(reader)
    return True


_STATISTICS: Final = kinds.ops("var std var_mean std_mean mean sum norm vector_norm")
# What may stand between a statistic and the division: eps, a root, a count, a broadcast, a cast.
_STEPS: Final = kinds.VIEWS | kinds.ops("add sub mul div sqrt rsqrt pow clamp reciprocal maximum")
_ROOTS: Final = frozenset(("sqrt", "rsqrt"))
_SPREADS: Final = kinds.ops("std std_mean norm vector_norm")


def _written_out(graph: Graph, statistic: Node) -> Norm | None:
    """The norm whose spread a reduction measures, if it is one."""
    measured = _measured(graph, statistic)
    if measured is None:
        return None
    for product, factor in _divisions(graph, statistic):
        signals = [source for source in product.inputs if graph.is_live(source) and source != factor]
        if len(signals) != 1:
            continue
        signal = _unscaled(graph, signals[0])
        centered = _centered(graph, signal)
        source = signal if centered is None else centered
        if _token(source) in (_token(measured), _token(_centered(graph, measured))):
            nodes = graph.ancestors(product) & (graph.descendants(source) | {product.index})
            return Norm(
                product, tuple(graph.nodes[i] for i in sorted(nodes)), source, centered=centered is not None
            )
    return None


def _measured(graph: Graph, statistic: Node) -> Source | None:
    """What a statistic is the spread of: x for `var(x)`, `std(x)`, `mean(x * x)`."""
    signals = [source for source in statistic.inputs if graph.is_live(source)]
    if len(signals) != 1:
        return None
    if statistic.op not in ("mean", "sum"):
        return _unviewed(graph, signals[0])
    square = graph.producer(_unviewed(graph, signals[0]))
    if square is None:
        return None
    twice = square.op == "mul" and len(square.inputs) == 2 and len(set(map(_token, square.inputs))) == 1
    if square.op == "square" or twice or (square.op == "pow" and 2 in square.options.values()):
        return _unviewed(graph, square.inputs[0])
    return None


def _divisions(graph: Graph, statistic: Node) -> Iterator[tuple[Node, int]]:
    """The products and quotients of a signal and a root of the statistic, with that factor's node."""
    pending = [(statistic, statistic.op in _SPREADS)]
    while pending:
        node, rooted = pending.pop()
        for reader in graph.consumers(node):
            signals = sum(graph.is_live(source) for source in reader.inputs)
            if reader.op in kinds.SCALINGS and signals == 2 and rooted:
                yield reader, node.index
            elif reader.op in _STEPS and signals == 1:
                exponent = reader.options.get("exponent")
                pending.append((reader, rooted or reader.op in _ROOTS or exponent in (0.5, -0.5)))


def _centered(graph: Graph, source: Source | None) -> Source | None:
    """x, if a value is x minus a mean of x."""
    node = graph.producer(source) if source is not None else None
    if node is None or node.op != "sub" or len(node.inputs) != 2:
        return None
    x = _unviewed(graph, node.arguments["input"][0])
    mean = graph.producer(_unviewed(graph, node.arguments["other"][0]))
    if mean is None or mean.op not in ("mean", "var_mean", "std_mean"):
        return None
    return x if _token(_unviewed(graph, mean.inputs[0])) == _token(x) else None


def _unviewed(graph: Graph, source: Source) -> Source:
    """The value before casts and views."""
    while isinstance(source, Edge) and graph.nodes[source].op in kinds.RESHAPES | {"expand"}:
        source = graph.nodes[source].inputs[0]
    return source


def _unscaled(graph: Graph, source: Source) -> Source:
    """The value before casts, views and products with what doesn't depend on the example."""
    while True:
        source = _unviewed(graph, source)
        node = graph.producer(source)
        signals = [behind for behind in node.inputs if graph.is_live(behind)] if node is not None else []
        if node is None or node.op not in kinds.SCALINGS or len(signals) != 1:
            return source
        (source,) = signals


def _token(source: Source | None) -> object:
    return source.key if isinstance(source, Edge) else source
