"""A norm into the layers in front of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor

from musigma.graph import Edge, Node, Source, kinds
from musigma.surgery._places import (
    Observed,
    called,
    why_branched,
    why_hooked,
    why_not_alone,
    why_not_module,
    why_not_parameter,
)
from musigma.surgery.folding._affine import Affine, RefusalError
from musigma.surgery.folding._layers import Edit, Layer, layer_of, scale_outputs, why_not_layer
from musigma.surgery.folding._moves import against_data, moves, per_channel
from musigma.surgery.folding._place import Place, Plan, names, remove


def fold_backward(plan: Plan, affine: Affine) -> Place:
    """The place of an affine whose scale and shift go into the layers that feed it.

    Raises:
        RefusalError: they cannot.
    """
    search = _Search(plan.observed, plan.removed)
    shape = [int(size) for size in affine.nodes[0].outputs[0].shape]
    search.follow(affine.entry, affine.nodes[0], affine.scale.expand(shape), affine.shift.expand(shape))
    search.check(affine.path)
    edits = (*search.edits, remove(affine.path, fused=affine.fused))
    layers = names(search.layers)
    removed = frozenset(node.index for node in affine.nodes)
    between = frozenset(search.modules) - {""}
    return Place(affine.path, f"into {layers}, which feeds it", edits, (affine.path,), removed, between)


@dataclass
class _Search:
    """Against the data, from a value that is to be scaled and shifted to what can do it."""

    observed: Observed
    removed: frozenset[int]
    edits: list[Edit] = field(default_factory=list)
    layers: list[str] = field(default_factory=list)
    modules: list[str] = field(default_factory=list)

    def follow(self, source: Source, reader: Node, scale: Tensor, shift: Tensor) -> None:
        if not isinstance(source, Edge):
            raise RefusalError(f"its input is {source}, which no layer made")
        node = self.observed.graph.nodes[source]
        reason = why_not_alone(self.observed.graph, source, [reader])
        if reason is None and sum(isinstance(s, Edge) and s.key == source.key for s in reader.inputs) > 1:
            reason = f"{called(reader)} reads the output of {called(node)} twice"
        if reason is None and tuple(node.outputs[source.output].shape) != tuple(scale.shape):
            reason = f"{called(reader)} broadcasts the output of {called(node)}"
        if reason is None and (reader.writes or (node.writes and node.index not in self.removed)):
            reason = f"{called(reader if reader.writes else node)} overwrites values"
        if reason is not None:
            raise RefusalError(reason)
        self.modules.append(node.module)
        layer = layer_of(self.observed, node)
        if layer is not None:
            self._end(layer, scale, shift)
            return
        for onward, s, t in self._through(source, node, scale, shift):
            self.follow(onward, node, s, t)

    def _through(
        self, edge: Edge, node: Node, scale: Tensor, shift: Tensor
    ) -> Iterator[tuple[Source, Tensor, Tensor]]:
        graph = self.observed.graph
        if node.index in self.removed:
            yield next(s for s in node.inputs if graph.is_live(s)), scale, shift
        elif node.op == "add" and _plain_sum(node):
            first, second = node.inputs
            yield first, scale, shift
            yield second, scale, shift * 0
        elif moves(self.observed, node):
            for moved in against_data(self.observed, edge, scale, shift):
                if graph.is_live(moved.source) or not _still(moved.scale, moved.shift):
                    yield moved.source, moved.scale, moved.shift
        else:
            raise RefusalError(_why_not_through(self.observed, node))

    def _end(self, layer: Layer, scale: Tensor, shift: Tensor) -> None:
        path = layer.node.module
        try:
            axis = layer.axis(scale.ndim)
            s, t = per_channel(scale, axis), per_channel(shift, axis)
        except RefusalError as refusal:
            raise RefusalError(f"{path or 'the model'}: {refusal}") from None
        shifts = bool((t != 0).any())
        reason = why_not_layer(self.observed, layer, shifts=shifts)
        if reason is not None:
            raise RefusalError(f"{path or 'the model'} can't take it: {reason}")
        self.edits.append(scale_outputs(layer, s, t))
        self.layers.append(layer.weight.rpartition(".")[0] or "the model")

    def check(self, path: str) -> None:
        """Whether hooks or branches stand between the modules that take part.

        Raises:
            RefusalError: they do.
        """
        paths = [path, *self.modules]
        reason = why_hooked(self.observed.model, paths) or why_branched(self.observed.graph, paths)
        if reason is not None:
            raise RefusalError(reason)


def _why_not_through(observed: Observed, node: Node) -> str:
    if node.op not in kinds.WEIGHT_OPS:
        return f"its input comes from {called(node)}, which a scale does not pass"
    reason = why_not_module(observed, node.module) if node.module else None
    computed = "weight" in node.arguments and why_not_parameter(observed, node, "weight")
    reason = reason or computed or f"{node.op} is not understood"
    return f"{node.module or 'the model'} can't take it: {reason}"


def _plain_sum(node: Node) -> bool:
    return (
        len(node.inputs) == 2
        and node.options.get("alpha", 1) == 1
        and "other" in node.arguments
        and not node.writes
    )


def _still(scale: Tensor, shift: Tensor) -> bool:
    return bool((scale == 1).all()) and bool((shift == 0).all())
