"""Normalizations: second moment 1, times the weight and bias the plan gives them (1 and 0)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from musigma.graph import Node, Source, kinds
from musigma.init.planning._backward import Backward, back
from musigma.init.planning._signal import EXAMPLE, HERE, PLACE, Signal
from musigma.init.planning._walk import Walk, eps_of, normalized, rule

# Below this correlation between examples the batch has no mean to speak of, and the shape stays as it was.
_SHARED = 0.05


@rule(kinds.NORMS | {"normalize"})
def normalize(walk: Walk, node: Node) -> None:
    """Moments 0 and 1; a batch norm also takes away what all examples share."""
    found = walk.inputs(node)
    if not found:
        return
    signal = _summed(found)
    scale = walk.chooser.norm_scale(node)
    if node.op in kinds.BATCH_NORMS:
        walk.put(node, _over_batch(walk, node, signal, scale))
        return
    if node.op == "local_response_norm":
        walk.put(node, signal)
        return
    eps = eps_of([node])
    done = normalized(signal, centered=node.op in kinds.CENTERING_NORMS, eps=eps)
    if node.op == "normalize":  # to length 1
        scale /= math.sqrt(max(int(node.shapes[0][-1]), 1))
    outputs = [done.like(done.values * scale)]
    if len(node.outputs) > 1 and node.op in kinds.ADDITIONS:
        outputs.append(signal)
    walk.put(node, *outputs)


def _summed(found: Sequence[tuple[object, Signal]]) -> Signal:
    if len(found) == 1:
        return found[0][1]
    return found[0][1].like(found[0][1].values + found[1][1].values)


def _over_batch(walk: Walk, node: Node, signal: Signal, scale: float) -> Signal:
    """Per unit over examples and places: their common part is the mean that is subtracted."""
    if node.options.get("training") is False and node.buffers:
        return signal.like(signal.values * scale)  # running statistics of a fresh model: 0 and 1
    c = signal.covariance.clone()
    c = c - c[HERE, EXAMPLE]
    size = float(c[HERE, HERE])
    if size <= 1e-12 * signal.second or len(node.shapes[0]) < 2:
        return signal.like(torch.zeros_like(signal.values))
    if float(signal.covariance[HERE, EXAMPLE]) < _SHARED * signal.second:
        done = normalized(signal, centered=True, eps=eps_of([node]))
        return done.like(done.values * scale)
    # In a batch of b the mean of b numbers is taken: two of the rest have correlation −1/(b − 1).
    c = c / (size + eps_of([node]))
    c[PLACE, PLACE] = c[EXAMPLE, EXAMPLE] = 1.0
    other = -1 / (max(int(node.shapes[0][0]), 2) - 1)
    c[HERE, EXAMPLE] = c[EXAMPLE, HERE] = c[PLACE, EXAMPLE] = c[EXAMPLE, PLACE] = other
    return replace(signal, values=walk.draws.normal(c, node.index) * scale, drift=None)


@back(kinds.NORMS | {"normalize"})
def normalize_back(backward: Backward, node: Node, gradient: Tensor) -> list[tuple[Source, Tensor]]:
    """Divided by the spread, without what a change of the size or the mean would do."""
    walk = backward.walk
    found = walk.inputs(node)
    if not found:
        return []
    scale = walk.chooser.norm_scale(node)
    if node.op == "normalize":
        scale /= math.sqrt(max(int(node.shapes[0][-1]), 1))
    signal = _summed(found)
    if node.op in kinds.BATCH_NORMS and node.options.get("training") is False and node.buffers:
        return [(source, gradient * scale) for source, _ in found]
    size = signal.second - signal.mean**2 if node.op in kinds.CENTERING_NORMS else signal.second
    if node.op in kinds.BATCH_NORMS:
        size = max(size - max(float(signal.covariance[HERE, EXAMPLE]) - signal.mean**2, 0.0), 1e-12 * size)
    return [(source, gradient * scale / math.sqrt(max(size + eps_of([node]), 1e-30))) for source, _ in found]
