"""A scale and a shift into the layers behind them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from musigma.graph import Edge, Node
from musigma.surgery._places import Observed, called, replace_module, why_branched, why_hooked
from musigma.surgery.folding._affine import Affine, RefusalError
from musigma.surgery.folding._layers import (
    Edit,
    Layer,
    can_untie,
    layers_reading,
    scale_inputs,
    untie,
    why_not_layer,
)
from musigma.surgery.folding._moves import Moved, border_values, moves, per_channel, with_data
from musigma.surgery.folding._padded import PADDED, ChannelPad, pad_conv
from musigma.surgery.folding._place import Place, Plan, names, remove


def fold_forward(plan: Plan, affine: Affine) -> Place:
    """The place of an affine whose scale and shift go into every layer that it feeds.

    Raises:
        RefusalError: they cannot.
    """
    if affine.fused:
        raise RefusalError("its own activation, or a sum, follows it")
    shape = [int(size) for size in affine.nodes[-1].outputs[0].shape]
    found = absorb(plan, affine.exit, affine.scale.expand(shape), affine.shift.expand(shape), [affine.path])
    edits = (*found.edits, remove(affine.path, fused=False))
    removed = frozenset(node.index for node in affine.nodes)
    line = f"into {names(found.layers)}, which it feeds"
    between = frozenset([affine.path, *found.modules]) - {"", *found.layers}
    return Place(affine.path, line, edits, tuple(found.layers), removed, between, found.untied)


def absorb(plan: Plan, value: Edge, scale: Tensor, shift: Tensor, paths: list[str]) -> Absorbed:
    """What has to change so that a value may come without its scale and shift.

    Args:
        plan: what is known and planned.
        value: the value.
        scale: of its full shape.
        shift: likewise.
        paths: the modules that make it.

    Raises:
        RefusalError: a reader of the value does not allow it.
    """
    found = Absorbed(plan.observed, plan.removed, plan.untied)
    found.follow(value, scale, shift)
    if not found.layers:
        raise RefusalError("nothing reads its output")
    paths = [*paths, *found.modules]
    reason = why_hooked(plan.observed.model, paths) or why_branched(plan.observed.graph, paths)
    if reason is not None:
        raise RefusalError(reason)
    return found


@dataclass
class Absorbed:
    """With the data, from a value to every layer that it feeds."""

    observed: Observed
    removed: frozenset[int]
    untied: frozenset[str]
    edits: list[Edit] = field(default_factory=list)
    layers: list[str] = field(default_factory=list)
    modules: list[str] = field(default_factory=list)

    def follow(self, edge: Edge, scale: Tensor, shift: Tensor) -> None:
        graph = self.observed.graph
        if any(isinstance(s, Edge) and s.key == edge.key for s in graph.output):
            raise RefusalError("the model returns its output")
        for node in graph.consumers(edge):
            self._read(node, edge, scale, shift)

    def _read(self, node: Node, edge: Edge, scale: Tensor, shift: Tensor) -> None:
        self.modules.append(node.module)
        layers = layers_reading(self.observed, node, edge)
        if layers:
            for layer in layers:
                self._end(layer, scale, shift)
        elif node.writes:
            raise RefusalError(f"{called(node)} overwrites its output")
        elif node.index in self.removed:
            self.follow(Edge(node.index), scale, shift)
        elif moves(self.observed, node):
            for moved in with_data(self.observed, node, edge, scale, shift):
                self._onward(node, moved)
        else:
            raise RefusalError(f"its output goes to {called(node)}, which a scale or shift does not pass")

    def _onward(self, node: Node, moved: Moved) -> None:
        assert isinstance(moved.source, Edge)
        if moved.border is not None:
            self.edits.append(_pad_module(self.observed, node, moved.border))
        if bool((moved.scale != 1).any()) or bool((moved.shift != 0).any()):
            self.follow(moved.source, moved.scale, moved.shift)

    def _end(self, layer: Layer, scale: Tensor, shift: Tensor) -> None:
        path = layer.node.module or "the model"
        try:
            axis = layer.axis(scale.ndim)
            s, t = per_channel(scale, axis), per_channel(shift, axis)
            shifts = bool((t != 0).any())
            if layer.node.module not in self.untied and can_untie(self.observed, layer):
                self.edits.append(untie(layer))
                self.untied |= {layer.node.module}
            reason = why_not_layer(self.observed, layer, shifts=shifts, untied=self.untied)
            if reason is not None:
                raise RefusalError(reason)
            if shifts and _pads_zeros(layer):
                self.edits.append(self._repadded(layer, s, t))
        except RefusalError as refusal:
            raise RefusalError(f"{path} can't take it: {refusal}") from None
        self.edits.append(scale_inputs(layer, s, t))
        self.layers.append(layer.node.module)

    def _repadded(self, layer: Layer, scale: Tensor, shift: Tensor) -> Edit:
        path, node = layer.node.module, layer.node
        if layer.transposed:
            raise RefusalError("the shift of a transposed convolution's input is none of its output's border")
        if type(self.observed.model.get_submodule(path)) not in PADDED or path == "":
            raise RefusalError("it pads with zeros, which the shift does not reach")
        values = border_values(scale, shift, torch.zeros_like(scale), node)

        def edit(model: nn.Module) -> None:
            pad_conv(model.get_submodule(path), values)

        return edit


def _pads_zeros(layer: Layer) -> bool:
    """Whether taps of a convolution fall on zeros that no input channel holds."""
    if layer.transposed:
        return True
    padding = layer.node.options.get("padding", 0) if layer.spatial else 0
    if isinstance(padding, str):
        return padding != "valid"
    return any(padding) if isinstance(padding, list | tuple) else bool(padding)


def _pad_module(observed: Observed, node: Node, values: Tensor) -> Edit:
    pads = node.options["pad"]
    assert isinstance(pads, list | tuple)

    def edit(model: nn.Module) -> None:
        like = next((p for p in model.parameters() if p.is_floating_point()), values)
        replace_module(model, node.module, ChannelPad(pads, values.to(like)))

    return edit
