"""Softmax and attention: values are averaged, by weights that the logits' spread decides."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from musigma.graph import Edge, Node, Source, kinds
from musigma.init.planning._backward import Backward, back
from musigma.init.planning._signal import HERE, PLACE, Signal
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
    walk.put(node, Signal(p, signal.measured, _share(weights[HERE], count), cross=1 / count))


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
    weights = _fused(walk, node, query, key)
    shape = walk.shape(node.arguments["query"][0])
    rows = math.prod(shape[:-2]) * (shape[-2] if weights.rows == 1 else 1)
    walk.put(node, attended(walk, value, weights, rows, node.index))


def attended(walk: Walk, value: Signal, weights: Weights, rows: int, key: int) -> Signal:
    """A mean over values, and how far the few queries that make up its second moment let it stray."""
    out = averaged(value, weights.share, walk, key, cross=weights.cross, other=weights.cross)
    # Of one query and head Σp² is as large as its mean, more or less: a relative variance of 1.
    own = (weights.share * value.second / max(out.second, 1e-300)) ** 2 * weights.rows / max(rows, 1)
    return replace(out, drift=out.values[HERE] * (math.sqrt(out.log_drift**2 + own) / 2))


@dataclass(frozen=True)
class Weights:
    """What attention weights over normal logits do to a mean.

    Attributes:
        share: E[Σp²], averaged over queries.
        cross: E[Σ p p'] of two queries.
        rows: Σ share²/(Σ share)² over the queries: 1 over the number of those that make up the mean.
        slope: E[Σ p²·(1 − 2p + Σp²)]: of independent values' gradients what comes to the logits.
    """

    share: float
    cross: float
    slope: float
    rows: float


def attention_weights(variance: float, counts: tuple[int, ...]) -> Weights:
    """Softmax weights over independent normal logits.

    Args:
        variance: of the logits.
        counts: how many keys each query may look at; the first ones, if there are fewer than for others.
    """
    each = [concentration(round(min(variance, 30.0), 2), count) for count in counts]
    # Two queries look at the same keys by chance: 1 in as many as the one with more of them has.
    ordered = sorted(counts)
    pairs = sum(2 * place + 1 for place in range(len(ordered)))
    cross = sum((2 * place + 1) / max(count, 1) for place, count in enumerate(ordered)) / max(pairs, 1)
    share, slope = (sum(values) / max(len(each), 1) for values in zip(*each, strict=True))
    squares = sum(s * s for s, _ in each) / max(sum(s for s, _ in each) ** 2, 1e-300)
    return Weights(share, cross, slope, squares)


@lru_cache(maxsize=4096)
def concentration(variance: float, count: int) -> tuple[float, float]:
    """E[Σp²] and E[Σp²(1 − 2p + Σp²)] of a softmax over normal logits; the first nears e^variance/count."""
    if count > _MANY:
        share = math.exp(variance) / (count - 1 + math.exp(variance))
        return share, share * (1 - share)
    generator = torch.Generator("cpu").manual_seed(count)
    logits = torch.randn(_ROWS, max(count, 1), generator=generator, dtype=torch.float64, device="cpu")
    p = (math.sqrt(variance) * logits).softmax(-1)
    squares = p.square().sum(-1)
    slope = (p.square() * (1 - 2 * p + squares[:, None])).sum(-1)
    return float(squares.mean()), float(slope.mean())


# From so many keys on, the law of large numbers is as good as the draws: both are off by a percent.
_MANY, _ROWS = 256, 1024


def _counts(walk: Walk, node: Node, places: int, queries: int) -> tuple[int, ...]:
    """How many keys each query may look at."""
    seen = walk.facts.masks.get(node.index)
    if seen:
        return seen
    if node.options.get("is_causal") is True:
        step = max(queries // _QUERIES, 1)
        return tuple(min(query + 1, places) for query in range(0, queries, step))
    return (places,)


# More queries than these tell nothing new.
_QUERIES = 64


def _logit_scale(node: Node, d: int) -> float:
    given = node.options.get("scale")
    return float(given) if isinstance(given, float | int) else 1 / math.sqrt(max(d, 1))


def _fused(walk: Walk, node: Node, query: Signal, key: Signal) -> Weights:
    shapes = [walk.shape(node.arguments[name][0]) for name in ("query", "key")]
    d, places, queries = shapes[0][-1], shapes[1][-2], shapes[0][-2]
    variance = d * _logit_scale(node, d) ** 2 * query.second * key.second
    return attention_weights(variance, _counts(walk, node, places, queries))


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
    queries = _places(walk.shape(node.arguments["query"][0]), 0)
    weights = attention_weights(seconds[0] * seconds[1], _counts(walk, node, places, queries))
    read = value.like(walk.draws.normal(projected[2] * value.covariance, node.index))
    heads = int(node.options.get("num_heads", 1) or 1)  # type: ignore[call-overload]
    rows = heads * walk.shape(node.arguments["query"][0])[-2] * (queries if weights.rows == 1 else 1)
    mixed = attended(walk, read, weights, rows, node.index + 1)
    out = walk.chooser.output_projection(walk, node, mixed)
    walk.chooser.sent_back[node.index] *= weights.share * projected[2]
    walk.put(node, out, None) if len(node.outputs) > 1 else walk.put(node, out)


@back(kinds.SOFTMAXES)
def softmax_back(backward: Backward, node: Node, gradient: Tensor) -> list[tuple[Source, Tensor]]:
    """p·(g − Σ p g): nearly p·g over many places."""
    signal = backward.walk.signal(Edge(node.index))
    if signal is None:
        return []
    weights = signal.values[0].exp() if node.op == "log_softmax" else signal.values[0]
    return [(node.inputs[0], gradient if node.op == "log_softmax" else weights * gradient)]


@back(kinds.ops("scaled_dot_product_attention flex_attention"))
def attention_back(backward: Backward, node: Node, gradient: Tensor) -> list[tuple[Source, Tensor]]:
    """To the values through the weights, to queries and keys through the logits."""
    walk = backward.walk
    sources = [node.arguments[name][0] for name in ("query", "key", "value")]
    signals = [walk.signal(source) for source in sources]
    if any(signal is None for signal in signals):
        return []
    query, key, value = (signal for signal in signals if signal is not None)
    d = walk.shape(sources[0])[-1]
    scale, weights = _logit_scale(node, d), _fused(walk, node, query, key)
    size = float(gradient.square().mean())
    per_key = backward.size(Edge(node.index)) / backward.size(sources[2])
    # One query's logits together: what differs between the values decides.
    logits = weights.slope * d * size * max(value.second - float(value.covariance[HERE, PLACE]), 0.0)
    per_query = backward.size(sources[0]) / backward.size(sources[1])
    return [
        (sources[2], backward.fresh(weights.share * per_key * size, 3 * node.index)),
        (sources[0], backward.fresh(logits * scale**2 * key.second, 3 * node.index + 1)),
        (sources[1], backward.fresh(logits * scale**2 * query.second * per_query, 3 * node.index + 2)),
    ]


@back(frozenset(("multi_head_attention",)))
def packed_back(backward: Backward, node: Node, gradient: Tensor) -> list[tuple[Source, Tensor]]:
    """Through the output's weight, the average and the value's weight; queries and keys bring less."""
    walk = backward.walk
    source = node.arguments["value"][0] if node.arguments.get("value") else node.inputs[0]
    second = float(gradient.square().mean()) * walk.chooser.sent_back.get(node.index, 1.0)
    return [(source, backward.fresh(second, node.index))]
