"""Ops that hand numbers on: views, casts, padding, upsampling, dropout."""

from __future__ import annotations

import math
import zlib

import torch

from musigma.graph import Node, kinds
from musigma.init.planning._signal import Signal
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


def averaged(signal: Signal, share: float, walk: Walk, key: int) -> Signal:
    """A weighted mean over places, with Σp² = share: E = share·E[x²] + (1 − share)·E[x x'].

    Places are exchangeable in a signal, so that neighbours count as correlated as any two.
    """
    c = signal.covariance
    same, other = float(c[0, 0]), float(c[0, 1])
    second = share * same + (1 - share) * other
    # Of the part that places share nothing is lost; the rest is normal, being a sum.
    common = c.clone()
    common[0, 0] = common[1, 1] = common[2, 2] = second
    mean = signal.mean
    values = walk.draws.normal(common - mean**2, key) + mean
    return signal.like(values)


def _interpolation_share(shape: tuple[int, ...]) -> float:
    """E[Σp²] of linear interpolation between two neighbours, (2/3) a dimension."""
    return (2 / 3) ** max(len(shape) - 2, 1)
