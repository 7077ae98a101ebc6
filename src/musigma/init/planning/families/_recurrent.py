"""Recurrent networks: the cell is run on draws of its gates."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from musigma.graph import Node, kinds
from musigma.init.planning._signal import HERE, PLACE, Signal, second_moments
from musigma.init.planning._walk import Walk, rule

# A state has settled after some multiples of its memory: with a forget bias of 1, 1/(1 − σ(1)) = 4 steps.
_STEPS = 24
_GATES = {"lstm": 4, "gru": 3}


@dataclass(frozen=True)
class Recurrence:
    """What one layer of a recurrent op is made of.

    Attributes:
        kind: "lstm", "gru", "rnn_tanh" or "rnn_relu".
        from_input: fan_in·Var(W_ih), one gate.
        from_state: fan_in·Var(W_hh).
        bias: what is added to each gate, one number a gate.
    """

    kind: str
    from_input: float
    from_state: float
    bias: tuple[float, ...]


@rule(kinds.RECURRENT)
def recurrent(walk: Walk, node: Node) -> None:
    """Every layer reads the states of the one below, step by step."""
    signal = walk.argument(node, "input")
    if signal is None:
        return
    shape = walk.shape(node.arguments["input"][0])
    along = 1 if node.options.get("batch_first") and len(shape) > 2 else 0
    steps = 1 if node.op.endswith("_cell") else min(shape[along], _STEPS)
    out, read = signal, _at_random(walk, signal, max(steps, 1), node.index)
    for level, chosen in enumerate(walk.chooser.recurrence(node)):
        key = node.index * 97 + level
        read = run(walk, chosen(out), read, key)
        # A draw of the whole sequence is a draw of one of its steps.
        out = out.like(walk.draws.mixed(read, [1.0] * len(read), key))
    walk.put(node, out)
    walk.chooser.expect_states(walk, node, signal, out)


def _at_random(walk: Walk, signal: Signal, steps: int, key: int) -> list[Tensor]:
    """A sequence of which only the correlation of any two steps is known."""
    common, fresh = _over_steps(signal.covariance)
    lasting = walk.draws.normal(common, 41 * key)
    return [lasting + walk.draws.normal(fresh, 41 * key + 1 + step) for step in range(steps)]


def run(walk: Walk, cell: Recurrence, read: list[Tensor], key: int) -> list[Tensor]:
    """The states of a layer that reads a sequence."""
    gates = _GATES.get(cell.kind, 1)
    h = torch.zeros_like(read[0])
    c = torch.zeros_like(h)
    states: list[Tensor] = []
    from_input = _Product(walk, cell.from_input, gates, 2 * key)
    from_state = _Product(walk, cell.from_state, gates, 2 * key + 1)
    for x in read:
        h, c = _step(cell, from_input.of(x), from_state.of(h), h, c)
        states.append(h)
    return states


class _Product:
    """What the same weights make of a sequence: it moves only as far as the sequence does.

    Args:
        walk: where draws come from.
        factor: fan_in·Var(W).
        gates: how many independent products there are.
        key: of the draws.
    """

    def __init__(self, walk: Walk, factor: float, gates: int, key: int) -> None:
        self._walk, self._factor, self._gates, self._key = walk, factor, gates, key
        self._steps = 0
        self._before: Tensor | None = None
        self._covariance: Tensor | None = None
        self._products: list[Tensor] = []

    def of(self, x: Tensor) -> list[Tensor]:
        """The products with the next element, one a gate: normal, given those with the last one."""
        covariance = self._factor * second_moments(x)
        kept, fresh = 0.0, covariance
        if self._before is not None and self._covariance is not None:
            kept = _kept(x, self._before)
            fresh = covariance - kept**2 * self._covariance
        keys = [(self._key * 37 + gate) * 103 + self._steps for gate in range(self._gates)]
        new = [self._walk.draws.normal(fresh, key) for key in keys]
        old = self._products or [torch.zeros_like(x)] * self._gates
        self._products = [kept * o + n for o, n in zip(old, new, strict=True)]
        self._before, self._covariance = x, covariance
        self._steps += 1
        return self._products


def _kept(state: Tensor, before: Tensor) -> float:
    """How much of the last state is in this one: the factor of the best prediction."""
    size = float(before[HERE].square().mean())
    return float((state[HERE] * before[HERE]).mean()) / size if size > 0 else 0.0


def _over_steps(covariance: Tensor) -> tuple[Tensor, Tensor]:
    """What the input brings at every step alike, and what is new at each."""
    same = covariance[HERE, PLACE].clamp_min(0.0)
    common = torch.diag(same.expand(3)).clone()
    common[HERE, PLACE] = common[PLACE, HERE] = same
    fresh = covariance - common
    fresh[HERE, PLACE] = fresh[PLACE, HERE] = 0.0
    return common, fresh


def _step(
    cell: Recurrence, read: list[Tensor], back: list[Tensor], h: Tensor, c: Tensor
) -> tuple[Tensor, Tensor]:
    both = [r + b + bias for r, b, bias in zip(read, back, cell.bias, strict=True)]
    if cell.kind == "lstm":
        i, f, g, o = both
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c
    if cell.kind == "gru":
        reset, z = torch.sigmoid(both[0]), torch.sigmoid(both[1])
        n = torch.tanh(read[2] + reset * back[2])
        return (1 - z) * n + z * h, c
    return (torch.relu if cell.kind.endswith("relu") else torch.tanh)(both[0]), c
