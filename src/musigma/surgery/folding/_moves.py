"""A scale and a shift on their way through ops that only move values: views, poolings, paddings.

Both are tensors of a value's full shape. Going with the data, the op itself is run on them; going against
it, on the places of its input, which says where each element came from.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from musigma.graph import Edge, Node, Source, kinds
from musigma.surgery._places import Observed, called, why_not_module
from musigma.surgery.folding._affine import RefusalError, neutral

_MEANS = frozenset(f"{kind}avg_pool{d}d" for kind in ("", "adaptive_") for d in (1, 2, 3))
_MAXIMA = frozenset(f"{kind}max_pool{d}d" for kind in ("", "adaptive_") for d in (1, 2, 3))
_MIXERS = _MEANS | _MAXIMA | frozenset(("interpolate", "upsample", "mean"))
_CONSTANT_PADS = (
    nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d, nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d,
)  # fmt: skip


@dataclass(frozen=True)
class Moved:
    """A scale and a shift at another value.

    Args:
        source: the value.
        scale: of its full shape.
        shift: likewise.
        border: the padding value that each channel needs now, if the op's own no longer does.
    """

    source: Source
    scale: Tensor
    shift: Tensor
    border: Tensor | None = None


def moves(observed: Observed, node: Node) -> bool:
    """Whether an op only moves values about, in a way that is understood."""
    return neutral(observed, node) or node.index in observed.kept or node.op == "mean"


def with_data(observed: Observed, node: Node, edge: Edge, scale: Tensor, shift: Tensor) -> Iterator[Moved]:
    """Where the scale and shift of a node's input are found in its outputs.

    Raises:
        RefusalError: they do not pass.
    """
    if neutral(observed, node):
        yield Moved(Edge(node.index), scale, shift)
    elif node.op in _MIXERS:
        _check_mixing(node, scale, shift)
        dims, keeps = _mixed_dims(node, scale.ndim)
        yield Moved(Edge(node.index), *(_after(v, dims, keeps, node) for v in (scale, shift)))
    elif node.op in kinds.PADDINGS and node.options.get("mode", "constant") == "constant":
        yield _padded(observed, node, scale, shift)
    else:
        slots = sources_of(observed, node)
        ours = [isinstance(s, Edge) and s.key == edge.key for s in slots]
        scales, shifts = (
            _outputs(
                observed.kept[node.index](
                    *(v if own else _like(observed, s, rest) for own, s in zip(ours, slots, strict=True))
                )
            )
            for v, rest in ((scale, 1.0), (shift, 0.0))
        )
        for position, pair in enumerate(zip(scales, shifts, strict=True)):
            yield Moved(Edge(node.index, position), *pair)


def against_data(observed: Observed, edge: Edge, scale: Tensor, shift: Tensor) -> Iterator[Moved]:
    """Which scales and shifts of a node's inputs give these of one of its outputs.

    Raises:
        RefusalError: none do.
    """
    node = observed.graph.nodes[edge]
    if neutral(observed, node):
        live = [s for s in node.inputs if observed.graph.is_live(s)]
        yield Moved(live[0], scale, shift)
    elif node.op in _MIXERS:
        (source,) = node.inputs
        _check_mixing(node, scale, shift)
        shape = shape_of(observed, source)
        dims, keeps = _mixed_dims(node, len(shape))
        yield Moved(source, *(_before(v, dims, keeps, node).expand(shape) for v in (scale, shift)))
    elif node.op in kinds.PADDINGS:
        raise RefusalError(f"{called(node)} comes between")
    else:
        yield from _gathered(observed, node, edge.output, scale, shift)


def _gathered(observed: Observed, node: Node, position: int, scale: Tensor, shift: Tensor) -> Iterator[Moved]:
    slots = sources_of(observed, node)
    shapes = [shape_of(observed, source) for source in slots]
    sizes = [int(torch.Size(shape).numel()) for shape in shapes]
    starts = [sum(sizes[:k]) for k in range(len(sizes))]
    places = [
        torch.arange(start, start + size, dtype=torch.float64).reshape(shape)
        for start, size, shape in zip(starts, sizes, shapes, strict=True)
    ]
    where = _outputs(observed.kept[node.index](*places))[position].flatten().long()
    pulled: list[Tensor] = []
    for value, rest in ((scale, 1.0), (shift, 0.0)):
        flat = torch.full((sum(sizes),), rest, dtype=torch.float64)
        flat[where] = value.flatten().cpu()
        if not torch.equal(flat[where], value.flatten().cpu()):
            raise RefusalError(f"{called(node)} hands on a value under different scales")
        pulled.append(flat.to(value.device))
    for source, start, size, shape in zip(slots, starts, sizes, shapes, strict=True):
        yield Moved(source, *(flat[start : start + size].reshape(shape) for flat in pulled))


def sources_of(observed: Observed, node: Node) -> list[Source]:
    """The sources of the tensors that a kept call takes, in its order."""
    kept = observed.kept[node.index]
    if len(node.inputs) != kept.slots:
        raise RefusalError(f"{called(node)} moves values to where the data say")
    return list(node.inputs)


def _outputs(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def shape_of(observed: Observed, source: Source) -> tuple[int, ...]:
    """The shape of a value.

    Raises:
        RefusalError: it is the model's input, whose shape no op made.
    """
    if isinstance(source, Edge):
        return tuple(int(s) for s in observed.graph.nodes[source].outputs[source.output].shape)
    value = observed.value(source)
    if value is None:
        raise RefusalError(f"{source}, which no layer made, is part of its input")
    return tuple(value.shape)


def _like(observed: Observed, source: Source, fill: float) -> Tensor:
    return torch.full(shape_of(observed, source), fill, dtype=torch.float64)


def _mixed_dims(node: Node, ndim: int) -> tuple[tuple[int, ...], bool]:
    """The dims of its input that an op mixes, and whether its output has them too."""
    if node.op == "mean":
        dim = node.options.get("dim")
        dims = [dim] if isinstance(dim, int) else list(dim) if isinstance(dim, list | tuple) else []
        if not dims:
            raise RefusalError(f"{called(node)} averages over everything")
        return tuple(sorted(d % ndim for d in dims)), bool(node.options.get("keepdim"))
    spatial = int(node.op[-2]) if node.op[-1] == "d" else ndim - 2
    return tuple(range(ndim - spatial, ndim)), True


def _check_mixing(node: Node, scale: Tensor, shift: Tensor) -> None:
    """Whether avg(s·x + t) = s·avg(x) + t, or the same of the maximum, given one s and t a window."""
    if node.op in _MAXIMA:
        least = float(scale.min()) if scale.numel() else 1.0
        if least < 0 or (least == 0 and len(node.outputs) > 1):
            raise RefusalError(f"{called(node)} would take the smallest where the scale is negative")
    if _counts_zeros(node) and bool((shift != 0).any()):
        raise RefusalError(f"{called(node)} averages zeros in, which the shift would not reach")


def _after(value: Tensor, dims: tuple[int, ...], keeps: bool, node: Node) -> Tensor:
    first = _collapsed(value, dims, node)
    first = first if keeps else first.squeeze(dims)
    return first.expand([int(s) for s in node.outputs[0].shape])


def _before(value: Tensor, dims: tuple[int, ...], keeps: bool, node: Node) -> Tensor:
    if not keeps:
        for dim in dims:
            value = value.unsqueeze(dim)
    return _collapsed(value, dims, node)


def _collapsed(value: Tensor, dims: tuple[int, ...], node: Node) -> Tensor:
    first = value
    for dim in dims:
        first = first.narrow(dim, 0, min(1, first.shape[dim]))
    if not torch.equal(first.expand_as(value), value):
        raise RefusalError(f"{called(node)} mixes values of different scales or shifts")
    return first


def _counts_zeros(node: Node) -> bool:
    if node.op not in _MEANS or node.op.startswith("adaptive"):
        return False
    if node.options.get("divisor_override") is not None:
        return True
    padding = node.options.get("padding", 0)
    pads = any(padding) if isinstance(padding, list | tuple) else bool(padding)
    return pads and bool(node.options.get("count_include_pad", True))


def per_channel(value: Tensor, axis: int) -> Tensor:
    """A tensor that is constant but for one dim, along that dim.

    Raises:
        RefusalError: it is not constant.
    """
    flat = value.movedim(axis, 0).flatten(1)
    if flat.shape[1] and not torch.equal(flat[:, :1].expand_as(flat), flat):
        raise RefusalError("its scale or shift is not one number a channel there")
    if not flat.shape[1]:
        raise RefusalError("the example holds no values there")
    return flat[:, 0].contiguous()


def _padded(observed: Observed, node: Node, scale: Tensor, shift: Tensor) -> Moved:
    """Through a padding with a constant c, which has to become (c − shift) / scale."""
    number, pads = node.options.get("value") or 0.0, node.options.get("pad")
    if not isinstance(number, int | float) or not isinstance(pads, list | tuple):
        raise RefusalError(f"{called(node)} is not understood")
    where = Edge(node.index)
    dims = [scale.ndim - 1 - k // 2 for k in range(len(pads)) if pads[k]]
    try:
        inner = [_collapsed(v, tuple(dims), node) for v in (scale, shift)]
    except RefusalError:
        inner = []
    if inner and torch.equal(inner[0] * number + inner[1], torch.full_like(inner[0], number)):
        shape = [int(size) for size in node.outputs[0].shape]
        return Moved(where, inner[0].expand(shape), inner[1].expand(shape))
    if min(dims, default=2) < 2:  # new channels or tokens, which are what they were: nothing scales them
        scales, shifts = (F.pad(v, tuple(pads), value=rest) for v, rest in ((scale, 1.0), (shift, 0.0)))
        return Moved(where, scales, shifts)
    return _padded_by_module(observed, node, number, scale, shift)


def _padded_by_module(observed: Observed, node: Node, constant: float, scale: Tensor, shift: Tensor) -> Moved:
    module = observed.model.get_submodule(node.module)
    if type(module) not in _CONSTANT_PADS:
        raise RefusalError(f"{called(node)} pads with {constant:g}, which the shift does not reach")
    reason = why_not_module(observed, node.module)
    if reason is not None:
        raise RefusalError(f"{called(node)} would have to pad with other values: {reason}")
    spatial = len(module.padding) // 2  # type: ignore[arg-type]
    axis = scale.ndim - spatial - 1
    s, t = per_channel(scale, axis), per_channel(shift, axis)
    along = (-1, *[1] * spatial)
    shape = [int(size) for size in node.outputs[0].shape]
    border = border_values(s, t, constant, node)
    return Moved(Edge(node.index), s.reshape(along).expand(shape), t.reshape(along).expand(shape), border)


def border_values(scale: Tensor, shift: Tensor, padded: Tensor | float, node: Node) -> Tensor:
    """What to pad with so that scale · v + shift is what was padded with.

    Raises:
        RefusalError: a channel of scale 0 has none.
    """
    values = (padded - shift) / scale
    dead = scale == 0
    if bool((dead & (shift != padded)).any()):
        raise RefusalError(
            f"{called(node)} pads a channel whose scale is 0: no padding value stands for its shift"
        )
    return torch.where(dead, torch.zeros_like(values), values)
