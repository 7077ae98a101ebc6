"""Means and sums over places."""

from __future__ import annotations

import math

from torch import Tensor

from musigma.graph import Edge, Node, Source, kinds
from musigma.init.planning._backward import Backward, back
from musigma.init.planning._signal import Signal
from musigma.init.planning._walk import Walk, rule
from musigma.init.planning.families._views import averaged


@rule(kinds.ops("mean nanmean sum nansum"))
def reduce(walk: Walk, node: Node) -> None:
    """Over k places a mean keeps E[x x'] and a k-th of the rest; a sum is k times the mean."""
    found = walk.inputs(node)
    if not found or not node.outputs:
        return
    source, signal = found[0]
    count = math.prod(walk.shape(source)) / max(math.prod(map(int, node.shapes[0])), 1)
    done = averaged(signal, 1 / max(count, 1), walk, node.index)
    factor = count if node.op in ("sum", "nansum") else 1.0
    walk.put(node, _one_place(done.like(done.values * factor)))


def _one_place(signal: Signal) -> Signal:
    """What is the same at every place of an example."""
    values = signal.values.clone()
    values[1] = values[0]
    return signal.like(values)


@back(kinds.ops("mean nanmean sum nansum"))
def reduce_back(backward: Backward, node: Node, gradient: Tensor) -> list[tuple[Source, Tensor]]:
    """Every place gets the same: all of it from a sum, a k-th from a mean."""
    source = node.inputs[0]
    count = max(backward.size(source) / backward.size(Edge(node.index)), 1.0)
    return [(source, gradient if node.op in ("sum", "nansum") else gradient / count)]
