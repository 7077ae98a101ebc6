"""LayerNorm and RMSNorm: every row by its own statistics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_variadic

from musigma.functional._checks import check_residual, check_rows
from musigma.functional._masked import check_mask, normalized_rows
from musigma.functional._parameters import cast, compute_dtype, matched
from musigma.functional._single import only_bias, warn_single_value
from musigma.ops import (
    activate,
    add_row_norm,
    check_activation,
    direct,
    memory_format,
    row_norm,
    selected,
)

RMS_EPS = torch.finfo(torch.float32).eps
"""What `rms_norm` takes for ``eps=None``, whatever the input's dtype."""

_layer_norm, _rms_norm = direct("layer_norm"), direct("rms_norm")
_add_layer_norm, _add_rms_norm = direct("add_layer_norm"), direct("add_rms_norm")


def layer_norm(
    input: Shaped[Tensor, "*shape"],
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    mask: Tensor | None = None,
    activation: str | None = None,
) -> Shaped[Tensor, "*shape"]:
    """Normalize every row, the values over the last dims, by its own mean and spread.

        y = (x − μ) / √(σ² + eps) · weight + bias,    μ, σ² over `normalized_shape`, σ² biased (1/n)

    Nothing of one row enters another, so the result does not depend on the batch, and there is no difference
    between training and evaluation. The result has the input's dtype, whatever that of weight and bias.

    A row of one value is 0 once it is centered: the result is then exactly the bias, weight and input get
    exactly zero gradients, and a `MusigmaWarning` says so.

    Args:
        input: (*batch, *normalized_shape).
        normalized_shape: sizes of the last dims, over which each row is normalized.
        weight: (*normalized_shape), in any floating dtype.
        bias: (*normalized_shape), in any floating dtype.
        eps: added to the variance; in units of input².
        mask: what enters the statistics: boolean (True keeps) or non-negative weights, broadcastable to the
            input. All values are normalized, dropped ones too (0 in place of those that are not finite).
        activation: ``"relu"``, ``"silu"``, ``"gelu"`` (exact) or ``"gelu_tanh"``, applied to y.

    Returns:
        (*batch, *normalized_shape), in the input's dtype, channels last where the input is. (torch's
        layer_norm returns it contiguous, and the convolution behind converts it again.)

    Raises:
        RuntimeError: the input does not end in `normalized_shape`, or weight or bias has another shape.
        ValueError: eps is negative, the mask does not broadcast, or the activation is unknown.

    Example:
        >>> import torch, musigma as ms
        >>> ms.functional.layer_norm(torch.tensor([[1.0, 2.0, 3.0]]), (3,), eps=0.0)
        tensor([[-1.2247,  0.0000,  1.2247]])

    References:
        Ba, Kiros & Hinton 2016, "Layer Normalization", equation 3.
    """
    if not torch.compiler.is_compiling():
        y = _layer_norm(input, normalized_shape, weight, bias, eps, mask, activation)
        if y is not None:
            return y
    if has_torch_function_variadic(input, weight, bias, mask):
        return handle_torch_function(
            layer_norm,
            (input, weight, bias, mask),
            input,
            normalized_shape,
            weight=weight,
            bias=bias,
            eps=eps,
            mask=mask,
            activation=activation,
        )
    shape = tuple(normalized_shape)
    check_rows("layer_norm", input, shape, weight, bias, eps)
    if activation is not None:
        check_activation(activation)
    if shape[0] == 1 and math.prod(shape) == 1:
        warn_single_value("layer_norm", input.shape)
        y = only_bias(input, weight, bias)
    elif mask is not None:
        y = _masked(input, shape, weight, bias, eps, mask, center=True)
    elif selected("row_norm", input):
        y = row_norm(input, len(shape), weight, bias, eps, True, activation)[0]
        activation = None
    else:
        x, weight, bias = matched(input, weight, bias, shape)
        y = torch.layer_norm(x, shape, weight, bias, eps)
        if x is not input:
            y = y.to(input.dtype)
    if input.dim() > 3 and not input.is_contiguous():
        y = y.contiguous(memory_format=memory_format(input))
    return y if activation is None else activate(y, activation)


