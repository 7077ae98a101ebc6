"""Pooling: averages keep what neighbours share; a maximum is measured on the example."""

from __future__ import annotations

import math

from musigma.graph import Node, kinds
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
