"""Pooling: averages keep what neighbours share; a maximum is measured on the example."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from musigma.graph import Edge, Node, Source, kinds
from musigma.init.planning._backward import Backward, back
from musigma.init.planning._walk import Walk, rule
from musigma.init.planning.families._views import averaged

_MAX = frozenset(name for name in kinds.POOLINGS if "max" in name)
_LP = frozenset(name for name in kinds.POOLINGS if name.startswith("lp"))


@rule(kinds.POOLINGS - _MAX - _LP)
def average(walk: Walk, node: Node) -> None:
    """A mean over k places: E = E[x²]/k + (1 − 1/k)·E[x x']."""
    found = walk.inputs(node)
    if found:
        source, signal = found[0]
        walk.put(node, averaged(signal, 1 / window(walk.shape(source), node), walk, node.index))


@rule(_MAX)
def maximum(walk: Walk, node: Node) -> None:
    """The largest of k numbers: without a measurement as if neighbours were independent."""
    found = walk.inputs(node)
    if not found:
        return
    source, signal = found[0]
    count = max(round(window(walk.shape(source), node)), 1)
    values = signal.values
    for step in range(1, min(count, 64)):
        values = values.maximum(walk.draws.shuffled(signal.values, node.index * 64 + step))
    walk.unknown[node.index] = "how far neighbours are correlated decides what a maximum makes of them"
    walk.put(node, signal.like(values))


def window(shape: tuple[int, ...], node: Node) -> float:
    """How many places a pooling takes together."""
    sizes = node.options.get("kernel_size")
    dims = int(node.op[-2])
    if isinstance(sizes, int):
        return float(sizes**dims)
    if isinstance(sizes, list | tuple):
        return float(math.prod(map(int, sizes)))
    return math.prod(shape) / max(math.prod(map(int, node.shapes[0])), 1)


@back(kinds.POOLINGS - _MAX - _LP)
def average_back(backward: Backward, node: Node, gradient: Tensor) -> list[tuple[Source, Tensor]]:
    """A k-th for each of k places, as often as windows overlap."""
    source = node.inputs[0]
    count = window(backward.walk.shape(source), node)
    overlap = count * backward.size(Edge(node.index)) / backward.size(source)
    return [(source, gradient * math.sqrt(max(overlap, 1.0)) / count)]


@back(_MAX)
def maximum_back(backward: Backward, node: Node, gradient: Tensor) -> list[tuple[Source, Tensor]]:
    """All of it to the place that was largest: those of the draws that are."""
    source = node.inputs[0]
    signal, pooled = backward.walk.signal(source), backward.walk.signal(Edge(node.index))
    if signal is None or pooled is None:
        return []
    share = backward.size(Edge(node.index)) / backward.size(source)
    # The largest values pass: a share of them, whatever their neighbours' correlation.
    least = signal.values[0].quantile(max(1 - share, 0.0))
    return [(source, torch.where(signal.values[0] >= least, gradient, 0.0))]
