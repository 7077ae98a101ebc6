"""The weight and bias that a norm applies to what it has normalized."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import musigma.nn as ours
from musigma.graph import Edge, Node, Parameter, Source, kinds
from musigma.surgery._places import Observed, called, why_not_module
from musigma.surgery.folding._affine import RefusalError, neutral, step
from musigma.surgery.folding._forward import absorb
from musigma.surgery.folding._layers import Edit, assign
from musigma.surgery.folding._place import Place, Plan, names

# Norms whose forward takes None for weight and bias.
_WITHOUT = (
    nn.LayerNorm, nn.RMSNorm, nn.GroupNorm,
    ours.LayerNorm, ours.LayerNorm1d, ours.LayerNorm2d, ours.LayerNorm3d, ours.RMSNorm, ours.GroupNorm,
)  # fmt: skip
# Their fast path reads the weights of their norms by name.
_READERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)

_ROW_NORMS = kinds.LAYER_NORMS | kinds.RMS_NORMS


@dataclass(frozen=True)
class OwnAffine:
    """A norm's weight and bias.

    Args:
        path: the norm.
        exit: the value that has them in.
        scale: broadcasts against it.
        shift: likewise.
        sources: what to set to which number when they are gone: 1 or 0.
    """

    path: str
    exit: Edge
    scale: Tensor
    shift: Tensor
    sources: tuple[tuple[Source, float], ...]


def own_affines(observed: Observed) -> Iterator[OwnAffine]:
    """Every norm that normalizes by what it is given and has a weight or a bias, in execution order."""
    for norm in observed.graph.norms():
        node = norm.node
        if len(norm.nodes) == 1 and node.op in kinds.NORMS:
            if step(observed, node) is None and (node.arguments.get("weight") or node.arguments.get("bias")):
                yield _called(observed, node)
        elif node.module:
            found = _written_out(observed, node)
            if found is not None:
                yield found


def _called(observed: Observed, node: Node) -> OwnAffine:
    shape = [int(size) for size in node.outputs[0].shape]
    sources: list[tuple[Source, float]] = []
    numbers: list[Tensor] = []
    for role, rest in (("weight", 1.0), ("bias", 0.0)):
        found = node.arguments.get(role, ())
        value = observed.value(found[0]) if len(found) == 1 else None
        if value is None:
            numbers.append(torch.full((), rest, dtype=torch.float64))
            continue
        sources.append((found[0], rest))
        along = value.shape if node.op in _ROW_NORMS else (-1, *[1] * (len(shape) - 2))
        numbers.append(value.to(torch.float64).reshape(along))
    return OwnAffine(node.module, Edge(node.index), numbers[0], numbers[1], tuple(sources))


def _written_out(observed: Observed, node: Node) -> OwnAffine | None:
    """The products and sums with parameters that follow a hand-written norm in its own module."""
    scale, shift = torch.ones((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    sources: list[tuple[Source, float]] = []
    edge = Edge(node.index)
    while True:
        readers = observed.graph.consumers(edge)
        if len(readers) != 1 or readers[0].module != node.module or edge in observed.graph.output:
            break
        reader = readers[0]
        found = None if reader.writes else step(observed, reader)
        if found is None:
            break
        if not neutral(observed, reader):
            static = next(s for s in reader.inputs if not observed.graph.is_live(s))
            if reader.op not in ("mul", "add"):
                break
            sources.append((static, 1.0 if reader.op == "mul" else 0.0))
        scale, shift = found.scale * scale, found.scale * shift + found.shift
        edge = Edge(reader.index)
    return OwnAffine(node.module, edge, scale, shift, tuple(sources)) if sources else None


def fold_own_affine(plan: Plan, own: OwnAffine) -> Place | None:
    """The place of a norm whose weight and bias go into every layer that it feeds; None if they do nothing.

    Raises:
        RefusalError: they cannot.
    """
    if bool((own.scale == 1).all()) and bool((own.shift == 0).all()):
        return None
    observed = plan.observed
    reason = why_not_module(observed, own.path) if own.path else None
    if reason is not None:
        raise RefusalError(reason)
    edits = [_neutralize(observed, source, number) for source, number in own.sources]
    if observed.graph.nodes[own.exit].options.get("activation") is not None:
        raise RefusalError("its own activation follows it")
    shape = [int(size) for size in observed.graph.nodes[own.exit].outputs[own.exit.output].shape]
    found = absorb(plan, own.exit, own.scale.expand(shape), own.shift.expand(shape), [own.path])
    between = frozenset([own.path, *found.modules]) - {"", *found.layers}
    line = f"its weight{' and bias' if bool((own.shift != 0).any()) else ''} into {names(found.layers)}"
    if _forgets(observed, own.path):
        edits = [_without(own.path)]
    place = own.path or "the model"
    return Place(place, line, (*found.edits, *edits), tuple(found.layers), frozenset(), between, found.untied)


def _forgets(observed: Observed, path: str) -> bool:
    parent = observed.model.get_submodule(path.rpartition(".")[0])
    return type(observed.model.get_submodule(path)) in _WITHOUT and not isinstance(parent, _READERS)


def _without(path: str) -> Edit:
    def edit(model: nn.Module) -> None:
        norm = model.get_submodule(path)
        for name in ("weight", "bias"):
            if name in norm._parameters:
                norm.register_parameter(name, None)
        for flag in ("elementwise_affine", "affine"):
            if hasattr(norm, flag):
                setattr(norm, flag, False)

    return edit


def _neutralize(observed: Observed, source: Source, number: float) -> Edit:
    """Set the parameter behind a value so that the value becomes one number.

    Raises:
        RefusalError: no parameter of the norm's own is behind it, or not alone.
    """
    graph = observed.graph
    while isinstance(source, Edge):
        node = graph.nodes[source]
        others = node.options.get("other", node.options.get("input"))
        if node.op == "add" and isinstance(others, int | float) and len(node.inputs) == 1:
            number -= others  # weights kept as 1 + w
        elif node.op not in kinds.RESHAPES or len(node.inputs) != 1:
            raise RefusalError(f"its weight is computed by {called(node)}")
        _alone(observed, source)
        source = node.inputs[0]
    if not isinstance(source, Parameter):
        raise RefusalError("its weight is no parameter")
    _alone(observed, source)
    name = source.name
    group = next(group for group in graph.parameters if group[0] == name)
    if len(group) > 1:
        raise RefusalError(f"its weight is tied: {', '.join(group)}")

    def edit(model: nn.Module) -> None:
        assign(model, name, torch.full_like(model.get_parameter(name), number, dtype=torch.float64))

    return edit


def _alone(observed: Observed, source: Source) -> None:
    readers = observed.graph.consumers(source)
    if len(readers) > 1:
        raise RefusalError(f"its weight is also read by {called(readers[1])}")
