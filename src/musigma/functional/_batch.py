"""BatchNorm: channels by the batch's statistics (all ranks', unmasked values'), or by the running ones."""

from __future__ import annotations

import torch
from jaxtyping import Shaped
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.overrides import handle_torch_function, has_torch_function_variadic

from musigma.functional._checks import check_add, check_channels, check_eps, check_running
from musigma.functional._masked import check_mask
from musigma.functional._parameters import affine_for, cast, compute_dtype
from musigma.functional._running import Statistics, from_torch, landing, transforms_active, update
from musigma.functional._variances import check_variances
from musigma.ops import activate, affine, check_activation, direct, selected
from musigma.ops import batch_norm as batch_norm_op
from musigma.statistics import moments

_batch_norm = direct("batch_norm")
_NOTHING_TO_EVALUATE_BY = (
    "running_mean must be defined in evaluation mode, and running_var with it; pass both, or training=True "
    "to use the batch's own statistics"
)


def batch_norm(
    input: Shaped[Tensor, "*shape"],
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
    *,
    num_batches_tracked: Tensor | None = None,
    mask: Tensor | None = None,
    group: ProcessGroup | None = None,
    add: Tensor | None = None,
    activation: str | None = None,
) -> Shaped[Tensor, "*shape"]:
    """Normalize every channel by its mean and spread: the batch's in training, the running ones otherwise.

        y = activation((x − μ) / √(σ² + eps) · weight + bias + add)

    In training μ and σ² are those of the batch, and σ² is *biased* (1/n). Running statistics, where given,
    then take in the mean and the *unbiased* variance (1/(n−1)), in place and as the last thing that happens:

        running ← (1 − f) · running + f · batch,    f = momentum, or 1/num_batches_tracked for None

    They take in nothing from an empty batch, from a channel whose statistics are not finite (an overflowing
    batch that a gradient scaler skips must not poison them), or while activation checkpointing forms a
    forward again in the backward pass, where torch counts the batch twice.

    Args:
        input: (n, c, *spatial).
        running_mean: (c,), float32 even beside half-precision inputs and weights.
        running_var: (c,), likewise.
        weight: (c,), in any floating dtype.
        bias: (c,), in any floating dtype.
        training: whether to normalize by the batch's statistics and update the running ones.
        momentum: the weight of the new value; None for the plain average of all batches. (Keras, Flax and
            the formula momentum·running + (1 − momentum)·sample count the other way: their 0.9 is 0.1 here.)
        eps: added to the variance; in units of input².
        num_batches_tracked: 0-dim integer, counted up by each batch that is taken in.
        mask: what enters the statistics: boolean (True keeps) or non-negative weights, broadcastable to the
            input, (n, 1, *spatial) for padding. All values are normalized, dropped ones too (0 in place of
            those that are not finite).
        group: take the statistics over all ranks of this process group, whose batches may differ in size
            and be empty; every rank has to make the call.
        add: like input; added after the affine and before the activation, a ResNet's tail.
        activation: ``"relu"``, ``"silu"``, ``"gelu"`` (exact) or ``"gelu_tanh"``.

    Returns:
        (n, c, *spatial), in the input's dtype and memory format.

    Raises:
        ValueError: training with a single value a channel, eps not positive in training or negative, a
            negative variance in evaluation, ``momentum=None`` without `num_batches_tracked`, one running
            statistic without the other, `add` of another shape, an unknown activation.
        RuntimeError: a vector's length is not c, or evaluation without running statistics.
        IndexError: the input has no channel dim.

        Whatever is raised, the running statistics are what they were.

    Example:
        >>> import torch, musigma as ms
        >>> x, mean, var = torch.tensor([[1.0], [2.0], [3.0]]), torch.zeros(1), torch.ones(1)
        >>> ms.functional.batch_norm(x, mean, var, training=True).flatten()
        tensor([-1.2247,  0.0000,  1.2247])
        >>> mean, var  # 0.9 · 0 + 0.1 · 2 and 0.9 · 1 + 0.1 · 1
        (tensor([0.2000]), tensor([1.]))

    References:
        Ioffe & Szegedy 2015, "Batch Normalization", algorithms 1 and 2.
    """
    if not torch.compiler.is_compiling():
        y = _batch_norm(
            input,
            running_mean,
            running_var,
            weight,
            bias,
            training,
            momentum,
            eps,
            num_batches_tracked,
            mask,
            group,
            add,
            activation,
        )
        if y is not None:
            return y
    if has_torch_function_variadic(input, running_mean, running_var, weight, bias, mask, add):
        return handle_torch_function(
            batch_norm,
            (input, running_mean, running_var, weight, bias, mask, add),
            input,
            running_mean,
            running_var,
            weight=weight,
            bias=bias,
            training=training,
            momentum=momentum,
            eps=eps,
            num_batches_tracked=num_batches_tracked,
            mask=mask,
            group=group,
            add=add,
            activation=activation,
        )
    check_channels(
        "batch_norm", input, running_mean=running_mean, running_var=running_var, weight=weight, bias=bias
    )
    check_running(running_mean, running_var, "" if training else _NOTHING_TO_EVALUATE_BY)
    _check_options(training, eps, activation, input, add)
    tracked = training and running_mean is not None
    if tracked and momentum is None and num_batches_tracked is None:
        raise ValueError("momentum=None (the average of all batches) needs num_batches_tracked to count them")
    batch = None
    # Of another dtype it is added to the rounded result, as `+` would.
    after = add if add is None or add.dtype is input.dtype else None, activation
    apart = after[0] is not add
    if apart:
        after = None, None
    if training:
        y, batch = _by_batch_statistics(input, tracked, weight, bias, eps, mask, group, *after)
    else:
        y = by_running_statistics(input, running_mean, running_var, weight, bias, eps, *after)
    if apart:
        y = _finished(y, add, activation)
    if batch is not None and running_mean is not None and running_var is not None:
        update(running_mean, running_var, num_batches_tracked, batch, momentum)
    return y


