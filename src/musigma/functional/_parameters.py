"""Weights beside an input: torch's kernels take few combinations right, users bring them all."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)


def compute_dtype(x: Tensor) -> torch.dtype:
    """The type of weights and statistics beside x: its own, or float32 where x is half precision."""
    return torch.float32 if x.dtype in HALF else x.dtype


def cast(parameter: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The parameter in `dtype`; itself where it is so already.

    Raises:
        RuntimeError: it holds no fractions, or complex ones, whose imaginary part would be lost.
    """
    if parameter is None or parameter.dtype is dtype:
        return parameter
    if not parameter.is_floating_point():
        raise RuntimeError(f"weight, bias and statistics must be floating point, got {parameter.dtype}")
    return parameter.to(dtype)


def affine_for(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, shape: Sequence[int]
) -> tuple[Tensor | None, Tensor | None]:
    """Weight and bias in x's `compute_dtype`, for a kernel of torch; a weight of ones where one is needed.

    A bias never goes alone: the second derivatives of torch's kernels lose it, and group_norm's first ones
    fail. Nor does a half-precision x on the CPU: beside float32 weights torch keeps the statistics float32
    for the backward, without them in x's type, where an rstd of 1e6 is inf and a mean has three digits.
    """
    dtype = compute_dtype(x)
    if weight is None and (bias is not None or (x.dtype in HALF and x.device.type == "cpu")):
        weight = torch.ones(shape, dtype=dtype, device=x.device)
    return cast(weight, dtype), cast(bias, dtype)


def matched(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, shape: Sequence[int]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """x, weight and bias (of `shape`) in a combination that torch's row and group kernels take.

    The result is formed in float32 at least and rounded once, whoever brings the wider type. torch's CPU
    kernels do that for a half-precision x beside float32 weights; those of other devices keep float32
    statistics anyway, and want one dtype, unless autocast is there to unite them.
    """
    uniform = (weight is None or weight.dtype is x.dtype) and (bias is None or bias.dtype is x.dtype)
    on_cpu = x.device.type == "cpu"
    if uniform and (weight is not None or bias is None) and not (on_cpu and x.dtype in HALF):
        return x, weight, bias
    if not on_cpu and uniform:
        return x, torch.ones_like(bias) if weight is None and bias is not None else weight, bias
    weight, bias = affine_for(x, weight, bias, shape)
    if not on_cpu and not torch.is_autocast_enabled(x.device.type):
        x = x.to(compute_dtype(x))
    return x, weight, bias
