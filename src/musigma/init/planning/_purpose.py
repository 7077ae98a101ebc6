"""What a layer's output is for: that decides which spread it should have."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

from musigma.graph import Activation, Edge, Graph, Node, kinds
from musigma.init.planning._streams import Place, streams


@dataclass(frozen=True)
class Purpose:
    """What a layer's output is for.

    Attributes:
        kind: "activation", "norm", "branch", "skip", "head", "score", "gate", "embedding" or "plain".
        activation: the activation that follows.
        norm: the norm's node that follows at once.
        place: where the branch that the layer ends stands in its stream.
        scale: for scores, the constant that q·k is multiplied by, times √(number of products).
    """

    kind: str
    activation: Activation | None = None
    norm: Node | None = None
    place: Place | None = None
    scale: float = 1.0


_STEPS: Final = kinds.VIEWS | kinds.DROPOUTS | kinds.PADDINGS | kinds.UPSAMPLINGS
_FINAL: Final = kinds.SOFTMAXES | frozenset(("sigmoid", "logsigmoid"))
_ROTARY: Final = kinds.VIEWS | kinds.CONCATENATIONS | kinds.SCALINGS | kinds.ops("add neg sub")


class Purposes:
    """The purposes of all layers of a graph.

    Args:
        graph: a recorded graph.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.places = streams(graph)
        self._ends = {self._last_layer(place): place for place in self.places}
        self._skips = {
            node.index for place in self.places for node in place.branch.skip if graph.weights(node)
        }
        self._inside = {node.index for place in self.places for node in place.branch.nodes}

    def of(self, node: Node, weight: str) -> Purpose:
        """What a layer's output is for.

        Args:
            node: the layer's op.
            weight: its weight.
        """
        graph = self.graph
        norm = graph.norm_after(weight) or self._written_norm(node)
        if norm is not None:
            return Purpose("norm", norm=norm, activation=self._activation(weight))
        if node.index in self._ends:
            return Purpose("branch", place=self._ends[node.index])
        if node.index in self._skips:
            return Purpose("skip")
        if node.op in kinds.EMBEDDINGS:
            return Purpose("embedding")
        scale = self._score(node)
        if scale is not None:
            return Purpose("score", scale=scale)
        activation = self._activation(weight)
        if self.is_head(node):
            return Purpose("head", activation=activation)
        if activation is not None:
            return Purpose("activation", activation=activation)
        return Purpose("gate" if self._is_gated(node) else "plain")

    @cached_property
    def chain(self) -> int:
        """How many layers with an activation stand in a row without norm or skip connection."""
        chained = [
            node
            for node in self.graph.weight_layers()
            if node.index not in self._inside
            and node.op not in kinds.EMBEDDINGS
            and self.of(node, self.graph.weights(node)[0]).kind == "activation"
        ]
        return len(chained)

    def in_chain(self, node: Node) -> bool:
        """Whether a layer is one of the row that `chain` counts."""
        return node.index not in self._inside

    def is_head(self, node: Node) -> bool:
        """Whether nothing but views, sums and a final softmax or sigmoid follows a layer."""
        pending, seen, returned = [node], {node.index}, False
        while pending:
            at = pending.pop()
            returned = returned or any(int(s) == at.index for s in self.graph.output if isinstance(s, Edge))
            for reader in self.graph.consumers(at):
                if reader.op in _FINAL and not self._ends_wide(node, reader):
                    returned = True
                    continue
                if not self._is_plain(reader):
                    return False
                if reader.index not in seen:
                    seen.add(reader.index)
                    pending.append(reader)
        return returned

    def _ends_wide(self, node: Node, reader: Node) -> bool:
        """Whether a last sigmoid is as wide as the layers before: then it is one more of them."""
        if reader.op in kinds.SOFTMAXES:
            return bool(self.graph.consumers(reader))
        live = [s for s in node.inputs if isinstance(s, Edge)]
        before = self.graph.nodes[live[0]].outputs[live[0].output].shape if live else ()
        return bool(self.graph.consumers(reader)) or bool(before and before[-1] == node.shapes[0][-1])

    def _is_plain(self, node: Node) -> bool:
        if node.op in _STEPS | kinds.REDUCTIONS | kinds.CONCATENATIONS | kinds.POOLINGS:
            return True
        return node.op in kinds.ADDITIONS | kinds.SUBTRACTIONS | kinds.SCALINGS and node.op not in kinds.NORMS

    def _last_layer(self, place: Place) -> int:
        nodes = [node for node in place.branch.nodes if self.graph.weights(node)]
        if not nodes:
            return -1
        after = [norm.index for norm in place.branch.norms if norm.index > nodes[-1].index]
        return -1 if after else nodes[-1].index

    def _activation(self, weight: str) -> Activation | None:
        return self.graph.following_activation(weight)

    def _written_norm(self, node: Node) -> Node | None:
        """A norm written out in arithmetic that reads the layer's output, through views alone."""
        sources = {node.index}
        for reader in self.graph.consumers(node):
            if reader.op in kinds.VIEWS:
                sources.add(reader.index)
        for norm in self.graph.norms():
            if len(norm.nodes) > 1 and isinstance(norm.source, Edge) and int(norm.source) in sources:
                outside = [r for r in self.graph.consumers(norm.source) if r not in norm.nodes]
                return norm.node if not outside else None
        return None

    def _is_gated(self, node: Node) -> bool:
        readers = self.graph.consumers(node)
        return any(
            reader.op == "mul" and sum(map(self.graph.is_live, reader.inputs)) > 1 for reader in readers
        )

    def _score(self, node: Node) -> float | None:
        """√d times the scale of the product that the layer is query or key of; None if it is none."""
        pending, seen = [node], {node.index}
        while pending:
            at = pending.pop()
            for reader in self.graph.consumers(at):
                role = self._role(at, reader)
                if role == "score":
                    return self._scale(reader)
                # Values are read by attention too: they end the way.
                if role == "step" and reader.index not in seen and len(seen) < _FAR:
                    seen.add(reader.index)
                    pending.append(reader)
        return None

    def _role(self, at: Node, reader: Node) -> str:
        if reader.op in ("scaled_dot_product_attention", "flex_attention"):
            asked = [s for name in ("query", "key") for s in reader.arguments.get(name, ())]
            return "score" if any(isinstance(s, Edge) and int(s) == at.index for s in asked) else "end"
        if reader.op in kinds.PRODUCTS and not self.graph.weights(reader):
            two = sum(map(self.graph.is_live, reader.inputs)) > 1
            return "score" if two and self._softmax_after(reader) is not None else "end"
        if reader.op in kinds.SCALINGS and sum(map(self.graph.is_live, reader.inputs)) > 1:
            return "end"
        return "step" if reader.op in _ROTARY else "end"

    def _softmax_after(self, product: Node) -> tuple[Node, ...] | None:
        """The elementwise ops between a product and the softmax that reads it."""
        way: list[Node] = []
        at = product
        while len(way) < _FAR:
            readers = self.graph.consumers(at)
            if any(r.op in kinds.SOFTMAXES for r in readers):
                return tuple(way)
            ahead = [r for r in readers if r.op in kinds.ELEMENTWISE | kinds.VIEWS | kinds.DROPOUTS]
            if not ahead or self.graph.weights(ahead[0]):
                return None
            at = ahead[0]
            way.append(at)
        return None

    def _scale(self, product: Node) -> float:
        if product.op in ("scaled_dot_product_attention", "flex_attention"):
            d = int(product.outputs[0].shape[-1])
            given = product.options.get("scale")
            return float(given) * d**0.5 if isinstance(given, float | int) else 1.0
        edge = next(s for s in product.inputs if isinstance(s, Edge))
        terms = float(self.graph.nodes[edge].outputs[edge.output].shape[-1])
        scale = 1.0
        for node in self._softmax_after(product) or ():
            scale *= constant_factor(node)
        return scale * terms**0.5


_FAR: Final = 40


def constant_factor(node: Node) -> float:
    """The number that an op multiplies its signal by; 1 for other ops."""
    if node.op not in kinds.SCALINGS:
        return 1.0
    recipe = node.recipe
    numbers = [] if recipe is None else [o for o in recipe.operands if isinstance(o, float)]
    other = node.options.get("other")
    if isinstance(other, float | int):
        numbers.append(float(other))
    if len(numbers) != 1 or not numbers[0]:
        return 1.0
    return numbers[0] if node.op == "mul" else 1 / numbers[0]