def _check_options(training: bool, eps: float, activation: str | None, x: Tensor, add: Tensor | None) -> None:
    check_eps("batch_norm", eps, positive=training)
    check_activation(activation)
    if add is not None:
        check_add(x, add)


def _finished(y: Tensor, add: Tensor | None, activation: str | None) -> Tensor:
    """What comes after the affine, one step after the other."""
    return activate(y if add is None else (y + add).to(y.dtype), activation)


def by_running_statistics(
    x: Tensor,
    mean: Tensor | None,
    var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    add: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """y by statistics that were there before; `check_running` has made sure that they were."""
    assert mean is not None
    assert var is not None
    check_variances(var, mean)
    if selected("affine", x):
        return affine(x, mean, var, weight, bias, eps, add, activation, None)
    dtype = compute_dtype(x)
    y = torch.batch_norm(
        x,
        *affine_for(x, weight, bias, x.shape[1:2]),
        cast(mean, dtype),
        cast(var, dtype),
        False,
        0.0,
        eps,
        torch.backends.cudnn.enabled,
    )
    return _finished(y, add, activation)


def _by_batch_statistics(
    x: Tensor,
    track: bool,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    mask: Tensor | None,
    group: ProcessGroup | None,
    add: Tensor | None,
    activation: str | None,
) -> tuple[Tensor, Statistics | None]:
    """y, and the statistics for the running ones to take in: None where they are not asked for or empty."""
    if mask is not None or group is not None:
        return _by_gathered_statistics(x, weight, bias, eps, mask, group, add, activation)
    count = x.numel() // x.shape[1] if x.numel() else 0
    if count == 1:
        raise ValueError(_too_few(x, "batch_norm cannot normalize a single one"))
    if count and not transforms_active() and selected("batch_norm", x):
        y, mean, m2 = batch_norm_op(x, weight, bias, eps, add, activation)
        return y, (m2.new_full((), count), mean, m2)
    if count and transforms_active():
        own = moments(x, _all_but_channels(x))
        y = affine(x, own.mean, own.var(), weight, bias, eps, add, activation, None)
        return y, (own.count, own.mean, own.m2)
    track = track and count > 0
    mean, var = landing(x) if track else (None, None)
    y = torch.batch_norm(
        x, *affine_for(x, weight, bias, x.shape[1:2]), mean, var, True, 1.0, eps, torch.backends.cudnn.enabled
    )
    y = _finished(y, add, activation)
    if mean is None or var is None:
        return y, None
    return y, from_torch(mean, var, count)


def _by_gathered_statistics(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    mask: Tensor | None,
    group: ProcessGroup | None,
    add: Tensor | None,
    activation: str | None,
) -> tuple[Tensor, Statistics]:
    """y by the moments of what the mask keeps on all ranks: moments → gather and merge → affine."""
    if mask is not None:
        check_mask(x, mask)
    all_ranks = moments(x, _all_but_channels(x), mask=mask)
    if group is not None:
        all_ranks = all_ranks.all_reduce(group)
    # (Elsewhere the counts can't be looked at, or only by stopping the device.)
    if x.device.type == "cpu" and not (torch.compiler.is_compiling() or transforms_active()):
        # With one value the variance is 0 and its unbiased estimate does not exist. (A sum of weights may be
        # anything above 0.) All ranks hold the same counts, so that all of them raise or none does.
        weights = mask is not None and mask.is_floating_point()
        few = all_ranks.count <= 0 if weights else all_ranks.count < 2
        # (Where nobody has a value there is nothing to normalize, and nothing to take in.)
        if few.any() and (x.numel() or all_ranks.count.any()):
            raise ValueError(_too_few(x, _whose(few, mask, group)))
    y = affine(x, all_ranks.mean, all_ranks.var(), weight, bias, eps, add, activation, mask)
    return y, (all_ranks.count, all_ranks.mean, all_ranks.m2)


def _all_but_channels(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def _too_few(x: Tensor, why: str) -> str:
    return (
        f"Expected more than 1 value per channel when training, got input size {tuple(x.shape)}; {why}. Drop "
        "a last batch of one (DataLoader(drop_last=True)), call .eval() for inference, or use LayerNorm or "
        "GroupNorm, which need no batch"
    )


def _whose(few: Tensor, mask: Tensor | None, group: ProcessGroup | None) -> str:
    where = "" if group is None else " on all ranks of the group together"
    if mask is None:
        return f"there are too few{where}"
    return f"the mask keeps too few in channels {few.nonzero().flatten().tolist()}{where}"
