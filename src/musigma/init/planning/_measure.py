"""What theory doesn't say, measured: one forward in which every layer has its law when its turn comes."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from musigma.graph import Graph, Node, kinds, record
from musigma.init._names import Slot
from musigma.init._rule import make_rule
from musigma.init._write import Task, task_for, write
from musigma.init.planning._choose import Chooser
from musigma.init.planning._entry import Entry
from musigma.init.planning._facts import Facts
from musigma.init.planning._signal import Signal
from musigma.init.planning._walk import Walk
from musigma.init.schemes._scheme import SCHEMES


def tasks_of(entries: Iterable[Entry], found: Iterable[Slot]) -> list[Task]:
    """What a plan's entries come down to: one task a tensor.

    Args:
        entries: the plan's.
        found: the tensors of the model to write.

    Raises:
        ValueError: the model lacks a tensor, or has one of another shape.
    """
    slots = {name: slot for slot in found for name in slot.owners}
    tasks, problems = [], []
    for entry in entries:
        slot = slots.get(entry.tensor)
        if slot is None:
            problems.append(f"{entry.tensor} is in the plan and not in the model")
        elif tuple(slot.parameter.shape) != entry.shape:
            problems.append(
                f"{entry.tensor} has shape {tuple(slot.parameter.shape)}, was planned for {entry.shape}"
            )
        else:
            call = functools.partial(SCHEMES[entry.scheme].function, **entry.options)
            tasks.append(task_for(slot, make_rule(entry.tensor, call)))
    if problems:
        raise ValueError("the plan is another model's, nothing was changed:\n  " + "\n  ".join(problems))
    return tasks


@contextmanager
def kept_on_failure(found: Iterable[Slot], *, always: bool = False) -> Iterator[None]:
    """Put tensors back as they were if anything is raised inside, or in any case.

    Args:
        found: the tensors that are written inside.
        always: put them back without a failure too.
    """
    saved = [(slot.parameter, slot.parameter.detach().clone()) for slot in found]
    done = False
    try:
        yield
        done = True
    finally:
        if always or not done:
            for parameter, values in saved:
                # Of `.data`, so that graphs which saved the tensor are not told of a change that is none.
                parameter.data.copy_(values)


def measured_walk(model: nn.Module, example: Any, chooser: Chooser, facts: Facts, seed: int) -> Walk:
    """Walk again beside a running forward; what no rule knows is read off the live tensors.

    Args:
        model: the model, whose weights are put back afterwards.
        example: what it runs on.
        chooser: with the laws of a walk without measurements.
        facts: what the first recording told.
        seed: what the weights are drawn from.

    Returns:
        The walk.
    """
    book = chooser.book
    graph = chooser.purposes.graph
    drawn = dict(book.entries)
    slots = [book.slots[name] for name in drawn]
    chooser.again()
    walk = Walk(graph, chooser, facts)
    live = _Live(graph, walk, drawn)
    with kept_on_failure(slots, always=True), torch.no_grad():
        write(tasks_of(drawn.values(), slots), seed)
        record(model, example, listen=live.listen)
    for node in graph.nodes[live.heard :]:
        walk.visit(node)
    return walk


class _Live:
    """Visits each node when it has run, and makes its tensors what the plan says they are.

    Args:
        graph: the graph of the first recording.
        walk: the walk to lead along.
        drawn: the laws that the running weights were drawn from.
    """

    def __init__(self, graph: Graph, walk: Walk, drawn: dict[str, Entry]) -> None:
        self.graph, self.walk, self.drawn = graph, walk, drawn
        self.heard = 0
        self._same = True

    def listen(self, node: Node, args: Any, kwargs: Any, outputs: tuple[Tensor, ...]) -> None:
        """Follow one op."""
        if not self._same or node.index >= len(self.graph):
            return
        mine = self.graph.nodes[node.index]
        if mine.op != node.op or mine.module != node.module:
            self._same = False  # other weights took another path: the rest is theory
            return
        self.heard = node.index + 1
        self.walk.visit(mine)
        if self.graph.weights(mine) and outputs:
            self._rescale(mine, outputs[0])
        if mine.index in self.walk.unknown:
            self._read(mine, outputs)

    def _rescale(self, node: Node, out: Tensor) -> None:
        """A layer's law may have changed by what was measured before it: its output follows in proportion."""
        book = self.walk.chooser.book
        entry = book.entry(self.graph.weights(node)[0])
        before = self.drawn.get(entry.tensor) if entry is not None else None
        linear = (
            node.op in kinds.PRODUCTS | kinds.CONVOLUTIONS | kinds.TRANSPOSED_CONVOLUTIONS | kinds.EMBEDDINGS
        )
        if entry is None or before is None or not linear or not before.std or entry.std == before.std:
            return
        out.mul_(entry.std / before.std)

    def _read(self, node: Node, outputs: tuple[Tensor, ...]) -> None:
        why = self.walk.unknown[node.index]
        signals: list[Signal | None] = []
        for out in outputs:
            units = 1 if out.dim() > 3 or node.op.endswith("1d") else -1
            drawn = self.walk.facts.draws(out, units)
            signals.append(None if drawn is None else Signal(drawn, f"after {node.op}: {why}"))
        if signals:
            self.walk.put(node, *signals)
