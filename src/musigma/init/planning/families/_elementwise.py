"""Elementwise ops: the op itself, on the draws."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from musigma.graph import Edge, Node, Parameter, Source, kinds
from musigma.graph import rerun as run_again
from musigma.init.planning._walk import Walk, expanded, rule


@rule(kinds.ELEMENTWISE | kinds.ops("max min"))
def apply(walk: Walk, node: Node) -> None:
    """Run the op on the draws of its operands; what is no signal takes part with its own values."""
    found = walk.inputs(node)
    if not found:
        return
    first = max((signal for _, signal in found), key=lambda s: len(s.measured))
    values = _rerun(walk, node)
    if values is not None:
        walk.put(node, first.like(values))
    elif len(found) == 1:
        walk.put(node, found[0][1])


def _rerun(walk: Walk, node: Node) -> Tensor | None:
    recipe = node.recipe
    if recipe is None or len(recipe.operands) != len(node.inputs):
        return _by_hand(walk, node)
    known: dict[object, Tensor] = {}
    operands: list[Source | float] = []
    for place, (operand, source) in enumerate(zip(recipe.operands, node.inputs, strict=True)):
        values = _operand(walk, node, place, source)
        if values is None and isinstance(operand, float):
            operands.append(operand)
            continue
        if values is None:
            return _by_hand(walk, node)
        known[(-1, place)] = values
        operands.append(Edge(-1, place))
    # The first one gives constants their dtype: a mask must not.
    known = dict(sorted(known.items(), key=lambda item: item[1].dtype == torch.bool))
    try:
        return _finite(run_again(replace(recipe, operands=tuple(operands)), known))
    except (RuntimeError, TypeError, ValueError):
        return _by_hand(walk, node)


def _finite(values: Tensor) -> Tensor | None:
    return values.to(torch.float64) if values.shape[:1] == (3,) else None


def _operand(walk: Walk, node: Node, place: int, source: Source) -> Tensor | None:
    signal = walk.signal(source)
    if signal is not None:
        return signal.values
    if isinstance(source, Parameter):
        added = walk.chooser.added(walk, node, source)
        if added is not None:
            return added.values
    drawn = walk.facts.operands.get((node.index, place))
    return _circle(walk, source) if drawn is None else expanded(drawn)


def _by_hand(walk: Walk, node: Node) -> Tensor | None:
    """Sums and products whose second operand nobody knows: only what is known counts."""
    signals = [signal for _, signal in walk.inputs(node)]
    if len(signals) > 1 and node.op in ("add", "mul"):
        left, right = signals[0].values, signals[1].values
        return left + right if node.op == "add" else left * right
    return signals[0].values


_CIRCLE: dict[str, Callable[[Tensor], Tensor]] = {"sin": torch.sin, "cos": torch.cos}


def _circle(walk: Walk, source: Source) -> Tensor | None:
    """Sines and cosines of positions that nobody has computed (on meta): on the circle, wherever."""
    while isinstance(source, Edge):
        node = walk.graph.nodes[source]
        if node.op in _CIRCLE and node.inputs:
            behind = node.inputs[0]
            return _CIRCLE[node.op](walk.draws.angles(int(behind) if isinstance(behind, Edge) else 0))
        if node.op not in kinds.VIEWS | kinds.SCALINGS or not node.inputs:
            return None
        source = node.inputs[0]
    return None


@rule(kinds.GATES)
def gate(walk: Walk, node: Node) -> None:
    """Half of the units times the sigmoid of the other half."""
    found = walk.inputs(node)
    if found:
        signal = found[0][1]
        other = walk.draws.shuffled(signal.values, node.index)
        walk.put(node, signal.like(signal.values * torch.sigmoid(other)))