def rms_norm(
    input: Shaped[Tensor, "*shape"],
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    mask: Tensor | None = None,
    activation: str | None = None,
) -> Shaped[Tensor, "*shape"]:
    """Scale every row, the values over the last dims, to root mean square 1; the mean stays where it is.

        y = x / √(mean(x²) + eps) · weight,    mean(x²) over `normalized_shape`

    As with `layer_norm`, rows are independent of each other and of the mode, and the result has the input's
    dtype. A row of one value keeps only its sign, and a `MusigmaWarning` says so.

    Args:
        input: (*batch, *normalized_shape).
        normalized_shape: sizes of the last dims, over which each row is normalized.
        weight: (*normalized_shape), in any floating dtype.
        eps: added to the mean square, in units of input²; None is float32's machine epsilon, 1.19e-7, for
            every dtype, so that a model means the same in bfloat16, float32 and float64 (torch takes
            float64's own, 2.2e-16, there).
        mask: what enters the statistics: boolean (True keeps) or non-negative weights, broadcastable to the
            input. All values are normalized, dropped ones too (0 in place of those that are not finite).
        activation: ``"relu"``, ``"silu"``, ``"gelu"`` (exact) or ``"gelu_tanh"``, applied to y.

    Returns:
        (*batch, *normalized_shape), in the input's dtype, channels last where the input is.

    Raises:
        RuntimeError: the input does not end in `normalized_shape`, or weight has another shape.
        ValueError: eps is negative, the mask does not broadcast, or the activation is unknown.

    Example:
        >>> import torch, musigma as ms
        >>> ms.functional.rms_norm(torch.tensor([[3.0, 4.0]]), (2,), eps=0.0)
        tensor([[0.8485, 1.1314]])

    References:
        Zhang & Sennrich 2019, "Root Mean Square Layer Normalization", equation 4.
    """
    if not torch.compiler.is_compiling():
        y = _rms_norm(input, normalized_shape, weight, eps, mask, activation)
        if y is not None:
            return y
    if has_torch_function_variadic(input, weight, mask):
        # torch's jagged tensors know a rms_norm by its name, and no argument but torch's own
        more: dict[str, Any] = {
            k: v for k, v in (("mask", mask), ("activation", activation)) if v is not None
        }
        return handle_torch_function(
            rms_norm, (input, weight, mask), input, normalized_shape, weight=weight, eps=eps, **more
        )
    shape = tuple(normalized_shape)
    if eps is None:
        eps = RMS_EPS
    check_rows("rms_norm", input, shape, weight, None, eps)
    if activation is not None:
        check_activation(activation)
    if shape[0] == 1 and math.prod(shape) == 1:
        warn_single_value("rms_norm", input.shape, "the sign of each value is all that is left")
    if mask is not None:
        y = _masked(input, shape, weight, None, eps, mask, center=False)
    elif selected("row_norm", input):
        y = row_norm(input, len(shape), weight, None, eps, False, activation)[0]
        activation = None
    elif weight is None or weight.dtype is input.dtype:
        # a row's sum must not depend on how many other rows lie between its values
        y = torch.rms_norm(input.contiguous(), shape, weight, eps)
    else:
        # torch's would warn, and round twice
        dtype = compute_dtype(input)
        y = torch.rms_norm(input.to(dtype).contiguous(), shape, cast(weight, dtype), eps).to(input.dtype)
    if input.dim() > 3 and not input.is_contiguous():
        y = y.contiguous(memory_format=memory_format(input))
    return y if activation is None else activate(y, activation)


def _masked(
    x: Tensor,
    shape: tuple[int, ...],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    mask: Tensor,
    *,
    center: bool,
) -> Tensor:
    check_mask(x, mask)
    y = normalized_rows(x, mask, x.shape[: x.dim() - len(shape)], eps, center=center)
    if weight is not None and bias is not None:
        y = torch.addcmul(bias, y, weight)
    elif weight is not None:
        y = y * weight
    elif bias is not None:
        y = y + bias
    return y.to(x.dtype)


def _fused(x: Tensor, residual: Tensor, normalized_shape: Sequence[int]) -> bool:
    """Whether one op adds and normalizes: not where a layout is to be kept, or single values told of."""
    return (
        selected("add_row_norm", x)
        and selected("add_row_norm", residual)
        and (x.dim() < 4 or x.is_contiguous())
        and math.prod(normalized_shape) != 1
    )


