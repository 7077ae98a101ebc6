"""Forward through a recorded graph: what every edge holds when the layers have the plan's laws."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from musigma.graph import Edge, Graph, Input, Node, Norm, Source, kinds
from musigma.init.planning._entry import Layer
from musigma.init.planning._facts import Facts
from musigma.init.planning._signal import Draws, Signal

if TYPE_CHECKING:
    from musigma.init.planning._choose import Chooser

Rule = Callable[["Walk", Node], None]
RULES: dict[str, Rule] = {}
"""Op → what it does to signals; the families fill it."""


def rule(names: frozenset[str]) -> Callable[[Rule], Rule]:
    """Register what an op family does to signals."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


class Walk:
    """One pass over a graph, in execution order.

    Attributes:
        graph: what is walked over.
        draws: where draws come from.
        facts: what the example told.
        chooser: decides a weight's law when the walk comes to its first use.
        layers: node index → what is expected of the weight layer there.
        unknown: node index → why no rule knows what the op does.

    Args:
        graph: a recorded graph.
        chooser: who decides.
        facts: what the recording told.
    """

    def __init__(self, graph: Graph, chooser: Chooser, facts: Facts) -> None:
        self.graph = graph
        self.draws = Draws(facts.count)
        self.facts = facts
        self.chooser = chooser
        self.layers: dict[int, Layer] = {}
        self.unknown: dict[int, str] = {}
        self._dark: set[int] = set()
        self._signals: dict[object, Signal] = {
            Input(name): Signal(values, "the example's own values") for name, values in facts.inputs.items()
        }
        self._norms = {norm.node.index: norm for norm in graph.norms() if len(norm.nodes) > 1}

    def run(self) -> None:
        """Visit every node."""
        for node in self.graph.nodes:
            self.visit(node)

    def visit(self, node: Node) -> None:
        """Say what a node's outputs hold."""
        if not (self.graph.is_live(node) or self._is_look_up(node) or self.inputs(node)):
            return
        self._follow(node)
        real = any(spec.dtype.is_floating_point or spec.dtype.is_complex for spec in node.outputs)
        if real and (node.index, 0) not in self._signals and (self.inputs(node) or self._is_after_dark(node)):
            self._dark.add(node.index)
            self.unknown.setdefault(node.index, f"what {node.op} does to a signal is not known")

    def _is_after_dark(self, node: Node) -> bool:
        """Whether a node reads what came out of an op that nobody knows."""
        return any(isinstance(source, Edge) and int(source) in self._dark for source in node.inputs)

    def _follow(self, node: Node) -> None:
        norm = self.norm_at(node)
        if norm is not None:
            read = self.signal(norm.source)
            if read is not None:
                self.put(node, normalized(read, centered=norm.centered, eps=eps_of(norm.nodes)))
                return
        found = RULES.get(node.op)
        if found is not None:
            found(self, node)

    def norm_at(self, node: Node) -> Norm | None:
        """The normalization, written out in arithmetic, whose result a node is."""
        return self._norms.get(node.index)

    def _is_look_up(self, node: Node) -> bool:
        """A table that is read at places which don't depend on the example: learned positions."""
        return node.op in kinds.EMBEDDINGS and bool(self.graph.weights(node))

    def signal(self, source: Source | tuple[int, int]) -> Signal | None:
        """What a source holds; None where nothing is known, or where it is no real number."""
        return self._signals.get(source.key if isinstance(source, Edge) else source)

    def put(self, node: Node, *signals: Signal | None) -> None:
        """Say what a node's outputs hold; one signal stands for all of them."""
        if len(signals) == 1:
            signals *= len(node.outputs)
        for output, signal in enumerate(signals[: len(node.outputs)]):
            if signal is not None:
                self._signals[node.index, output] = signal

    def inputs(self, node: Node) -> list[tuple[Source, Signal]]:
        """The inputs of a node that carry a signal."""
        found = ((source, self.signal(source)) for source in node.inputs)
        return [(source, signal) for source, signal in found if signal is not None]

    def argument(self, node: Node, name: str) -> Signal | None:
        """What an argument of a node holds."""
        sources = node.arguments.get(name, ())
        return self.signal(sources[0]) if sources else None

    def shape(self, source: Source) -> tuple[int, ...]:
        """The shape of a source."""
        if isinstance(source, Edge):
            return tuple(map(int, self.graph.nodes[source].outputs[source.output].shape))
        if isinstance(source, Input):
            return self.facts.shapes.get(source.name, ())
        spec = self.graph.specs.get(getattr(source, "name", ""))
        return tuple(map(int, spec.shape)) if spec is not None else ()

    def sizes(self, source: Source | None) -> tuple[float, float]:
        """How many examples and places a source has; a flattened one counts as all places of one example."""
        shape = self.shape(source) if source is not None else ()
        if len(shape) < 2:
            return 1.0, 1.0
        return float(shape[0]), float(math.prod(shape[2:]) if len(shape) > 2 else 1)

    def values(self) -> Mapping[object, Signal]:
        """Every edge that carries a signal."""
        return self._signals


def normalized(signal: Signal, *, centered: bool, eps: float = 0.0) -> Signal:
    """A signal brought to second moment 1 (but for eps), and to mean 0 if centered."""
    x = signal.values
    if centered:
        x = x - x[0].mean()
    second = float(x[0].square().mean())
    values = x / math.sqrt(second + eps) if second > 0 else torch.zeros_like(x)
    # What eps leaves of a deviation of the size.
    drift = values[0] * (signal.log_drift / 2 * eps / (second + eps)) if signal.drift is not None else None
    return replace(signal, values=values, share=0.0, drift=drift)


def eps_of(nodes: Sequence[Node]) -> float:
    """The number that a norm, called or written out, adds to a variance before it divides."""
    for node in nodes:
        given = node.options.get("eps", node.options.get("other") if node.op == "add" else None)
        if isinstance(given, float | int) and 0 < given < _LARGEST_EPS:
            return float(given)
        numbers = [o for o in node.recipe.operands if isinstance(o, float)] if node.recipe is not None else []
        if node.op == "add" and len(numbers) == 1 and 0 < numbers[0] < _LARGEST_EPS:
            return numbers[0]
    return 0.0


# More than this is no eps: it is another term of the sum.
_LARGEST_EPS = 0.1


def expanded(values: Tensor) -> Tensor:
    """(n,) draws of a constant as the three rows of a signal: the same everywhere."""
    return values.expand(3, -1)
