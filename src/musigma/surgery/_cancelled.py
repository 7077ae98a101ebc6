"""Which biases a normalization subtracts again: every bias is followed, element by element, to the norm."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from musigma import graph as _graph
from musigma.graph import Buffer, Edge, Graph, Node, Parameter, kinds

__all__ = ["CancelledBias", "cancelled_biases"]

_CONVOLUTIONS = kinds.CONVOLUTIONS | kinds.TRANSPOSED_CONVOLUTIONS
_CHANNEL_FIRST = kinds.BATCH_NORMS | kinds.GROUP_NORMS
_LAYERS = frozenset(("linear", "bilinear")) | _CONVOLUTIONS | _CHANNEL_FIRST | frozenset(("layer_norm",))
_SUMS = frozenset(("add", "sub"))
# Copies that keep the row-major order of their elements.
_COPIES = frozenset(
    ("reshape", "flatten", "unflatten", "view", "squeeze", "unsqueeze", "contiguous", "clone", "to", "detach")
)


@dataclass(frozen=True)
class CancelledBias:
    """A bias that reaches the output only through normalizations that subtract it.

    Args:
        name: qualified.
        nodes: the ops that add it.
        norms: the norms that subtract it again, one for each of them.
        elements: for each norm which element of the bias stands in its input, place by place.
        others: the other ops that read a running mean of these norms.
    """

    name: str
    nodes: tuple[Node, ...]
    norms: tuple[Node, ...]
    elements: tuple[Tensor, ...] = field(repr=False, compare=False)
    others: tuple[Node, ...] = ()


@dataclass(frozen=True)
class _Trail:
    """A bias on its way: which of its elements stands in each place of a value."""

    name: str
    start: Node
    path: tuple[Node, ...]
    elements: Tensor


def cancelled_biases(
    model: nn.Module, inputs: Any, *, absorbed: bool = False, seed: int = 0
) -> tuple[CancelledBias, ...]:
    """Run the model once, as it is, and follow every bias.

    A bias is cancelled where every set of values that shares one mean holds one and the same element of it,
    whatever views, reshapes and poolings lie between: mean(z + b) = mean(z) + b. It has to be so at every use
    of the parameter, and its values must go nowhere else.

    Args:
        model: left as it was.
        inputs: as the model takes them.
        absorbed: what can be taken out in both modes: count a BatchNorm in eval mode too, whose running mean
            can take the bias in, but none behind a dropout, which scales the bias in training.
        seed: what the model's own randomness starts from.

    Returns:
        one entry per parameter, in the order of the ops.
    """
    trails: dict[tuple[int, int], _Trail] = {}
    ends: list[tuple[_Trail, Node]] = []

    def listen(node: Node, args: Any, kwargs: Any, outputs: Any) -> None:
        arrived = _arrived(trails, node)
        if node.op in kinds.CENTERING_NORMS - kinds.ADDITIONS and _subtracts_a_mean(node, absorbed):
            if arrived is not None and _one_element_a_mean(node, arrived.elements):
                ends.append((arrived, node))
        elif arrived is not None and len(outputs) == 1:
            moved = _carried(node, arrived.elements, _first(args, kwargs), outputs[0], absorbed)
            if moved is not None:
                trails[node.index, 0] = _Trail(arrived.name, arrived.start, (*arrived.path, node), moved)
        for name, elements in _added(model, node, args, kwargs, outputs):
            trails[node.index, 0] = _Trail(name, node, (node,), elements)

    model = _graph.unwrap(model)
    with torch.no_grad(), _graph.forked_rng(model, seed):
        graph = _graph.record(model, inputs, listen=listen)
    return tuple(_complete(graph, ends))


def _complete(graph: Graph, ends: Sequence[tuple[_Trail, Node]]) -> Iterator[CancelledBias]:
    """The biases all of whose uses end so and go nowhere else."""
    by_name: dict[str, list[tuple[_Trail, Node]]] = {}
    for trail, norm in ends:
        if _feeds_only(graph, (*trail.path, norm)):
            by_name.setdefault(trail.name, []).append((trail, norm))
    for name, found in by_name.items():
        starts = {trail.start.index for trail, _ in found}
        if {node.index for node in graph.uses(name)} == starts:
            trails, norms = zip(*found, strict=True)
            yield CancelledBias(
                name,
                tuple(t.start for t in trails),
                norms,
                tuple(t.elements for t in trails),
                _other_readers(graph, norms),
            )


def _other_readers(graph: Graph, norms: Sequence[Node]) -> tuple[Node, ...]:
    means = {
        s.name for norm in norms for s in norm.arguments.get("running_mean", ()) if isinstance(s, Buffer)
    }
    own = {norm.index for norm in norms}
    return tuple(n for n in graph.nodes if n.index not in own and not means.isdisjoint(n.buffers))


def _feeds_only(graph: Graph, path: Sequence[Node]) -> bool:
    for node, following in pairwise(path):
        if node.index in graph.output or [n.index for n in graph.consumers(node)] != [following.index]:
            return False
    norm = path[-1]
    others = [s for name, sources in norm.arguments.items() if name != "input" for s in sources]
    return path[-2].index not in others


def _arrived(trails: Mapping[tuple[int, int], _Trail], node: Node) -> _Trail | None:
    sources = node.arguments.get("input", ())
    return trails.get(sources[0].key) if len(sources) == 1 and isinstance(sources[0], Edge) else None


def _first(args: Any, kwargs: Mapping[str, Any]) -> Any:
    return args[0] if args else kwargs.get("input")


def _subtracts_a_mean(node: Node, absorbed: bool) -> bool:
    """Whether it subtracts the mean of its input, or (`absorbed`) one in a buffer that can be shifted."""
    switch = {"batch_norm": "training", "instance_norm": "use_input_stats"}.get(node.op)
    if switch is None or node.options.get(switch, True) is True:
        return True
    running = node.arguments.get("running_mean", ())
    return absorbed and len(running) == 1 and isinstance(running[0], Buffer)


def _added(
    model: nn.Module, node: Node, args: Any, kwargs: Any, outputs: Any
) -> Iterator[tuple[str, Tensor]]:
    """The bias that an op adds to its result, with the element that each place of the result gets."""
    if not outputs or not outputs[0].is_floating_point():
        return
    shape = tuple(outputs[0].shape)
    bias = node.arguments.get("bias", ())
    if node.op in _LAYERS and len(bias) == 1 and isinstance(bias[0], Parameter):
        yield bias[0].name, _along(node, shape)
    elif node.op in _SUMS and node.parameters:
        parameter = model.get_parameter(node.parameters[0])
        memory = parameter.untyped_storage().data_ptr()
        operands = [t for t in _graph.tensors((args, kwargs)) if t.is_floating_point()]
        static = [t for t in operands if t.untyped_storage().data_ptr() == memory]
        if len(operands) == 2 and len(static) == 1:
            yield node.parameters[0], _places(static[0]).expand(shape)


def _along(node: Node, shape: tuple[int, ...]) -> Tensor:
    """Places of a bias per channel (or, behind a LayerNorm, per normalized place)."""
    if node.op == "layer_norm":
        normalized = node.options.get("normalized_shape")
        own = tuple(normalized) if isinstance(normalized, list | tuple) else shape[-1:]
        return torch.arange(int(torch.Size(own).numel()), device="cpu").reshape(own).expand(shape)
    dims = int(node.op[-2]) if node.op in _CONVOLUTIONS and node.op[-1] == "d" else 0
    axis = 1 if node.op in _CHANNEL_FIRST else len(shape) - dims - 1
    channels = torch.arange(shape[axis], device="cpu")
    return channels.reshape(-1, *[1] * (len(shape) - axis - 1)).expand(shape)


def _places(t: Tensor) -> Tensor:
    """Where in its storage each element of a tensor lies."""
    size = t.untyped_storage().nbytes() // t.element_size()
    return torch.arange(size, device="cpu").as_strided(t.shape, t.stride(), t.storage_offset())


def _carried(node: Node, elements: Tensor, x: Any, y: Tensor, both_modes: bool) -> Tensor | None:
    """What an op that computes nothing (in both modes, if asked) does to the places; None if it computes."""
    if not isinstance(x, Tensor) or x.shape != elements.shape:
        return None
    if node.op in kinds.DROPOUTS:  # one that drops nothing may be a view, which says nothing of training
        inactive = node.options.get("training") is False and not both_modes
        return elements if inactive or node.options.get("p") == 0 else None
    if node.view and x.dtype == y.dtype:
        return _through_view(elements, x, y)
    if node.op in _COPIES and x.numel() == y.numel():
        return elements.reshape(y.shape)
    if node.op in kinds.POOLINGS:
        return _through_pooling(node, elements, y)
    if node.op == "mean":
        return _through_mean(node, elements, y)
    return None


def _through_view(elements: Tensor, x: Tensor, y: Tensor) -> Tensor | None:
    if any(step == 0 and size > 1 for step, size in zip(x.stride(), x.shape, strict=True)):
        return None
    memory = torch.full((x.untyped_storage().nbytes() // x.element_size(),), -1, device="cpu")
    memory.as_strided(x.shape, x.stride(), x.storage_offset()).copy_(elements)
    return memory.as_strided(y.shape, y.stride(), y.storage_offset())


def _through_pooling(node: Node, elements: Tensor, y: Tensor) -> Tensor | None:
    """max(z + b) = max(z) + b and mean(z + b) = mean(z) + b, if a window holds one element and no zeros."""
    dims = int(node.op[-2])
    pads = torch.tensor(node.options.get("padding", 0), device="cpu").any() and node.options.get(
        "count_include_pad", True
    )
    average = node.op.startswith("avg")
    if node.op.startswith("lp") or (average and (bool(pads) or node.options.get("divisor_override"))):
        return None
    flat = elements.flatten(-dims)
    if elements.ndim != y.ndim or not bool((flat == flat[..., :1]).all()):
        return None
    return flat[..., 0].reshape(*y.shape[:-dims], *[1] * dims).expand(y.shape)


def _through_mean(node: Node, elements: Tensor, y: Tensor) -> Tensor | None:
    dim = node.options.get("dim")
    dims = [dim] if isinstance(dim, int) else list(dim) if isinstance(dim, list | tuple) else []
    if not dims:
        return None
    least = elements.amin(dims, keepdim=bool(node.options.get("keepdim")))
    most = elements.amax(dims, keepdim=bool(node.options.get("keepdim")))
    return least if least.shape == y.shape and bool((least == most).all()) else None


def _one_element_a_mean(node: Node, elements: Tensor) -> bool:
    """Whether every set of values that the norm takes a mean of holds one element of the bias."""
    sets = _sets(node, elements)
    return sets is not None and sets.numel() > 0 and bool((sets == sets[..., :1]).all())


def _sets(node: Node, x: Tensor) -> Tensor | None:
    """The values with those that share a mean along the last axis."""
    if node.op in kinds.BATCH_NORMS and x.ndim > 1:
        return x.transpose(0, 1).flatten(1)
    if node.op == "instance_norm" and x.ndim > 2:
        return x.flatten(2)
    groups, normalized = node.options.get("num_groups"), node.options.get("normalized_shape")
    if node.op == "group_norm" and isinstance(groups, int):
        return x.reshape(x.shape[0], groups, -1)
    if node.op == "layer_norm" and isinstance(normalized, list | tuple):
        return x.flatten(x.ndim - len(normalized))
    return None
