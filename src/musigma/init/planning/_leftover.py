"""Tensors that the walk met in no role it knows: not run, or used in an unknown way."""

from __future__ import annotations

import math

import torch
from torch import nn

from musigma.graph import Graph
from musigma.init._fans import layer_fans
from musigma.init._names import Slot
from musigma.init.planning._book import Book, Note


def leftovers(book: Book, graph: Graph, found: list[Slot]) -> None:
    """Give what did not run the law of its layer type; leave what nobody understands, and say so."""
    known = {name for group in graph.parameters for name in group}
    for slot in found:
        if slot.name in book.entries or slot.name in book.skipped:
            continue
        readers = [r for name in slot.owners if name in known for r in graph.consumers(name)]
        if readers:
            ops = ", ".join(dict.fromkeys(reader.op for reader in readers))
            book.keep(slot.name, f"what {ops} does with it is not known; give it a rule of ms.init.apply")
            continue
        _not_run(book, slot)


def path_notes(graph: Graph, found: list[Slot]) -> list[str]:
    """Which path ran, where the model asks its data which one to take.

    Args:
        graph: what ran.
        found: the model's parameters.
    """
    asked = [node for node in graph.nodes if node.op in _ASKING and graph.is_live(node)]
    if not asked:
        return []
    where = ", ".join(dict.fromkeys(node.module or "the model" for node in asked))
    ran = {name for group in graph.parameters for name in group if graph.consumers(group[0])}
    idle = [slot.name.rpartition(".")[0] for slot in found if ran.isdisjoint(slot.owners)]
    without = f"; not run: {', '.join(dict.fromkeys(idle))}" if idle else ""
    last = asked[-1]
    way = " → ".join(dict.fromkeys(node.module or "the model" for node in graph.nodes[last.index + 1 :]))
    then = f"; then ran {way[:_SHOWN]}" if way else ""
    return [
        f"{where} looks at the data ({last.op}) to choose a path: planned is the one that ran{then}{without}"
    ]


# What hands a number to Python, which may branch on it.
_ASKING = frozenset(("bool", "item", "tolist", "float", "int", "equal", "allclose", "is_nonzero"))
_SHOWN = 200


def _not_run(book: Book, slot: Slot) -> None:
    owner, leaf = slot.owners[slot.name]
    tensor = slot.parameter
    said = "did not run on this example: "
    note = Note(module=slot.name.rpartition(".")[0])
    if tensor.dim() >= 2 and isinstance(owner, nn.Module) and hasattr(owner, "weight"):
        blank = torch.empty(tensor.shape, device="meta")
        fan_in = float(layer_fans(owner, leaf, blank).fan_in)
        std = 1 / math.sqrt(max(fan_in, 1.0))
        book.write(slot.name, "normal", {"std": std}, f"{said}LeCun's variance", note)
    elif leaf.startswith("bias"):
        book.write(slot.name, "zeros", {}, f"{said}a bias starts at 0", note)
    elif leaf == "weight" and "norm" in type(owner).__name__.lower():
        book.write(slot.name, "ones", {}, f"{said}a norm starts with the weight 1", note)
    else:
        book.keep(slot.name, "did not run on this example, and its layer is of no known type")
