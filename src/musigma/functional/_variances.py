"""Running variances that can't be: found once per change of the tensor, not once per call."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

# Looking at 16 variances costs a microsecond, a sixth of the call that uses them; asking whether they have
# changed since they were looked at, a fifth of that. Weak references alone: an id can be given out again.
_seen: dict[int, tuple[weakref.ref[Tensor], int]] = {}

_tolerant = ContextVar("musigma_tolerant_of_variances", default=False)


@contextmanager
def impossible_variances_pass() -> Iterator[None]:
    """Let a model run that has impossible variances: whoever finds or mends them has to."""
    token = _tolerant.set(True)
    try:
        yield
    finally:
        _tolerant.reset(token)


def check_variances(var: Tensor) -> None:
    """No channel's variance is negative, where that can be looked at without stopping a device or a trace.

    Below −eps the output would be NaN without a word, above it the variance is wrong all the same.

    Raises:
        ValueError: which channels' are.
    """
    if torch.compiler.is_compiling():
        return
    seen = _seen.get(id(var))
    if seen is not None and seen[0]() is var and seen[1] == var._version:
        return
    _look_at(var)


def _look_at(var: Tensor) -> None:
    if type(var) is not Tensor or var.device.type != "cpu" or _tolerant.get() or _somebody_watches():
        return
    with torch._C.DisableTorchFunction():
        lowest = var.min().item() if var.numel() else 0.0
        if lowest < 0 or lowest != lowest:  # a NaN hides what else there is
            negative = (var < 0).nonzero().flatten().tolist()
            if negative:
                raise ValueError(
                    f"running_var must not be negative, got {var[negative].min().item():.4g} (channels "
                    f"{some(negative)}); whoever wrote it may have subtracted eps. Add it again, or take the "
                    "statistics anew: ms.surgery.recalibrate"
                )
    if not var.is_inference():  # those count no versions
        key = id(var)
        _seen[key] = weakref.ref(var, lambda _: _seen.pop(key, None)), var._version


def _somebody_watches() -> bool:
    """Whether a trace, a transform or a dispatch mode would see us look."""
    return (
        torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._get_tracing_state() is not None
    )


def some(channels: list[int]) -> str:
    """The first few channels, for a message."""
    return ", ".join(map(str, channels[:8])) + (", …" if len(channels) > 8 else "")
