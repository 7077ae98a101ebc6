"""Softmax and attention: values are averaged, by weights that the logits' spread decides."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from musigma.graph import Node, kinds
from musigma.init.planning._signal import HERE, Signal
from musigma.init.planning._walk import Walk, rule
from musigma.init.planning.families._views import averaged


@rule(kinds.SOFTMAXES)
def softmax(walk: Walk, node: Node) -> None:
    """Over k logits of a given law: E[Σp²] = E[e^{2s}]/(k·E[e^s]²)."""
    found = walk.inputs(node)
    if not found:
        return
    source, signal = found[0]
    count = _places(walk.shape(source), node.options.get("dim"))
    weights = (signal.values - signal.values.max()).exp()
    p = weights / weights[HERE].mean() / count
    if node.op == "log_softmax":
        walk.put(node, signal.like(p.clamp_min(1e-300).log()))
        return
    walk.put(node, Signal(p, signal.measured, _share(weights[HERE], count)))


def _share(weights: Tensor, count: int) -> float:
    concentration = float(weights.square().mean() / weights.mean().square())
    return min(max(concentration / count, 1 / count), 1.0)


def _places(shape: tuple[int, ...], dim: object) -> int:
    at = dim if isinstance(dim, int) and -len(shape) <= dim < len(shape) else -1
    return max(shape[at], 1) if shape else 1


@rule(kinds.ops("scaled_dot_product_attention flex_attention"))
def attention(walk: Walk, node: Node) -> None:
    """softmax(q·k·scale)·v with logits of variance d·scale²·E[q²]·E[k²]."""
    query, key, value = (walk.argument(node, name) for name in ("query", "key", "value"))
    if query is None or key is None or value is None:
        return
    shapes = [walk.shape(node.arguments[name][0]) for name in ("query", "key")]
    d, places = shapes[0][-1], shapes[1][-2]
    given = node.options.get("scale")
    scale = float(given) if isinstance(given, float | int) else 1 / math.sqrt(max(d, 1))
    share = attention_share(d * scale**2 * query.second * key.second, places, causal=_is_causal(node))
    walk.put(node, averaged(value, share, walk, node.index))


def attention_share(variance: float, places: int, *, causal: bool) -> float:
    """E[Σp²] of softmax weights over normal logits: e^variance over the number of places, 1 at most.

    A causal mask leaves the first query one place, the second two, …: the mean over queries counts.
    """
    # At a handful of places the largest weight alone can't be more than all of them.
    counts = torch.arange(1, places + 1, dtype=torch.float64, device="cpu") if causal else None
    concentration = math.exp(min(variance, 30.0))
    if counts is None:
        return concentration / (places - 1 + concentration)
    return float((concentration / (counts - 1 + concentration)).mean())


def _is_causal(node: Node) -> bool:
    return node.options.get("is_causal") is True or bool(node.arguments.get("attn_mask"))


@rule(frozenset(("multi_head_attention",)))
def packed(walk: Walk, node: Node) -> None:
    """torch's own attention in one op: projections to unit query, key and value, then the output's weight."""
    query = walk.argument(node, "query")
    key, value = walk.argument(node, "key") or query, walk.argument(node, "value") or query
    if query is None or key is None or value is None:
        return
    projected = [walk.chooser.projection(walk, node, name, signal)
                 for name, signal in (("query", query), ("key", key), ("value", value))]  # fmt: skip
    seconds = [
        variance * signal.second for variance, signal in zip(projected, (query, key, value), strict=True)
    ]
    places = _places(walk.shape(node.arguments["key"][0]), 0)
    share = attention_share(seconds[0] * seconds[1], places, causal=_is_causal(node))
    read = value.like(walk.draws.normal(projected[2] * value.covariance, node.index))
    mixed = averaged(read, share, walk, node.index + 1)
    out = walk.chooser.output_projection(walk, node, mixed)
    walk.put(node, out, None) if len(node.outputs) > 1 else walk.put(node, out)
