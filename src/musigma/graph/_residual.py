"""Residual branches: where a signal is added to what was made from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from musigma.graph import _kinds as kinds
from musigma.graph._nodes import Edge, Node, Source

if TYPE_CHECKING:
    from musigma.graph._graph import Graph


@dataclass(frozen=True)
class Branch:
    """A sum `skip(x) + branch(x)`.

    Attributes:
        start: where x comes from: an edge or an input.
        end: the last node of the branch, whose output is added.
        add: the node that adds.
        nodes: the branch from start to end, in execution order, `end` included.
        last_parameter: the weight of the branch's last weight layer, None if it has none.
        skip: the nodes on the skip path: empty for the identity, a projection and its norm otherwise.
        norms: the results of the normalizations inside the branch, also of those written out.
        scalings: the products with something that doesn't depend on the example (LayerScale, ReZero,
            `0.1 * branch`) after the last weight layer.
    """

    start: Source
    end: Node
    add: Node
    nodes: tuple[Node, ...]
    last_parameter: str | None
    skip: tuple[Node, ...]
    norms: tuple[Node, ...]
    scalings: tuple[Node, ...]


def find_branches(graph: Graph) -> tuple[Branch, ...]:
    """Every sum of a skip path and a branch.

    A skip path is the identity or consists of views, dropout, pooling, padding, norms, scaling by what
    doesn't depend on the example, earlier residual sums (followed along their skip), and at most one
    weight layer (a projection). A branch does some work of its own: it has a weight layer, a norm,
    attention or pooling, and where the skip is projected more weight layers than the skip. So sums of
    gates, of embeddings, of rotary halves and of parallel projections are no residual sums, and a
    concatenation (U-Net, DenseNet) is none either.
    """
    found: dict[int, Branch] = {}
    for node in graph.nodes:
        branch = _branch_of(graph, node, found) if adds(node) else None
        if branch is not None:
            found[node.index] = branch
    return tuple(found.values())


def adds(node: Node) -> bool:
    """Whether a node sums two signals: an addition, or a norm that takes another one in (`add=`)."""
    return node.op in kinds.ADDITIONS or "add" in node.arguments


def _branch_of(graph: Graph, add: Node, known: dict[int, Branch]) -> Branch | None:
    operands = [source for source in _operands(add) if graph.is_live(source)]
    if len(operands) != 2:
        return None
    left, right = operands
    options = [_between(graph, add, left, right, known), _between(graph, add, right, left, known)]
    usable = [option for option in options if option is not None]
    return min(usable, key=lambda branch: (_work(graph, branch.skip), len(branch.skip)), default=None)


def _operands(add: Node) -> tuple[Source, ...]:
    other = next(name for name in ("add", "residual", "other") if name in (*add.arguments, "other"))
    return (*add.arguments.get("input", ())[:1], *add.arguments.get(other, ())[:1])


def _between(graph: Graph, add: Node, skip: Source, end: Source, known: dict[int, Branch]) -> Branch | None:
    if not isinstance(end, Edge):
        return None
    for start, path in _skip_paths(graph, skip, known):
        if _is_whole_number(graph, start):
            return None
        nodes = _nodes_between(graph, start, end)
        if nodes:
            begin = _origin(graph, start)
            nodes = nodes if begin is start else _nodes_between(graph, begin, end)
            return _made(graph, add, begin, nodes, path) if _is_branch(graph, nodes, path) else None
    return None


# They may return their very argument, which then can't be told from its source.
_SAME: Final = kinds.ops("to contiguous alias") | kinds.DROPOUTS


def _origin(graph: Graph, start: Source) -> Source:
    while isinstance(start, Edge) and graph.nodes[start].op in _SAME and graph.nodes[start].view:
        start = graph.nodes[start].inputs[0]
    return start


def _made(graph: Graph, add: Node, start: Source, nodes: tuple[Node, ...], skip: tuple[Node, ...]) -> Branch:
    inside = {node.index for node in nodes} | ({add.index} if "add" in add.arguments else set())
    after = max((node.index for node in nodes if graph.weights(node)), default=-1)
    scalings = tuple(n for n in nodes if n.index > after and _is_scaling(graph, n))
    norms = tuple(norm.node for norm in graph.norms() if norm.node.index in inside)
    return Branch(start, nodes[-1], add, nodes, _last_weight(graph, nodes), skip, norms, scalings)


def _is_scaling(graph: Graph, node: Node) -> bool:
    return node.op in kinds.SCALINGS and sum(map(graph.is_live, node.inputs)) == 1


def _token(source: Source) -> object:
    return source.key if isinstance(source, Edge) else source


def _is_whole_number(graph: Graph, source: Source) -> bool:
    # Token ids and masks are no signal: embeddings of the same ids are no branches of each other.
    if isinstance(source, Edge):
        dtype = graph.nodes[source].outputs[source.output].dtype
        return not (dtype.is_floating_point or dtype.is_complex)
    readers = graph.consumers(source)
    return bool(readers) and all(reader.op in kinds.EMBEDDINGS for reader in readers)


_QUIET: Final = (
    (kinds.VIEWS - kinds.SELECTIONS)
    | kinds.DROPOUTS
    | kinds.POOLINGS
    | kinds.PADDINGS
    | kinds.UPSAMPLINGS
    | (kinds.NORMS - kinds.ADDITIONS)
)
_SCALED: Final = kinds.SCALINGS | kinds.ADDITIONS | kinds.SUBTRACTIONS
_PROJECTIONS: Final = kinds.CONVOLUTIONS | kinds.TRANSPOSED_CONVOLUTIONS | kinds.PRODUCTS


def _skip_paths(
    graph: Graph, source: Source, known: dict[int, Branch]
) -> Iterator[tuple[Source, tuple[Node, ...]]]:
    """The sources that a skip path may start from, nearest first, each with the path from there."""
    path: tuple[Node, ...] = ()
    yield source, path
    while isinstance(source, Edge):
        node = graph.nodes[source]
        ahead = known[node.index].start if node.index in known else _through(graph, node, path)
        if ahead is None:
            return
        source, path = ahead, (node, *path)
        yield source, path


def _through(graph: Graph, node: Node, path: tuple[Node, ...]) -> Source | None:
    signals = [source for source in node.inputs if graph.is_live(source)]
    if len(signals) != 1:
        return None
    if node.op in _PROJECTIONS and graph.weights(node):
        return None if _work(graph, path) or any(step.op in kinds.SELECTIONS for step in path) else signals[0]
    if node.op in kinds.SELECTIONS:
        return signals[0] if _subsamples(node) and not _work(graph, path) else None
    return signals[0] if node.op in _QUIET | _SCALED else None


def _subsamples(node: Node) -> bool:
    """Whether a selection keeps every dimension: `x[:, ::2]`.

    `x[:, t]` of a hand-written recurrence is another time step, not a skip to the same signal.
    """
    index = node.options.get("index")
    parts = index if isinstance(index, tuple) else (index,)
    return node.op == "getitem" and all(isinstance(part, slice) or part is ... for part in parts)


def _work(graph: Graph, nodes: tuple[Node, ...]) -> int:
    return sum(bool(graph.weights(node)) for node in nodes)


_WORKING: Final = kinds.NORMS | kinds.ATTENTIONS | kinds.POOLINGS | kinds.RECURRENT


def _is_branch(graph: Graph, nodes: tuple[Node, ...], skip: tuple[Node, ...]) -> bool:
    if _work(graph, skip):
        return _work(graph, nodes) > _work(graph, skip)
    inside = {node.index for node in nodes}
    return any(node.op in _WORKING or graph.weights(node) for node in nodes) or any(
        norm.node.index in inside for norm in graph.norms()
    )


def _nodes_between(graph: Graph, start: Source, end: Edge) -> tuple[Node, ...]:
    """The nodes on the ways from one value (exclusive) to the node of another, empty if there is none."""
    # Nothing before the start lies on a way from it, which keeps the search inside the block.
    floor = int(start) if isinstance(start, Edge) else -1
    behind, pending = {int(end)}, [int(end)]
    while pending:
        node = graph.nodes[pending.pop()]
        further = {int(s) for s in node.inputs if isinstance(s, Edge) and s > floor} - behind
        behind |= further
        pending += further
    reached: set[int] = set()
    for index in sorted(behind):
        sources = graph.nodes[index].inputs
        if any(s in reached if isinstance(s, Edge) else False for s in sources) or any(
            _token(s) == _token(start) for s in sources
        ):
            reached.add(index)
    return tuple(graph.nodes[index] for index in sorted(reached)) if int(end) in reached else ()


def _last_weight(graph: Graph, nodes: tuple[Node, ...]) -> str | None:
    for node in reversed(nodes):
        weights = graph.weights(node)
        if weights:
            return weights[-1] if node.op in kinds.ATTENTIONS else weights[0]
    return None
