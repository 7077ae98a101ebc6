"""The one op that changes anything in place: running statistics take in a batch's moments."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from musigma.ops._define import LIBRARY, NAMESPACE, not_on_one_device

NAME = "running_update_"

SCHEMA = (
    "(Tensor(a!) running_mean, Tensor(b!) running_var, Tensor(c!)? num_batches_tracked,"
    " Tensor count, Tensor mean, Tensor m2, float? momentum) -> ()"
)
LIBRARY.define(f"{NAME}{SCHEMA}")
LIBRARY.define(f"running_update_reference_{SCHEMA}")  # what the native kernel calls for what it does not take


def check(running_mean: Tensor, running_var: Tensor, mean: Tensor, m2: Tensor) -> None:
    """Running and batch statistics have one shape."""
    shapes = {tuple(t.shape) for t in (running_mean, running_var, mean, m2)}
    if len(shapes) > 1:
        raise RuntimeError(
            "running_mean, running_var, mean and m2 must have one shape, got "
            f"{tuple(running_mean.shape)}, {tuple(running_var.shape)}, {tuple(mean.shape)}, {tuple(m2.shape)}"
        )


def reference(
    running_mean: Tensor,
    running_var: Tensor,
    num_batches_tracked: Tensor | None,
    count: Tensor,
    mean: Tensor,
    m2: Tensor,
    momentum: float | None,
) -> None:
    """running ← running + f · (batch − running), with f = momentum, or 1/num_batches_tracked for None.

    The variance that is kept is the unbiased one, M2/(count − 1), as torch keeps it; with one value there is
    none, and running_var stays. An empty batch changes nothing. A channel whose batch statistics are not
    finite (an overflowing batch that a gradient scaler skips) keeps what it had.

    Nothing happens while a backward pass runs: that is activation checkpointing forming the forward again,
    and the batch has been counted already. Asked here, below the compiler, the answer is right in eager code,
    in compiled code that checkpoints, and in a checkpoint of compiled code.

    Args (by position, as the dispatcher takes them):
        running_mean, running_var: (c,), changed in place.
        num_batches_tracked: 0-dim integer, counted up in place by a batch that is not empty; or None.
        count: 0-dim or (c,): how many values each channel's moments are made of.
        mean, m2: (c,), as `musigma.ops.moments` returns them.
        momentum: the weight of the new value; None needs `num_batches_tracked`.

    Raises:
        RuntimeError: the statistics differ in shape.
        ValueError: ``momentum=None`` without `num_batches_tracked`.

    Example:
        >>> import torch, musigma as ms
        >>> mean, var, batches = torch.zeros(1), torch.ones(1), torch.tensor(0)
        >>> batch = ms.moments(torch.tensor([[1.0], [2.0], [3.0]]), 0)
        >>> ms.ops.running_update_(mean, var, batches, batch.count, batch.mean, batch.m2, 0.1)
        >>> mean, var, batches  # 0.9 · 0 + 0.1 · 2,  0.9 · 1 + 0.1 · 1
        (tensor([0.2000]), tensor([1.]), tensor(1))

    References:
        Ioffe & Szegedy 2015, "Batch Normalization", algorithm 2.
    """
    check(running_mean, running_var, mean, m2)
    if torch._C._current_graph_task_id() != -1:
        return
    if not _took_in_plainly_(running_mean, running_var, num_batches_tracked, count, mean, m2, momentum):
        running_arithmetic_(running_mean, running_var, num_batches_tracked, count, mean, m2, momentum)


def running_arithmetic_(
    running_mean: Tensor,
    running_var: Tensor,
    num_batches_tracked: Tensor | None,
    count: Tensor,
    mean: Tensor,
    m2: Tensor,
    momentum: float | None,
) -> None:
    """The update itself, whoever runs it: tensors only, so that it traces, exports and maps."""
    if num_batches_tracked is not None:
        num_batches_tracked.add_((count > 0).any().to(num_batches_tracked.dtype))
    if momentum is None:
        if num_batches_tracked is None:
            raise ValueError("momentum=None (cumulative) needs num_batches_tracked; pass it or a momentum")
        factor = 1.0 / num_batches_tracked.to(mean.dtype).clamp(min=1)
    else:
        factor = torch.full((), momentum, dtype=mean.dtype, device=mean.device)
    usable = mean.isfinite() & m2.isfinite() & (count > 0)
    _blend_(running_mean, mean, factor, usable)
    _blend_(running_var, m2 / (count - 1).clamp(min=1), factor, usable & (count > 1))


def _took_in_plainly_(
    running_mean: Tensor,
    running_var: Tensor,
    num_batches_tracked: Tensor | None,
    count: Tensor,
    mean: Tensor,
    m2: Tensor,
    momentum: float | None,
) -> bool:
    """The common case in a third of the calls: one count for all channels, everything finite, on the CPU.

    Looking at values costs an accelerator a wait, and a mapped tensor has none to look at.
    """
    if mean.device.type != "cpu" or count.dim() or momentum is None or torch.compiler.is_compiling():
        return False
    if torch._C._are_functorch_transforms_active() or running_mean.dtype != torch.float32:
        return False
    n = count.item()
    # A sum is finite only where all its terms are; one that overflows by itself goes the long way round.
    if n <= 1 or not math.isfinite((mean.sum() + m2.sum()).item()):
        return False
    if num_batches_tracked is not None:
        num_batches_tracked.add_(1)
    running_mean.lerp_(mean.to(running_mean.dtype), momentum)
    running_var.lerp_((m2 / (n - 1)).to(running_var.dtype), momentum)
    return True


def _blend_(running: Tensor, batch: Tensor, factor: Tensor, usable: Tensor) -> None:
    old = running.to(batch.dtype)
    # Two products rather than one difference: with factor 1 the batch's own value, to the last bit.
    running.copy_(torch.where(usable, old * (1.0 - factor) + batch * factor, old))


def _batched(*args: object) -> None:
    try:
        reference(*args)  # type: ignore[arg-type]  # the dispatcher checks them against the schema
    except RuntimeError as error:
        if "vmap" not in str(error):
            raise
        raise RuntimeError(
            "running statistics that vmap does not map cannot take in mapped batches; give each its own "
            "(torch.func.stack_module_state) or build the layer with track_running_stats=False"
        ) from error


def _below_autograd(keyset: torch.DispatchKeySet, *args: object) -> None:
    with torch._C._AutoDispatchBelowAutograd():
        running_update_.redispatch(keyset & torch._C._after_autograd_keyset, *args)


def _fake(running_mean: Tensor, running_var: Tensor, *others: object) -> None:
    _, _, mean, m2, _ = others
    named = {"running_mean": running_mean, "running_var": running_var, "mean": mean, "m2": m2}
    where = {name: t.device for name, t in named.items() if isinstance(t, Tensor)}
    if len(set(where.values())) > 1:
        raise RuntimeError(not_on_one_device("the update of running statistics", where))


LIBRARY.impl(NAME, reference, "CompositeExplicitAutograd")
LIBRARY.impl("running_update_reference_", reference, "CompositeImplicitAutograd")
LIBRARY.impl(NAME, _batched, "FuncTorchBatched")
LIBRARY.impl(NAME, _below_autograd, "Autograd", with_keyset=True)
torch.library.register_fake(f"{NAMESPACE}::{NAME}", _fake, lib=LIBRARY)

running_update_ = getattr(torch.ops.musigma, NAME).default
"""(running_mean!, running_var!, num_batches_tracked!, count, mean, m2, momentum) -> nothing."""
running_update_.__doc__ = reference.__doc__