def add_layer_norm(
    x: Shaped[Tensor, "*shape"],
    residual: Shaped[Tensor, "..."],
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    activation: str | None = None,
) -> tuple[Shaped[Tensor, "*shape"], Shaped[Tensor, "*shape"]]:
    """Add, then normalize: the step between two sublayers of a Transformer.

        s = x + residual,    y = layer_norm(s)

    Args:
        x: (*batch, *normalized_shape), what the sublayer returned.
        residual: like x, what went around it.
        normalized_shape, weight, bias, eps, activation: as in `layer_norm`.

    Returns:
        (y, s): the normalized sum, and the sum itself, which a pre-norm Transformer carries on.

    Raises:
        ValueError: x and residual differ in shape or dtype; else as `layer_norm`.
        RuntimeError: as `layer_norm`.

    Example:
        >>> import torch, musigma as ms
        >>> y, s = ms.functional.add_layer_norm(torch.ones(1, 2), torch.tensor([[1.0, 3.0]]), (2,))
        >>> s, y
        (tensor([[2., 4.]]), tensor([[-1.0000,  1.0000]]))

    References:
        Vaswani et al. 2017, "Attention Is All You Need", section 3.1; Xiong et al. 2020, "On Layer
        Normalization in the Transformer Architecture".
    """
    if not torch.compiler.is_compiling():
        pair = _add_layer_norm(x, residual, normalized_shape, weight, bias, eps, activation)
        if pair is not None:
            return pair
    if has_torch_function_variadic(x, residual, weight, bias):
        return handle_torch_function(
            add_layer_norm,
            (x, residual, weight, bias),
            x,
            residual,
            normalized_shape,
            weight=weight,
            bias=bias,
            eps=eps,
            activation=activation,
        )
    check_residual(x, residual)
    if _fused(x, residual, normalized_shape):
        check_rows("layer_norm", x, tuple(normalized_shape), weight, bias, eps)
        check_activation(activation)
        return add_row_norm(x, residual, len(normalized_shape), weight, bias, eps, True, activation)[:2]
    s = x + residual
    return layer_norm(s, normalized_shape, weight, bias, eps, activation=activation), s


def add_rms_norm(
    x: Shaped[Tensor, "*shape"],
    residual: Shaped[Tensor, "..."],
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    activation: str | None = None,
) -> tuple[Shaped[Tensor, "*shape"], Shaped[Tensor, "*shape"]]:
    """Add, then scale to root mean square 1: the step between two sublayers of a Llama-like Transformer.

        s = x + residual,    y = rms_norm(s)

    Args:
        x: (*batch, *normalized_shape), what the sublayer returned.
        residual: like x, what went around it.
        normalized_shape, weight, eps, activation: as in `rms_norm`.

    Returns:
        (y, s): the normalized sum, and the sum itself, which a pre-norm Transformer carries on.

    Raises:
        ValueError: x and residual differ in shape or dtype; else as `rms_norm`.
        RuntimeError: as `rms_norm`.

    Example:
        >>> import torch, musigma as ms
        >>> y, s = ms.functional.add_rms_norm(torch.ones(1, 2), torch.tensor([[2.0, 3.0]]), (2,), eps=0.0)
        >>> s, y
        (tensor([[3., 4.]]), tensor([[0.8485, 1.1314]]))

    References:
        Zhang & Sennrich 2019, "Root Mean Square Layer Normalization".
    """
    if not torch.compiler.is_compiling():
        pair = _add_rms_norm(x, residual, normalized_shape, weight, eps, activation)
        if pair is not None:
            return pair
    if has_torch_function_variadic(x, residual, weight):
        return handle_torch_function(
            add_rms_norm,
            (x, residual, weight),
            x,
            residual,
            normalized_shape,
            weight=weight,
            eps=eps,
            activation=activation,
        )
    check_residual(x, residual)
    if _fused(x, residual, normalized_shape):
        eps = RMS_EPS if eps is None else eps
        check_rows("rms_norm", x, tuple(normalized_shape), weight, None, eps)
        check_activation(activation)
        return add_row_norm(x, residual, len(normalized_shape), weight, None, eps, False, activation)[:2]
    s = x + residual
    return rms_norm(s, normalized_shape, weight, eps, activation=activation), s
