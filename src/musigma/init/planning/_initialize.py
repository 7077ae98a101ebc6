"""Plan a model's initialization, and carry it out."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from musigma.graph import Graph, Input, kinds, named_inputs, record, unwrap
from musigma.init._apply import skipped_by
from musigma.init._names import Slot, clean, slots
from musigma.init.planning import families
from musigma.init.planning._backward import Backward
from musigma.init.planning._book import Book
from musigma.init.planning._choose import Chooser
from musigma.init.planning._entry import Entry, Layer
from musigma.init.planning._facts import Facts
from musigma.init.planning._leftover import leftovers, path_notes
from musigma.init.planning._measure import kept_on_failure, measured_walk
from musigma.init.planning._plan import Plan
from musigma.init.planning._purpose import Purposes
from musigma.init.planning._verify import verify as measure
from musigma.init.planning._walk import Walk
from musigma.init.recipes import find_recipe, fitted

__all__ = ["families", "initialize", "plan"]

# Draws per signal: with 2048 the correlation of two independent signals is 0.02 off.
_DRAWS, _FEWEST = 2048, 256
# Numbers kept for all signals of a graph together, 3 rows of 8 bytes each: 400 MB.
_BUDGET = 1 << 24
# A head that reads something else than was thought changes the tied table, and with it what it reads.
_WALKS = 4


def plan(
    model: nn.Module, example: Any, *, scheme: Any = "auto", seed: int = 0, skip: Iterable[str] = ()
) -> Plan:
    """Decide how to initialize every tensor of a model, by what really follows it; nothing is changed.

    Args:
        model: any module; on the meta device too.
        example: a tensor, a tuple of positional arguments or a dict of keyword arguments for the model.
        scheme: "auto", the name of a scheme for all weights, the name of a recipe, or a recipe.
        seed: what the numbers will be drawn from, with each tensor's name.
        skip: names or patterns of tensors to leave as they are.

    Returns:
        The plan.

    Raises:
        Exception: whatever the model raises on the example.
        ValueError: an unknown scheme.

    Example:
        >>> import torch, musigma as ms
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
        >>> print(ms.init.plan(model, torch.ones(2, 4)).entries[0].reason)
        relu follows: variance 1 where it bends
    """
    return _planned(model, example, scheme, seed, skip).plan


def initialize(
    model: nn.Module,
    example: Any,
    scheme: Any = "auto",
    seed: int = 0,
    verify: bool = True,
    skip: Iterable[str] = (),
) -> Plan:
    """Initialize every tensor of a model, by what really follows it, and measure that it worked.

    Args:
        model: any module that holds numbers (not on the meta device).
        example: a tensor, a tuple of positional arguments or a dict of keyword arguments for the model.
        scheme: "auto", the name of a scheme for all weights, the name of a recipe, or a recipe.
        seed: what the numbers are drawn from, with each tensor's name.
        verify: run the example once more, forward and backward, and compare with what was expected.
        skip: names or patterns of tensors to leave as they are.

    Returns:
        The plan that was carried out, with its verification.

    Raises:
        Exception: whatever the model raises on the example; the model keeps the weights it had.
        ValueError: an unknown scheme.
    """
    planned = _planned(model, example, scheme, seed, skip)
    done, model = planned.plan, unwrap(model)
    with kept_on_failure(slots(model)):
        done.apply(model)
        done = fitted(find_recipe(scheme), done, model, example)
        if done is not planned.plan:
            done = replace(done, layers=planned.expected(done.entries))
        if verify and done.graph is not None:
            done.verification = measure(model, example, done.graph, done.layers)
    return done


@dataclass(frozen=True)
class _Planned:
    """A plan, and what it takes to say what other laws would give."""

    plan: Plan
    chooser: Chooser
    facts: Facts

    def expected(self, entries: Iterable[Entry]) -> tuple[Layer, ...]:
        """What is expected of each layer under given laws."""
        book = self.chooser.book
        book.entries = {entry.tensor: entry for entry in entries}
        # A recipe writes some of what auto leaves at its start: learned scales of branches.
        book.skipped = {name: why for name, why in book.skipped.items() if name not in book.entries}
        walk = Walk(self.chooser.purposes.graph, self.chooser, self.facts)
        walk.run()
        return _with_gradients(walk)


def _planned(model: nn.Module, example: Any, scheme: Any, seed: int, skip: Iterable[str]) -> _Planned:
    recipe = find_recipe(scheme)
    model = unwrap(model)
    facts, graph = _recorded(model, example)
    found = slots(model)
    book = Book(graph, found, _kept(found, model, skip))
    chooser = Chooser(book, Purposes(graph))
    walk = _walk(graph, chooser, facts)
    if walk.unknown and not _is_hollow(model):
        walk = measured_walk(model, example, chooser, facts, seed)
    layers = _with_gradients(walk)
    leftovers(book, graph, found)
    order = {slot.name: index for index, slot in enumerate(found)}
    entries = tuple(sorted(book.entries.values(), key=lambda entry: order[entry.tensor]))
    notes = (*book.notes, *chooser.targets.unreachable.values(), *path_notes(graph, found))
    made = Plan(entries, layers, book.skipped, notes, seed, "auto", graph)
    planned = _Planned(made, chooser, facts)
    if recipe is None:
        return planned
    changed = recipe(made, model)
    return replace(planned, plan=replace(changed, layers=planned.expected(changed.entries)))


def _with_gradients(walk: Walk) -> tuple[Layer, ...]:
    """The layers with what theory says of their gradients, relative to the last one that gets any."""
    backward = Backward(walk)
    backward.run()
    layers = [walk.layers[index] for index in sorted(walk.layers)]
    reached = [layer.node for layer in layers if backward.energy.get(layer.node, 0.0) > 0]
    last = backward.energy[reached[-1]] if reached else math.nan
    after_lost = {index for at in backward.lost for index in walk.graph.ancestors(walk.graph.nodes[at])}
    return tuple(
        layer
        if layer.node in after_lost
        else replace(
            layer,
            gradient=backward.energy.get(layer.node, math.nan) / last,
            gradient_spread=math.sqrt(backward.strays.get(layer.node, math.nan)),
        )
        for layer in layers
    )


def _is_hollow(model: nn.Module) -> bool:
    return any(p.is_meta for p in model.parameters())


def _recorded(model: nn.Module, example: Any) -> tuple[Facts, Graph]:
    meta = _is_hollow(model)
    facts = Facts(_DRAWS)
    with torch.no_grad():
        graph = record(model, _to_meta(example) if meta else example, listen=facts.listen)
    if len(graph) * facts.count > _BUDGET:
        facts.count = max(_FEWEST, _BUDGET // max(len(graph), 1))
        facts.operands = {key: values[: facts.count] for key, values in facts.operands.items()}
    for name, tensor in named_inputs(model, example).items():
        facts.read(name, tensor, _features(graph, name, tensor))
    return facts, graph


def _features(graph: Graph, name: str, tensor: Tensor) -> int:
    """Which dimension of an input runs over units: the second one for what convolutions read."""
    if tensor.dim() < 3:
        return -1
    pending = list(graph.consumers(Input(name))) if name in graph.inputs else []
    seen = set()
    while pending:
        node = pending.pop(0)
        if node.op in kinds.CONVOLUTIONS | kinds.TRANSPOSED_CONVOLUTIONS | kinds.POOLINGS | kinds.BATCH_NORMS:
            return 1
        if graph.weights(node) or node.index in seen:
            return -1
        seen.add(node.index)
        pending += graph.consumers(node)
    return -1


def _to_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to("meta")
    if isinstance(value, dict):
        return {key: _to_meta(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_to_meta, value))
    return value


def _kept(found: list[Slot], model: nn.Module, skip: Iterable[str]) -> dict[str, str]:
    patterns = [clean(name, model) for name in ([skip] if isinstance(skip, str) else skip)]
    return skipped_by(patterns, found, model)


def _walk(graph: Graph, chooser: Chooser, facts: Facts) -> Walk:
    for _ in range(_WALKS):
        before = dict(chooser.heads)
        chooser.again()
        walk = Walk(graph, chooser, facts)
        walk.run()
        close = all(abs(before.get(k, 1.0) - v) <= 0.01 * v for k, v in chooser.heads.items())
        if close or not any(len(entry.tied) for entry in chooser.book.entries.values()):
            break
    return walk
