"""Recurrent networks: the cell is run on draws of its gates."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from musigma.graph import Node, kinds
from musigma.init.planning._signal import HERE, PLACE, Signal
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
    """Every layer reads what the one below gives, averaged over the steps of the example."""
    signal = walk.argument(node, "input")
    if signal is None:
        return
    shape = walk.shape(node.arguments["input"][0])
    along = 1 if node.options.get("batch_first") and len(shape) > 2 else 0
    steps = 1 if node.op.endswith("_cell") else shape[along]
    out = signal
    for level, chosen in enumerate(walk.chooser.recurrence(node)):
        out = run(walk, chosen(out), out, min(steps, _STEPS), node.index * 97 + level)
    walk.put(node, out)


def run(walk: Walk, cell: Recurrence, signal: Signal, steps: int, key: int) -> Signal:
    """What a cell's state holds, averaged over the steps."""
    gates = _GATES.get(cell.kind, 1)
    h = torch.zeros_like(signal.values)
    c = torch.zeros_like(h)
    states = []
    size = h.shape[1]
    common, fresh = _over_steps(cell.from_input * signal.covariance)
    shared = [walk.draws.normal(common, key * 31 + g) for g in range(gates)]
    for step in range(max(steps, 1)):
        keys = [(key * 37 + g) * 103 + step for g in range(gates)]
        read = [lasting + walk.draws.normal(fresh, k) for lasting, k in zip(shared, keys, strict=True)]
        covariance = cell.from_state * (h @ h.T / size)
        back = [walk.draws.normal(covariance, (key * 31 + g) * 101 + step + 1) for g in range(gates)]
        h, c = _step(cell, read, back, h, c)
        states.append(h)
    # A draw of the whole sequence is a draw of one of its steps.
    shares = [1.0] * len(states)
    return signal.like(walk.draws.mixed(states, shares, key))


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
