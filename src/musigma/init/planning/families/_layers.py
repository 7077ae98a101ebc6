"""Layers that mix features with a weight, and products of two signals."""

from __future__ import annotations

from musigma.graph import Node, kinds
from musigma.init.planning._walk import Walk, rule
from musigma.init.planning.families._mixing import contraction, is_product, product_of_signals


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
