"""Layers that mix features with a weight, and products of two signals."""

from __future__ import annotations

from torch import Tensor

from musigma.graph import Node, Source, kinds
from musigma.init.planning._backward import Backward, back
from musigma.init.planning._walk import Walk, rule
from musigma.init.planning.families._mixing import contraction, is_product, product_back, product_of_signals


@rule(kinds.PRODUCTS | kinds.CONVOLUTIONS | kinds.TRANSPOSED_CONVOLUTIONS | kinds.EMBEDDINGS)
def layer(walk: Walk, node: Node) -> None:
    """fan_in·Var(W)·E[xx'], plus the bias: normal, being a sum of many."""
    if walk.graph.weights(node):
        walk.chooser.layer(walk, node)
    elif is_product(walk, node):
        (_, a), (_, b) = walk.inputs(node)[:2]
        walk.put(node, product_of_signals(walk, node, a, b, contraction(walk, node)))
    elif walk.inputs(node):
        # A product with a constant matrix: its size is not known, its direction doesn't matter.
        walk.unknown[node.index] = "it multiplies by a matrix that is no parameter"
        signal = walk.inputs(node)[0][1]
        walk.put(node, signal.like(walk.draws.normal(signal.covariance, node.index)))


@back(kinds.PRODUCTS | kinds.CONVOLUTIONS | kinds.TRANSPOSED_CONVOLUTIONS | kinds.EMBEDDINGS)
def layer_back(backward: Backward, node: Node, gradient: Tensor) -> list[tuple[Source, Tensor]]:
    """fan_out·Var(W) times the second moment, and nothing of the shape."""
    walk = backward.walk
    if node.op in kinds.EMBEDDINGS:
        return []
    if is_product(walk, node) and not walk.graph.weights(node):
        return product_back(backward, node, gradient)
    source = next((s for s in node.inputs if walk.signal(s) is not None), None)
    factor = walk.chooser.sent_back.get(node.index, 1.0)
    second = factor * float(gradient.square().mean())
    return [] if source is None else [(source, backward.fresh(second, node.index))]
