"""Weights beside an input: torch's kernels take few combinations right, users bring them all."""

from __future__ import annotations

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)


def compute_dtype(x: Tensor) -> torch.dtype:
    """The type of weights and statistics beside x: its own, or float32 where x is half precision."""
    return torch.float32 if x.dtype in HALF else x.dtype


def cast(parameter: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The parameter in `dtype`; itself where it is so already."""
    return parameter if parameter is None or parameter.dtype is dtype else parameter.to(dtype)


def affine_in(
    dtype: torch.dtype, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Weight and bias in `dtype`, for one of torch's kernels.

    A bias never goes alone: without a weight the second derivatives of torch's kernels lose the bias.
    """
    if weight is None and bias is not None:
        weight = torch.ones_like(bias)
    return cast(weight, dtype), cast(bias, dtype)


def matched(
    x: Tensor, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """x, weight and bias in a combination that torch's row and group kernels take.

    The result is formed in float32 at least and rounded once, whoever brings the wider type. torch's CPU
    kernels do that for a half-precision x beside float32 weights; those of other devices want one dtype,
    unless autocast is there to unite them.
    """
    if weight is None:
        if bias is None:
            return x, None, None
    elif weight.dtype is x.dtype and (bias is None or bias.dtype is x.dtype):
        return x, weight, bias
    dtype = compute_dtype(x)
    if x.device.type != "cpu" and not torch.is_autocast_enabled(x.device.type):
        x = x.to(dtype)
    return x, *affine_in(dtype, weight, bias)
