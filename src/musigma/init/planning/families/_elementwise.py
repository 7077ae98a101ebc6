"""Elementwise ops: the op itself, on the draws."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.autograd import forward_ad

from musigma.graph import Edge, Node, Source, kinds
from musigma.graph import rerun as run_again
from musigma.init.planning._backward import Backward, back
from musigma.init.planning._walk import Walk, expanded, rule


@rule(kinds.ELEMENTWISE | kinds.ops("max min"))
def apply(walk: Walk, node: Node) -> None:
    """Run the op on the draws of its operands; what is no signal takes part with its own values."""
    found = walk.inputs(node)
    if not found:
        return
    first = max((signal for _, signal in found), key=lambda s: len(s.measured))
    values, drift = _with_drift(walk, node)
    if values is not None:
        walk.put(node, first.like(values, drift))
    elif len(found) == 1:
        walk.put(node, found[0][1])


def _with_drift(walk: Walk, node: Node) -> tuple[Tensor | None, Tensor | None]:
    """The op's result, and how it changes with the drift of its operands: forward-mode differentiation."""
    drifts = [s.drift for _, s in walk.inputs(node) if s.drift is not None]
    if not drifts:
        return _rerun(walk, node), None
    with forward_ad.dual_level():
        try:
            values = _rerun(walk, node, dual=True)
        except (RuntimeError, NotImplementedError):  # an op without a forward derivative
            return _rerun(walk, node), None
        if values is None:
            return None, None
        primal, tangent = forward_ad.unpack_dual(values)
        if tangent is None:
            return primal, torch.zeros_like(primal[0])
        return primal.clone(), tangent[0].nan_to_num().clone()


def _rerun(
    walk: Walk, node: Node, leaves: dict[int, Tensor] | None = None, *, dual: bool = False
) -> Tensor | None:
    recipe = node.recipe
    if recipe is None or len(recipe.operands) != len(node.inputs):
        return _by_hand(walk, node, leaves)
    known: dict[object, Tensor] = {}
    operands: list[Source | float] = []
    for place, (operand, source) in enumerate(zip(recipe.operands, node.inputs, strict=True)):
        values = _operand(walk, node, place, source)
        if values is None and isinstance(operand, float):
            operands.append(operand)
            continue
        if values is None:
            return _by_hand(walk, node, leaves)
        signal = walk.signal(source)
        if leaves is not None and signal is not None:
            values = leaves[place] = values.detach().requires_grad_()
        if dual and signal is not None and signal.drift is not None:
            tangent = torch.zeros_like(values)
            tangent[0] = signal.drift
            values = forward_ad.make_dual(values.clone(), tangent)
        known[(-1, place)] = values
        operands.append(Edge(-1, place))
    # The first one gives constants their dtype: a mask must not.
    known = dict(sorted(known.items(), key=lambda item: item[1].dtype == torch.bool))
    try:
        return _finite(run_again(replace(recipe, operands=tuple(operands)), known))
    except (RuntimeError, TypeError, ValueError):
        return _by_hand(walk, node, leaves)


def _finite(values: Tensor) -> Tensor | None:
    return values.to(torch.float64) if values.shape[:1] == (3,) else None


def _operand(walk: Walk, node: Node, place: int, source: Source) -> Tensor | None:
    signal = walk.signal(source)
    if signal is not None:
        return signal.values
    added = walk.chooser.added(walk, node, source)
    if added is not None:
        return added.values
    drawn = walk.facts.operands.get((node.index, place))
    return _circle(walk, source) if drawn is None else expanded(drawn)


def _by_hand(walk: Walk, node: Node, leaves: dict[int, Tensor] | None = None) -> Tensor | None:
    """Sums and products whose second operand nobody knows: only what is known counts."""
    walk.unknown.setdefault(node.index, f"what {node.op} reads beside the signal is not known")
    found = {place: s for place, source in enumerate(node.inputs) if (s := walk.signal(source)) is not None}
    if not found:
        return None
    values = {place: signal.values for place, signal in found.items()}
    if leaves is not None:
        leaves.clear()
        leaves.update({place: x.detach().requires_grad_() for place, x in values.items()})
        values = dict(leaves)
    operands = list(values.values())
    if len(operands) > 1 and node.op in ("add", "mul"):
        return operands[0] + operands[1] if node.op == "add" else operands[0] * operands[1]
    return operands[0] * 1.0


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


@back(kinds.ELEMENTWISE | kinds.ops("max min"))
def apply_back(backward: Backward, node: Node, gradient: Tensor) -> list[tuple[Source, Tensor]]:
    """The op's own derivative on the draws; what was broadcast adds up."""
    walk, found = backward.walk, []
    leaves: dict[int, Tensor] = {}
    with torch.enable_grad():
        values = _rerun(walk, node, leaves)
        if values is None or not values.requires_grad:
            return []
        rows = torch.zeros_like(values)
        rows[0] = gradient
        grads = torch.autograd.grad(values, list(leaves.values()), rows, allow_unused=True)
    for place, grad in zip(leaves, grads, strict=True):
        if grad is not None:
            source = node.inputs[place]
            times = max(backward.size(Edge(node.index)) / backward.size(source), 1.0)
            found.append((source, grad[0].nan_to_num() * math.sqrt(times)))
    return found


@back(kinds.GATES)
def gate_back(backward: Backward, node: Node, gradient: Tensor) -> list[tuple[Source, Tensor]]:
    """One half gets the sigmoid of the other, the other its slope times the first."""
    walk, source = backward.walk, node.inputs[0]
    signal = walk.signal(source)
    if signal is None:
        return []
    x, other = signal.values[0], torch.sigmoid(walk.draws.shuffled(signal.values, node.index)[0])
    parts = [gradient * other, gradient * x * other * (1 - other)]
    mixed = walk.draws.mixed([part.expand(3, -1) for part in parts], [0.5, 0.5], node.index)
    return [(source, mixed[0])]
