"""Every call of a layer with a weight: what came in, what went out, what independent weights would give."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from musigma.doctor.probes._nodes import NodeProbe
from musigma.doctor.probes._summary import mean_square, overall
from musigma.graph import Node, Parameter
from musigma.statistics import Moments

__all__ = ["LayerMeasure", "looks_fresh", "measure_layer"]

_CONV = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_TRANSPOSED = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
_SIGNATURES: Mapping[str, tuple[str, ...]] = {
    "linear": ("input", "weight", "bias"),
    **{f"conv{d}d": _CONV for d in (1, 2, 3)},
    **{f"conv_transpose{d}d": _TRANSPOSED for d in (1, 2, 3)},
}


@dataclass(frozen=True)
class LayerMeasure:
    """One call of a linear or convolutional layer.

    Args:
        node: the graph node.
        weight: the weight's name; None where it is no parameter itself (a parametrization made it).
        bias: the bias's name, likewise.
        fan_in: products that are summed into one output: in/groups · kernel (/ stride for transposed).
        fan_out: the same backward.
        weights: moments over the weight's values.
        received: E[x²] of what came in.
        received_between: variance between examples of what came in, averaged over positions; NaN unknown.
        received_correlation: mean cosine of two examples of what came in; NaN unknown.
        produced: E[z²] of what went out.
        amplification: E[z²]/E[x²] that weights drawn independently with this mean and variance would give on
            this very input, without a bias: Var(W)·fan_in, plus what a mean of the weights adds.
        independent: E[z²] that weights drawn independently with this mean and variance would give on this
            very input, Var(W)·Σx² + E[W]²·(Σx)² + E[b²]; a trained weight, aligned with its input, differs.
        channels: how many inputs (of a group) one output sums at one place: the width that decides how much
            chance moves the signal, since neighbouring places become alike in a deep stack.
        units: how many outputs.
        groups: of a grouped convolution; 1 otherwise.
        size: how many values went out.
    """

    node: Node
    weight: str | None
    bias: str | None
    fan_in: float
    fan_out: float
    weights: Moments = field(repr=False)
    received: float
    received_between: float
    received_correlation: float
    produced: float
    amplification: float
    independent: float
    channels: int
    units: int
    groups: int
    size: int

    @property
    def gain_squared(self) -> float:
        """Var(W) · fan_in: what the variance law calls gain²; 1/3 for torch's default, 2 for He."""
        return float(self.weights.var()) * self.fan_in


def measure_layer(node: Node, args: Any, kwargs: Any, nodes: NodeProbe) -> Iterator[LayerMeasure]:
    """Measure one call if it is a layer with a weight; yields nothing otherwise.

    Args:
        node: the call.
        args: its live arguments.
        kwargs: likewise.
        nodes: what is measured already, this node included.
    """
    names = _SIGNATURES.get(node.op)
    made = nodes.last
    if names is None or made.values is None or not made.size:
        return
    bound = {**dict(zip(names, args, strict=False)), **kwargs}
    x, weight = bound["input"].detach(), bound["weight"].detach()
    if not x.numel() or not weight.numel() or not x.is_floating_point():
        return
    fan_in, fan_out = _fans(node.op, weight, bound)
    above = nodes.of(node.arguments["input"])
    if above is not None and above.values is not None and above.shape == tuple(x.shape):
        received, between, correlation = above.second_moment, above.between, above.correlation
    else:
        received, (between, correlation) = mean_square(x), nodes.across(x)
    weights = overall(weight)
    bias = bound.get("bias")
    offset = 0.0 if bias is None else mean_square(bias.detach())
    alone = _independent(node.op, x, bound, weights)
    yield LayerMeasure(
        node=node,
        weight=_parameter_name(node, "weight"),
        bias=_parameter_name(node, "bias"),
        fan_in=fan_in,
        fan_out=fan_out,
        weights=weights,
        received=received,
        received_between=between,
        received_correlation=correlation,
        produced=made.second_moment,
        amplification=alone / received if received > 0 else float("nan"),
        independent=alone + offset,
        channels=weight.shape[0] // bound.get("groups", 1) if "transpose" in node.op else weight.shape[1],
        units=_units(node.op, weight, bound),
        groups=bound.get("groups", 1),
        size=made.size,
    )


def looks_fresh(layers: Sequence[LayerMeasure]) -> bool:
    """Whether the median layer's output has the second moment that independent weights would give it.

    Where all examples look alike a unit's output is one draw, so over u units ln E[z²] has the standard
    deviation √(2/u) at most; three of those, or a factor 1.5 where there are many units, are forgiven.
    """
    off = [
        abs(math.log(m.produced / m.independent)) / max(math.log(1.5), 3 * (2 / m.units) ** 0.5)
        for m in layers
        if 0 < m.independent < math.inf and 0 < m.produced < math.inf
    ]
    return not off or statistics.median(off) <= 1


def _parameter_name(node: Node, argument: str) -> str | None:
    sources = node.arguments.get(argument, ())
    return sources[0].name if len(sources) == 1 and isinstance(sources[0], Parameter) else None


def _product(values: Any, dims: int) -> float:
    if isinstance(values, int):
        return float(values**dims)
    return float(torch.tensor(values).prod())


def _units(op: str, weight: Tensor, bound: Mapping[str, Any]) -> int:
    return weight.shape[1] * bound.get("groups", 1) if "transpose" in op else weight.shape[0]


def _fans(op: str, weight: Tensor, bound: Mapping[str, Any]) -> tuple[float, float]:
    if op == "linear":
        return float(weight.shape[1]), float(weight.shape[0])
    groups, dims = bound.get("groups", 1), weight.ndim - 2
    kernel = weight[0, 0].numel()
    stride = _product(bound.get("stride", 1), dims)
    first, second = float(weight.shape[0] / groups * kernel), float(weight.shape[1] * kernel)
    # An output of a transposed convolution sums 1/stride of the kernel, as a plain one's input gradient does.
    return (first / stride, second) if "transpose" in op else (second, first / stride)


def _independent(op: str, x: Tensor, bound: Mapping[str, Any], weights: Moments) -> float:
    """Var(W)·E[Σx²] + E[W]²·E[(Σx)²], the sums over what each output really sees, padding included."""
    variance, square_mean = float(weights.var()), float(weights.mean) ** 2
    x = x.double()
    if op == "linear":
        squares, sums = x.square().sum(-1), x.sum(-1)
    else:
        dims = int(op[-2])
        x = x if x.ndim == dims + 2 else x[None]
        groups = bound.get("groups", 1)
        grouped = x.reshape(x.shape[0], groups, -1, *x.shape[2:])
        ones = torch.ones(groups, 1, *bound["weight"].shape[2:], dtype=x.dtype, device=x.device)
        options = {n: bound[n] for n in ("stride", "padding", "output_padding", "dilation") if n in bound}
        convolve = getattr(F, op)
        squares = convolve(grouped.square().sum(2), ones, None, groups=groups, **options)
        sums = convolve(grouped.sum(2), ones, None, groups=groups, **options)
    return variance * float(overall(squares).mean) + square_mean * mean_square(sums)
