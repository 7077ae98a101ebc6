"""Ops whose weights are packed: attention, recurrent layers, weight norm."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Final

from torch import nn

from musigma.graph import Node, Parameter
from musigma.init._fans import Fans
from musigma.init._packing import gate_names, part_names
from musigma.init.planning._book import Book, Note
from musigma.init.planning._signal import Signal
from musigma.init.planning._targets import Target
from musigma.init.planning.families._recurrent import Recurrence

# σ(1) = 0.73 of the cell is kept a step: Jozefowicz, Zaremba & Sutskever 2015.
FORGET: Final = 1.0


def parts(owner: tuple[nn.Module, str] | None) -> int:
    """How many matrices a tensor stacks."""
    return max(1, len(part_names(*owner))) if owner is not None else 1


def projection(book: Book, node: Node, name: str, signal: Signal) -> float:
    """fan_in·Var(W) of the projection to query, key or value, so that it has variance 1."""
    roles = ("in_proj_weight", f"{name[0]}_proj_weight")
    second = signal.second if signal.second > 0 else 1.0
    for role in roles:
        for source in node.arguments.get(role, ()):
            if not isinstance(source, Parameter):
                continue
            tensor = book.tensor(source.name)
            if tensor is None:
                continue
            width = tensor.shape[1]
            note = Note(node.op, node.module, Fans(width, width), 3 if role == roles[0] else 1, target=1.0)
            said = "query, key and value of variance 1, so that logits have variance 1"
            entry = book.write(source.name, "normal", {"std": 1 / math.sqrt(width * second)}, said, note)
            return width * entry.std**2 if entry is not None else 1 / second
    return 1 / second


def zero_biases(book: Book, node: Node) -> None:
    """Zeros for the biases of torch's own attention."""
    for role in ("in_proj_bias", "out_proj_bias", "bias_k", "bias_v"):
        for source in node.arguments.get(role, ()):
            if isinstance(source, Parameter):
                book.write(source.name, "zeros", {}, "a bias starts at 0", Note(node.op, node.module))


def recurrence(book: Book, node: Node) -> Iterator[Callable[[Signal], Recurrence]]:
    """Each layer of a recurrent op, first layer first."""
    levels: dict[int, list[str]] = {}
    for sources in node.arguments.values():
        for source in sources:
            if isinstance(source, Parameter):
                owner = book.owner(source.name)
                leaf = owner[1] if owner is not None else source.name.rpartition(".")[2]
                found = re.search(r"_l(\d+)", leaf)
                levels.setdefault(int(found[1]) if found else 0, []).append(source.name)
    for level in sorted(levels):
        yield lambda signal, names=levels[level]: _cell(book, node, names, signal)  # type: ignore[misc]


def _cell(book: Book, node: Node, names: list[str], signal: Signal) -> Recurrence:
    kind = node.op.removesuffix("_cell")
    second = signal.second if signal.second > 0 else 1.0
    gates = {"lstm": 4, "gru": 3}.get(kind, 1)
    bias = [0.0] * gates
    from_input = 1.0 / second
    for name in names:
        tensor, owner = book.tensor(name), book.owner(name)
        if tensor is None or owner is None:
            continue
        leaf = owner[1]
        if tensor.dim() < 2:
            _gate_bias(book, node, name, leaf, kind, gates, bias)
            continue
        note = Note(node.op, node.module, Fans(tensor.shape[1], tensor.shape[0] // gates), gates, target=1.0)
        if "hh" in leaf:
            book.write(name, "orthogonal", {}, "carries the state from step to step: lengths are kept", note)
        elif "ih" in leaf:
            std = 1 / math.sqrt(tensor.shape[1] * second)
            entry = book.write(name, "normal", {"std": std}, "gates of variance 1 from the input", note)
            from_input = tensor.shape[1] * entry.std**2 if entry is not None else from_input
        else:
            book.write(
                name, "normal", {"std": tensor.shape[1] ** -0.5}, "projects the state: variance kept", note
            )
    return Recurrence(kind, from_input, 1.0, tuple(bias))


def _gate_bias(
    book: Book, node: Node, name: str, leaf: str, kind: str, gates: int, bias: list[float]
) -> None:
    note = Note(node.op, node.module, parts=gates)
    owner = book.owner(name)
    names = gate_names(owner[0]) if owner is not None else ()
    if kind == "lstm" and "ih" in leaf and (not names or names[1] == "forget"):
        values = (0.0, FORGET, 0.0, 0.0)
        said = "forget gate 1, once for b_ih + b_hh: the cell keeps its content; the others 0"
        if book.write(name, "block_constant", {"values": values}, said, note) is not None:
            bias[1] = FORGET
        return
    book.write(name, "zeros", {}, "a bias starts at 0", note)


def weight_norm(book: Book, node: Node, variance: float, fan: float, target: Target, note: Note) -> None:
    """Direction normal, length √fan·σ: the weight then has the variance it needs."""
    for source in node.inputs:
        if not isinstance(source, Parameter):
            continue
        tensor = book.tensor(source.name)
        if tensor is None:
            continue
        sizes = [size for size in tensor.shape if size > 1]
        if len(sizes) > 1:
            said = f"{target.reason} (the direction; weight norm sets its length)"
            book.write(source.name, "normal", {"std": math.sqrt(variance)}, said, note)
    lengths = [s for s in node.inputs if isinstance(s, Parameter) and book.is_open(s.name)]
    for source in lengths:
        said = f"{target.reason} (the length of each row)"
        book.write(source.name, "constant", {"value": math.sqrt(variance * fan)}, said, note)
