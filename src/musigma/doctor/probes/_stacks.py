"""Plain stacks: weight layers in a row with nothing but elementwise ops, pooling and views between them."""

import math
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

from musigma.doctor.probes._layers import LayerMeasure
from musigma.graph import Edge, Graph, Node, kinds

__all__ = ["Drift", "Link", "Stack", "drift", "find_stacks"]

_BETWEEN = (
    (kinds.ACTIVATIONS - kinds.GATES) | kinds.VIEWS | kinds.DROPOUTS | kinds.POOLINGS | kinds.PADDINGS
) - frozenset(("cat",))
_SCALED = kinds.SCALINGS


@dataclass(frozen=True)
class Link:
    """A weight layer of a stack, and what lies between it and the next one (or the stack's end).

    Args:
        layer: its measurement.
        after: the nodes between it and the next layer, in execution order.
    """

    layer: LayerMeasure
    after: tuple[Node, ...]

    @property
    def activation(self) -> Node | None:
        """The first activation behind the layer; None where there is none."""
        return next((n for n in self.after if n.op in kinds.ACTIVATIONS), None)


@dataclass(frozen=True)
class Stack:
    """Weight layers in a row, first to last.

    Args:
        links: at least one.
        head: whether no weight layer comes after the last one: it makes the outputs.
    """

    links: tuple[Link, ...]
    head: bool

    @property
    def layers(self) -> tuple[LayerMeasure, ...]:
        """The layers' measurements."""
        return tuple(link.layer for link in self.links)

    @property
    def hidden(self) -> tuple[Link, ...]:
        """The links whose output another weight layer, a norm or a sum takes: all but a head."""
        return self.links[:-1] if self.head else self.links


@dataclass(frozen=True)
class Drift:
    """How a second moment changes along a stack, in natural logarithms.

    Args:
        steps: how many layers it crosses.
        total: ln(last / first).
        expected: what chance alone gives on average: −½·spread², the mean of a log-normal factor's logarithm.
        spread: the standard deviation that finite widths give it.
    """

    steps: int
    total: float
    expected: float
    spread: float

    @property
    def factor(self) -> float:
        """The second moment's factor per layer."""
        return math.exp(self.total / self.steps)

    @property
    def interval(self) -> tuple[float, float]:
        """The factor's 95 % interval."""
        half = 1.96 * self.spread / self.steps
        return math.exp(self.total / self.steps - half), math.exp(self.total / self.steps + half)

    @property
    def significant(self) -> bool:
        """Whether chance doesn't explain it: more than three standard deviations."""
        return abs(self.total - self.expected) > 3 * self.spread


def drift(first: float, last: float, widths: Sequence[float]) -> Drift | None:
    """The drift between two second moments over layers of these widths; None where one is 0 or not finite.

    A Gaussian ReLU layer of width n multiplies ‖x‖² by a random factor whose logarithm has the variance 5/n,
    since E‖x‖⁴/(E‖x‖²)² grows by 1 + 5/n a layer; other activations and inits vary less.
    """
    if not widths or not (0 < first < math.inf and 0 < last < math.inf):
        return None
    variance = sum(5 / n for n in widths)
    return Drift(len(widths), math.log(last / first), -variance / 2, variance**0.5)


def find_stacks(
    graph: Graph, layers: Sequence[LayerMeasure], *, through_norms: bool = False
) -> tuple[Stack, ...]:
    """Every maximal stack; where one layer feeds several, the longest of the stacks that begin together.

    Args:
        graph: the model as it ran.
        layers: its weight layers.
        through_norms: let a stack run on through normalization layers (the gradient is not reset there).
    """
    between = _BETWEEN | (kinds.NORMS - kinds.ADDITIONS) if through_norms else _BETWEEN
    by_node = {layer.node.index: layer for layer in layers}
    previous = {i: _walk_back(graph, layer.node, by_node, between) for i, layer in by_node.items()}
    feeding = {step[0] for step in previous.values() if step}
    longest: dict[int, Stack] = {}
    for index in by_node:
        if index not in feeding:
            stack = _unroll(graph, index, by_node, previous)
            root = stack.layers[0].node.index
            if root not in longest or len(longest[root].links) < len(stack.links):
                longest[root] = stack
    return tuple(longest[root] for root in sorted(longest))


_Step = tuple[int, tuple[Node, ...]]


def _walk_back(graph: Graph, node: Node, ends: Container[int], between: frozenset[str]) -> _Step | None:
    """The weight layer that feeds a node through passing ops only, and those ops."""
    passed: list[Node] = []
    sources = node.arguments.get("input", ())
    while len(sources) == 1 and isinstance(sources[0], Edge):
        above = graph.nodes[sources[0]]
        if above.index in ends:
            return above.index, tuple(reversed(passed))
        scaled = above.op in _SCALED and sum(graph.is_live(s) for s in above.inputs) == 1
        if above.op not in between and not scaled:
            return None
        passed.append(above)
        sources = above.arguments.get("input", ())
    return None


def _unroll(
    graph: Graph, last: int, by_node: dict[int, LayerMeasure], previous: dict[int, _Step | None]
) -> Stack:
    end = by_node[last].node
    below = graph.descendants(end)
    head = not any(i in by_node or graph.weights(graph.nodes[i]) for i in below)
    links = [Link(by_node[last], tuple(_follow(graph, end)))]
    index = last
    while (step := previous[index]) is not None:
        links.append(Link(by_node[step[0]], step[1]))
        index = step[0]
    return Stack(tuple(reversed(links)), head)


def _follow(graph: Graph, node: Node) -> Iterator[Node]:
    """What comes behind the last layer, as long as it is one passing op after the other."""
    readers = graph.consumers(node)
    while len(readers) == 1 and readers[0].op in _BETWEEN:
        yield readers[0]
        readers = graph.consumers(readers[0])
