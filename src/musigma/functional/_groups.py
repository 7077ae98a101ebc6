"""GroupNorm and InstanceNorm: groups of one example's channels by their own statistics."""

from __future__ import annotations

import math

import torch
from jaxtyping import Shaped
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_variadic

from musigma.functional._batch import by_running_statistics
from musigma.functional._checks import check_channels, check_eps, check_groups, check_running
from musigma.functional._masked import check_mask, normalized_groups
from musigma.functional._parameters import affine_for, matched
from musigma.functional._running import Statistics, from_torch, landing, transforms_active, update
from musigma.functional._single import only_bias, warn_single_value
from musigma.ops import activate, check_activation, direct, memory_format, selected
from musigma.ops import group_norm as group_norm_op
from musigma.statistics import Moments

_group_norm = direct("group_norm")
_NOTHING_TO_NORMALIZE_BY = (
    "Expected running_mean and running_var to be defined when use_input_stats is false; pass both, or "
    "normalize by the input's own statistics"
)


def group_norm(
    input: Shaped[Tensor, "*shape"],
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    mask: Tensor | None = None,
    activation: str | None = None,
) -> Shaped[Tensor, "*shape"]:
    """Normalize every group of channels of every example by its own mean and spread.

        y = (x − μ) / √(σ² + eps) · weight + bias,    μ, σ² over (c/num_groups, *spatial), σ² biased (1/n)

    One group is LayerNorm over (c, *spatial); one channel a group is InstanceNorm. The result has the
    input's dtype and memory format, and does not depend on the batch.

    A group of one value is 0 once it is centered: the result is then exactly the bias, weight and input get
    exactly zero gradients, and a `MusigmaWarning` says so. (A batch of one such group raises, as in torch.)

    Args:
        input: (n, c, *spatial).
        num_groups: how many groups the c channels form; it divides c.
        weight: (c,), in any floating dtype.
        bias: (c,), in any floating dtype.
        eps: added to the variance; in units of input².
        mask: what enters the statistics: boolean (True keeps) or non-negative weights, broadcastable to the
            input, (n, 1, *spatial) for padding. All values are normalized, dropped ones too (0 in place of
            those that are not finite).
        activation: ``"relu"``, ``"silu"``, ``"gelu"`` (exact) or ``"gelu_tanh"``, applied to y.

    Returns:
        (n, c, *spatial), in the input's dtype.

    Raises:
        RuntimeError: the input has no channel dim, the groups do not divide the channels, or weight or bias
            has another shape.
        ValueError: eps is negative, the mask does not broadcast, the activation is unknown, or n = 1 and
            each group holds one value.

    Example:
        >>> import torch, musigma as ms
        >>> ms.functional.group_norm(torch.tensor([[1.0, 3.0, 10.0, 30.0]]), 2)
        tensor([[-1.0000,  1.0000, -1.0000,  1.0000]])

    References:
        Wu & He 2018, "Group Normalization", equations 1 to 3 and 7.
    """
    if not torch.compiler.is_compiling():
        y = _group_norm(input, num_groups, weight, bias, eps, mask, activation)
        if y is not None:
            return y
    if has_torch_function_variadic(input, weight, bias, mask):
        return handle_torch_function(
            group_norm,
            (input, weight, bias, mask),
            input,
            num_groups,
            weight=weight,
            bias=bias,
            eps=eps,
            mask=mask,
            activation=activation,
        )
    check_groups(input, num_groups, weight, bias)
    check_eps("group_norm", eps)
    check_activation(activation)
    if input.numel() == 0:
        y = only_bias(input, *_per_channel(input, weight, bias))
    elif input.shape[1] == num_groups and math.prod(input.shape[2:]) == 1:
        y = _single_values(input, weight, bias)
    elif mask is not None:
        return _masked(input, num_groups, weight, bias, eps, mask, activation)[0]
    elif selected("group_norm", input):
        return group_norm_op(input, num_groups, weight, bias, eps, activation)[0]
    else:
        x, weight, bias = matched(input, weight, bias, input.shape[1:2])
        y = torch.group_norm(x, num_groups, weight, bias, eps)
        if x is not input:
            y = y.to(input.dtype)
    return activate(y, activation)


