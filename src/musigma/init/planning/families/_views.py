"""Ops that hand numbers on: views, casts, padding, upsampling, dropout."""

from __future__ import annotations

import math
import zlib

import torch
from torch import Tensor

from musigma.graph import Edge, Node, Source, kinds
from musigma.init.planning._backward import Backward, back
from musigma.init.planning._signal import EXAMPLE, HERE, PLACE, Signal
from musigma.init.planning._walk import Walk, rule


@rule(kinds.VIEWS - kinds.SELECTIONS)
def keep(walk: Walk, node: Node) -> None:
    """The same numbers in another order."""
    found = walk.inputs(node)
    if found:
        walk.put(node, found[0][1])


@rule(kinds.SELECTIONS)
def select(walk: Walk, node: Node) -> None:
    """A part: other units than another part of the same tensor, and the same ones if read again."""
    found = walk.inputs(node)
    if not found:
        return
    source, signal = found[0]
    whole = walk.shape(source)
    parts = []
    for output, shape in enumerate(node.shapes):
        # The last dimension runs over units in sequences, the second one in images: a part that is
        # complete in both is another place of the same units, not other units.
        units = (slice(1, 2), slice(-1, None)) if len(whole) > 2 else (slice(-1, None),)
        same = bool(whole) and all(whole[d] == tuple(shape)[d] for d in units)
        if same:
            parts.append(signal)
            continue
        key = zlib.crc32(f"{source!r}{sorted(node.options.items(), key=str)}{output}".encode())
        parts.append(signal.like(walk.draws.shuffled(signal.values, key)))
    walk.put(node, *parts)


@rule(kinds.PADDINGS)
def pad(walk: Walk, node: Node) -> None:
    """Zeros beside the signal thin its second moment; reflected and circular borders don't."""
    found = walk.inputs(node)
    if not found:
        return
    source, signal = found[0]
    mode, value = node.options.get("mode", "constant"), node.options.get("value") or 0.0
    share = math.prod(walk.shape(source)) / max(math.prod(map(int, node.shapes[0])), 1)
    if mode != "constant" or share >= 1:
        walk.put(node, signal)
        return
    border = torch.full_like(signal.values, float(value))  # type: ignore[arg-type]
    mixed = walk.draws.mixed([signal.values, border], [share, 1 - share], node.index)
    walk.put(node, signal.like(mixed))


@rule(kinds.DROPOUTS)
def drop(walk: Walk, node: Node) -> None:
    """While training, a share 1 − p of the units is kept, 1/(1 − p) times as large."""
    found = walk.inputs(node)
    if not found:
        return
    signal, p = found[0][1], node.options.get("p", 0.5)
    if not node.options.get("training", True) or not isinstance(p, float | int) or not 0 < p < 1:
        walk.put(node, signal)
        return
    if node.op in ("alpha_dropout", "feature_alpha_dropout"):
        walk.put(node, signal)  # made to keep both moments
        return
    kept = torch.ones_like(signal.values)
    # Each example and place drops units of its own.
    rows = [walk.draws.mixed([kept, 0 * kept], [1 - p, p], 3 * node.index + row)[0] for row in range(3)]
    walk.put(node, signal.like(signal.values * torch.stack(rows) / (1 - p)))


@rule(kinds.UPSAMPLINGS)
def upsample(walk: Walk, node: Node) -> None:
    """Nearest neighbours repeat numbers; interpolation averages them, as far as they are correlated."""
    found = walk.inputs(node)
    if not found:
        return
    source, signal = found[0]
    mode = node.options.get("mode", "nearest")
    if node.op == "interpolate" and str(mode).startswith("nearest"):
        walk.put(node, signal)
        return
    walk.put(node, averaged(signal, _interpolation_share(walk.shape(source)), walk, node.index))


def averaged(
    signal: Signal, share: float, walk: Walk, key: int, *, cross: float = 0.0, other: float | None = None
) -> Signal:
    """A weighted mean over places: E[y²] = Σp²·E[x²] + (1 − Σp²)·E[x x'].

    Places are exchangeable in a signal, so that neighbours count as correlated as any two.

    Args:
        signal: what is averaged.
        share: E[Σp²].
        walk: where draws come from.
        key: of the draws.
        cross: E[Σ p p'] of the weights of two places.
        other: the same of two examples; default: `share`, for weights that are fixed.
    """
    c = signal.covariance
    other = share if other is None else other
    far = c[PLACE, EXAMPLE]
    made = torch.empty_like(c)
    made.fill_diagonal_(float(share * c[HERE, HERE] + (1 - share) * c[HERE, PLACE]))
    made[HERE, PLACE] = made[PLACE, HERE] = cross * c[HERE, HERE] + (1 - cross) * c[HERE, PLACE]
    made[HERE, EXAMPLE] = made[EXAMPLE, HERE] = other * c[HERE, EXAMPLE] + (1 - other) * far
    made[PLACE, EXAMPLE] = made[EXAMPLE, PLACE] = far
    mean = signal.mean
    return signal.like(walk.draws.normal(made - mean**2, key) + mean)


def _interpolation_share(shape: tuple[int, ...]) -> float:
    """E[Σp²] of linear interpolation between two neighbours, (2/3) a dimension."""
    return (2 / 3) ** max(len(shape) - 2, 1)


@back(kinds.VIEWS - kinds.SELECTIONS | kinds.PADDINGS)
def keep_back(backward: Backward, node: Node, gradient: Tensor) -> list[tuple[Source, Tensor]]:
    """The same numbers; what was repeated adds up."""
    source = node.inputs[0]
    times = max(backward.size(Edge(node.index)) / backward.size(source), 1.0)
    if node.op in kinds.PADDINGS:
        times = 1.0
    return [(source, gradient * math.sqrt(times))]


@back(kinds.SELECTIONS)
def select_back(backward: Backward, node: Node, gradient: Tensor) -> list[tuple[Source, Tensor]]:
    """A part's gradient for a part of the units, and none for the others."""
    source = node.inputs[0]
    share = min(backward.size(Edge(node.index)) / backward.size(source), 1.0)
    if share == 1.0:
        return [(source, gradient)]
    rows = gradient.expand(3, -1)
    mixed = backward.walk.draws.mixed([rows, 0 * rows], [share, 1 - share], node.index)
    return [(source, mixed[0])]


@back(kinds.DROPOUTS)
def drop_back(backward: Backward, node: Node, gradient: Tensor) -> list[tuple[Source, Tensor]]:
    """1/(1 − p) times as large a second moment, as forward."""
    p = node.options.get("p", 0.5)
    active = bool(node.options.get("training", True)) and isinstance(p, float | int) and 0 < p < 1
    return [(node.inputs[0], gradient / math.sqrt(1 - float(p)) if active else gradient)]  # type: ignore[arg-type]


@back(kinds.UPSAMPLINGS)
def upsample_back(backward: Backward, node: Node, gradient: Tensor) -> list[tuple[Source, Tensor]]:
    """What was repeated adds up."""
    source = node.inputs[0]
    times = backward.size(Edge(node.index)) / backward.size(source)
    if not str(node.options.get("mode", "nearest")).startswith("nearest"):
        times *= _interpolation_share(backward.walk.shape(source))
    return [(source, gradient * math.sqrt(times))]
