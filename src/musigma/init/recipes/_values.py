"""Which rows of attention's projections make the values, packed ones included."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Final

import torch
from torch import Tensor

from musigma.graph import Edge, Graph, Node, Source, kinds
from musigma.init.recipes._structure import Block

# A cache of earlier keys and values, empty here, is put in front of the new ones.
_QUIET: Final = kinds.VIEWS | kinds.DROPOUTS | kinds.CONCATENATIONS | kinds.ops("to")


def value_rows(graph: Graph, block: Block) -> dict[str, tuple[int, ...] | None]:
    """The weights that make an attention's values, and which of their outputs do.

    Args:
        graph: the model as it ran.
        block: a branch with attention.

    Returns:
        Parameter name → the runs of outputs that it stacks, alternately for queries or keys (first, may be
        0 long) and for values; None where all of its outputs are values.

    Example:
        >>> import torch
        >>> from musigma.graph import record
        >>> from musigma.init.recipes._structure import streams
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> graph = record(layer, torch.zeros(1, 3, 8))
        >>> value_rows(graph, streams(graph)[0].blocks[0])
        {'self_attn.in_proj_weight': (16, 8)}

    References:
        None.
    """
    found: dict[str, tuple[int, ...] | None] = {}
    for node in block.branch.nodes:
        if node.op == "multi_head_attention":
            found |= _of_torch(graph, node)
        elif (source := _value_of(graph, node)) is not None:
            found |= _of_source(graph, source)
    return found


def _of_torch(graph: Graph, node: Node) -> dict[str, tuple[int, ...] | None]:
    for role in ("in_proj_weight", "v_proj_weight"):
        names = [
            s.name for s in node.arguments.get(role, ()) if not isinstance(s, Edge) and hasattr(s, "name")
        ]
        if names:
            rows = int(graph.specs[graph.canonical(names[0])].shape[0])
            return {names[0]: (rows // 3 * 2, rows // 3) if role == "in_proj_weight" else None}
    return {}


def _value_of(graph: Graph, node: Node) -> Source | None:
    """The values that a node weighs by attention; None for a node that doesn't."""
    if node.op in kinds.ATTENTIONS:
        return next(iter(node.arguments.get("value", ())), None)
    if node.op not in kinds.PRODUCTS or graph.weights(node):
        return None
    live = [source for source in node.inputs if graph.is_live(source)]
    weighed = [source for source in live if _from_softmax(graph, source)]
    return next((s for s in live if s is not weighed[0]), None) if len(weighed) == 1 else None


def _from_softmax(graph: Graph, source: Source) -> bool:
    while isinstance(source, Edge):
        node = graph.nodes[source]
        if node.op in kinds.SOFTMAXES:
            return True
        if node.op not in _QUIET:
            return False
        source = node.inputs[0]
    return False


def _of_source(graph: Graph, source: Source) -> dict[str, tuple[int, ...] | None]:
    path = list(_back(graph, source))
    layer = graph.nodes[path[-1]] if path else None
    if layer is None or not graph.weights(layer):
        return {}
    name = graph.weights(layer)[0]
    features = int(layer.outputs[0].shape[-1])
    numbers = torch.arange(features, device="cpu").expand(tuple(map(int, layer.outputs[0].shape)))
    try:
        for edge in reversed(path[:-1]):
            numbers = _replayed(graph.nodes[edge], numbers)[edge.output]
    except (TypeError, ValueError, RuntimeError, IndexError, AttributeError):
        return {}  # a view that we can't repeat: nobody knows which outputs they are
    mine = set(numbers.unique().tolist())
    if len(mine) == features:
        return {name: None}
    runs = [(key, len(list(group))) for key, group in groupby(range(features), key=mine.__contains__)]
    sizes = tuple(size for _, size in runs)
    return {name: (0, *sizes) if runs[0][0] else sizes}


def _back(graph: Graph, source: Source) -> Iterator[Edge]:
    """The edges from a value back to the layer that made it, through views alone."""
    while isinstance(source, Edge):
        yield source
        node = graph.nodes[source]
        live = [s for s in node.inputs if graph.is_live(s)]
        if graph.weights(node) or node.op not in _QUIET or len(live) != 1:
            return
        source = live[0]


def _replayed(node: Node, x: Tensor) -> tuple[Tensor, ...]:
    """A view of other numbers."""
    shape = tuple(map(int, node.outputs[0].shape))
    if node.op in ("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze"):
        return (x.reshape(shape),)
    if tuple(x.shape) == shape and node.op in _QUIET - kinds.SELECTIONS - kinds.ops(
        "transpose permute movedim"
    ):
        return (x,)
    if node.op == "getitem":
        return (x[node.options["index"]],)  # type: ignore[index]
    if node.op in ("split", "chunk", "tensor_split"):
        dim = node.options.get("dim", 0)
        assert isinstance(dim, int)
        return x.split([int(spec.shape[dim]) for spec in node.outputs], dim)
    made = getattr(torch, node.op)(x, **node.options)
    return tuple(made) if isinstance(made, tuple | list) else (made,)
