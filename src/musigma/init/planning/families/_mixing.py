"""Concatenations, and products of two signals."""

from __future__ import annotations

import math

from torch import Tensor

from musigma.graph import Edge, Node, Source, kinds
from musigma.init.planning._backward import Backward, back
from musigma.init.planning._signal import Signal
from musigma.init.planning._walk import Walk, expanded, rule
from musigma.init.planning.families._views import averaged


@rule(kinds.CONCATENATIONS)
def concatenate(walk: Walk, node: Node) -> None:
    """Some units from each part; what is no signal (an empty cache, zeros) counts by its size."""
    parts, shares, first = [], [], None
    for place, source in enumerate(node.inputs):
        signal, size = walk.signal(source), math.prod(walk.shape(source))
        if signal is None:
            given = walk.facts.operands.get((node.index, place))
            learned = walk.chooser.added(walk, node, source)
            if learned is not None:
                values = learned.values
            elif given is not None and given.is_floating_point():
                values = expanded(given)
            else:
                continue
        else:
            values, first = signal.values, first or signal
        if size:
            parts.append(values)
            shares.append(float(size))
    if first is not None:
        walk.put(node, first if len(parts) == 1 else first.like(walk.draws.mixed(parts, shares, node.index)))


def product_of_signals(walk: Walk, node: Node, a: Signal, b: Signal, terms: float) -> Signal:
    """A sum of products of independent zero-mean units: covariances multiply."""
    if a.share or b.share:
        weights, signal = (a, b) if a.share else (b, a)
        return averaged(signal, weights.share, walk, node.index, cross=weights.cross, other=weights.cross)
    covariance = terms * a.covariance * b.covariance
    mean = terms * a.mean * b.mean
    values = walk.draws.normal((covariance - mean**2 / terms), node.index) + mean
    return a.like(values)


def contraction(walk: Walk, node: Node) -> float:
    """How many products an entry of a product of two signals adds up."""
    shapes = [walk.shape(source) for source, _ in walk.inputs(node)]
    if node.op in ("matmul", "mm", "bmm", "mv", "dot", "inner", "addmm", "baddbmm"):
        return float(shapes[0][-1])
    sizes = math.prod(shapes[0]) * math.prod(shapes[1])
    outer = math.prod(map(int, node.shapes[0]))
    batch = math.prod(int(a) for a, b in zip(shapes[0], shapes[1], strict=False) if a == b and a > 1)
    return math.sqrt(max(sizes / max(outer, 1) / max(batch, 1), 1.0)) if outer else 1.0


def is_product(walk: Walk, node: Node) -> bool:
    """Whether a node multiplies two signals."""
    return node.op in kinds.PRODUCTS and len(walk.inputs(node)) > 1


@back(kinds.CONCATENATIONS)
def concatenate_back(backward: Backward, node: Node, gradient: Tensor) -> list[tuple[Source, Tensor]]:
    """Each part gets its own."""
    return [(source, gradient) for source in node.inputs]


def product_back(backward: Backward, node: Node, gradient: Tensor) -> list[tuple[Source, Tensor]]:
    """What one factor gets is a sum over the other's units."""
    walk = backward.walk
    (left, a), (right, b) = walk.inputs(node)[:2]
    second = float(gradient.square().mean()) * backward.size(Edge(node.index)) * contraction(walk, node)
    return [
        (left, backward.fresh(second * b.second / backward.size(left), 2 * node.index)),
        (right, backward.fresh(second * a.second / backward.size(right), 2 * node.index + 1)),
    ]