def _single_values(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if x.shape[0] == 1:
        raise ValueError(
            f"Expected more than 1 value per channel when training, got input size {tuple(x.shape)}; "
            "group_norm needs more than one value in a group"
        )
    warn_single_value("group_norm", x.shape)
    return only_bias(x, *_per_channel(x, weight, bias))


def _masked(
    x: Tensor,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    mask: Tensor,
    activation: str | None,
) -> tuple[Tensor, Moments]:
    check_mask(x, mask)
    y, kept = normalized_groups(x, mask, groups, weight, bias, eps, activation)
    return y.contiguous(memory_format=memory_format(x)), kept


def _per_channel(x: Tensor, *vectors: Tensor | None) -> list[Tensor | None]:
    """Vectors over x's channels, shaped to broadcast against x."""
    return [v if v is None else v.reshape(-1, *[1] * (x.dim() - 2)) for v in vectors]


def instance_norm(
    input: Shaped[Tensor, "*shape"],
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    mask: Tensor | None = None,
    activation: str | None = None,
) -> Shaped[Tensor, "*shape"]:
    """Normalize every channel of every example by its own mean and spread.

        y = (x − μ) / √(σ² + eps) · weight + bias,    μ, σ² over (*spatial), σ² biased (1/n)

    The result has the input's dtype and memory format (torch loses channels_last). Running statistics, where
    given, take in the mean over the examples of μ and of the *unbiased* variance, in place:

        running ← (1 − momentum) · running + momentum · batch

    Args:
        input: (n, c, *spatial).
        running_mean: (c,), updated in place if `use_input_stats`, else used instead of μ.
        running_var: (c,), likewise for σ².
        weight: (c,), in any floating dtype.
        bias: (c,), in any floating dtype.
        use_input_stats: whether to normalize by the input's own statistics or by the running ones.
        momentum: the weight of the new value.
        eps: added to the variance; in units of input².
        mask: what enters the statistics: boolean (True keeps) or non-negative weights, broadcastable to the
            input, (n, 1, *spatial) for padding. All values are normalized, dropped ones too (0 in place of
            those that are not finite).
        activation: ``"relu"``, ``"silu"``, ``"gelu"`` (exact) or ``"gelu_tanh"``, applied to y.

    Returns:
        (n, c, *spatial), in the input's dtype.

    Raises:
        ValueError: `use_input_stats` with one position a channel, eps or a running variance to be used is
            negative, the mask does not broadcast, or the activation is unknown.
        RuntimeError: a vector's length is not c, or running statistics are wanted and not there.
        IndexError: the input has no channel dim.

    Example:
        >>> import torch, musigma as ms
        >>> ms.functional.instance_norm(torch.tensor([[[1.0, 3.0], [10.0, 30.0]]]))
        tensor([[[-1.0000,  1.0000],
                 [-1.0000,  1.0000]]])

    References:
        Ulyanov, Vedaldi & Lempitsky 2016, "Instance Normalization: The Missing Ingredient for Fast
        Stylization", equation 3.
    """
    if has_torch_function_variadic(input, running_mean, running_var, weight, bias, mask):
        return handle_torch_function(
            instance_norm,
            (input, running_mean, running_var, weight, bias, mask),
            input,
            running_mean=running_mean,
            running_var=running_var,
            weight=weight,
            bias=bias,
            use_input_stats=use_input_stats,
            momentum=momentum,
            eps=eps,
            mask=mask,
            activation=activation,
        )
    check_channels(
        "instance_norm", input, running_mean=running_mean, running_var=running_var, weight=weight, bias=bias
    )
    check_running(running_mean, running_var, "" if use_input_stats else _NOTHING_TO_NORMALIZE_BY)
    check_eps("instance_norm", eps)
    check_activation(activation)
    batch = None
    if use_input_stats:
        y, batch = _by_instance(input, running_mean is not None, weight, bias, eps, mask, activation)
    else:
        y = by_running_statistics(input, running_mean, running_var, weight, bias, eps, None, activation)
    if batch is not None and running_mean is not None and running_var is not None:
        update(running_mean, running_var, None, batch, momentum)
    return y


def _by_instance(
    x: Tensor,
    track: bool,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    mask: Tensor | None,
    activation: str | None,
) -> tuple[Tensor, Statistics | None]:
    """y, and where asked for the examples' statistics averaged."""
    positions = math.prod(x.shape[2:])
    if positions == 1:
        raise ValueError(
            f"Expected more than 1 spatial element when training, got input size {tuple(x.shape)}; one value "
            "a channel is always normalized to 0. Use LayerNorm or GroupNorm over the channels instead"
        )
    if x.numel() == 0:
        return activate(only_bias(x, *_per_channel(x, weight, bias)), activation), None
    if mask is not None:
        y, kept = _masked(x, x.shape[1], weight, bias, eps, mask, activation)
        # as if every example had two values: their unbiased variance is then M2 itself
        return y, (kept.count.new_full((), 2.0), kept.mean.mean(0), kept.var(correction=1).mean(0))
    if selected("group_norm", x) or transforms_active():
        y, mean, m2 = group_norm_op(x, x.shape[1], weight, bias, eps, activation)
        count = mean.new_full((), positions)
        return y, (count, mean.mean(0), m2.mean(0)) if track else None
    mean, var = landing(x) if track else (None, None)
    y = torch.instance_norm(
        x, *affine_for(x, weight, bias, x.shape[1:2]), mean, var, True, 1.0, eps, torch.backends.cudnn.enabled
    )
    y = activate(y.contiguous(memory_format=memory_format(x)), activation)
    if mean is None or var is None:
        return y, None
    return y, from_torch(mean, var, positions)
