"""How many inputs an output of a layer really adds up: kernels that reach over the border add fewer."""

from __future__ import annotations

import math

import torch

from musigma.graph import Node, kinds


def effective_fans(node: Node, weight: tuple[int, ...], source: tuple[int, ...]) -> tuple[float, float]:
    """Taps into one output and out of one input, averaged over the places of this call.

    Formula: pairs of input and output that the layer connects ÷ outputs, and ÷ inputs.

    Args:
        node: the op.
        weight: shape of the weight, as the op reads it.
        source: shape of the signal.

    Returns:
        (fan_in, fan_out), fractions at borders and for strides.
    """
    if node.op in kinds.CONVOLUTIONS or node.op in kinds.TRANSPOSED_CONVOLUTIONS:
        return _convolution(node, weight, source)
    if node.op in kinds.EMBEDDINGS:
        return 1.0, float(weight[-1])
    if node.op == "bilinear":
        return float(weight[1] * weight[2]), float(weight[0] * weight[2])
    return _product(node, weight, source)


def _product(node: Node, weight: tuple[int, ...], source: tuple[int, ...]) -> tuple[float, float]:
    if node.op == "linear":
        return float(weight[-1]), float(weight[0] if len(weight) > 1 else 1)
    outputs = math.prod(map(int, node.shapes[0]))
    # Each output of a product adds up as many terms as there are (input, weight) pairs to it: a sum over
    # the indices that inputs and weight share. Their number squared is inputs · weights / outputs, over the
    # indices that all three share (a batch of matrices).
    shared = int(weight[0]) if len(weight) > 2 and len(source) == len(weight) and node.op != "einsum" else 1
    inputs, weights = math.prod(source), math.prod(weight)
    terms = math.sqrt(max(inputs * weights / max(outputs * shared, 1), 1.0))
    return terms, outputs * terms / max(inputs, 1)


def _convolution(node: Node, weight: tuple[int, ...], source: tuple[int, ...]) -> tuple[float, float]:
    transposed = node.op in kinds.TRANSPOSED_CONVOLUTIONS
    groups = int(node.options.get("groups", 1) or 1)  # type: ignore[call-overload]
    kernel = weight[2:]
    dims = len(kernel)
    inputs, outputs = tuple(map(int, source))[-dims:], tuple(map(int, node.shapes[0]))[-dims:]
    stride, dilation = (_each(node.options.get(name, 1), dims) for name in ("stride", "dilation"))
    padding = _padding(node.options.get("padding", 0), kernel, dilation)
    into, out_of = 1.0, 1.0
    for n, m, k, s, p, d in zip(inputs, outputs, kernel, stride, padding, dilation, strict=True):
        pairs = _pairs(m, n, k, s, p, d) if transposed else _pairs(n, m, k, s, p, d)
        into, out_of = into * pairs / max(m, 1), out_of * pairs / max(n, 1)
    if transposed:
        return weight[0] // groups * into, weight[1] * out_of
    return weight[1] * into, weight[0] // groups * out_of


def _pairs(wide: int, narrow: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    """How many of the taps of all places of the narrow side fall on a place of the wide side."""
    taps = dilation * torch.arange(kernel, device="cpu")
    at = stride * torch.arange(narrow, device="cpu")[:, None] + taps - padding
    return int(((at >= 0) & (at < wide)).sum())


def _each(value: object, dims: int) -> tuple[int, ...]:
    values = tuple(value) if isinstance(value, list | tuple) else (value,)
    return tuple(map(int, values * dims if len(values) == 1 else values))  # type: ignore[call-overload]


def _padding(value: object, kernel: tuple[int, ...], dilation: tuple[int, ...]) -> tuple[int, ...]:
    if value == "same":
        return tuple(d * (k - 1) // 2 for k, d in zip(kernel, dilation, strict=True))
    return _each(0 if value == "valid" else value, len(kernel))
