"""Running statistics that can't be, or aren't finite: found once per change of the tensor, not per call."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from musigma._errors import MusigmaWarning
from musigma.functional._single import caller

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


def check_variances(var: Tensor, mean: Tensor | None = None) -> None:
    """No channel's variance is negative, where that can be looked at without stopping a device or a trace.

    Below −eps the output would be NaN without a word, above it the variance is wrong all the same. What is
    not finite (sums that overflowed) is only told of: torch's layers run on with it.

    Raises:
        ValueError: which channels' are.
    """
    if torch.compiler.is_compiling():
        return
    if not _is_known(var):
        _look_at(var, "running_var")
    if mean is not None and not _is_known(mean):
        _look_at(mean, "running_mean")


def _is_known(t: Tensor) -> bool:
    seen = _seen.get(id(t))
    return seen is not None and seen[0]() is t and seen[1] == t._version


def _look_at(t: Tensor, name: str) -> None:
    if type(t) is not Tensor or t.device.type != "cpu" or _tolerant.get() or _somebody_watches():
        return
    if not t.is_floating_point():
        return  # refused where it is used
    with torch._C.DisableTorchFunction():
        lowest = t.min().item() if t.numel() else 0.0
        if name == "running_var" and (lowest < 0 or lowest != lowest):  # a NaN hides what else there is
            negative = (t < 0).nonzero().flatten().tolist()
            if negative:
                raise ValueError(
                    f"running_var must not be negative, got {t[negative].min().item():.4g} (channels "
                    f"{some(negative)}); whoever wrote it may have subtracted eps. Add it again, or take the "
                    "statistics anew: ms.surgery.recalibrate"
                )
        # one sum of finite values that overflows is looked at again
        if not math.isfinite(t.sum().item()):
            _tell(name, t)
    if not t.is_inference():  # those count no versions
        key = id(t)
        _seen[key] = weakref.ref(t, lambda _: _seen.pop(key, None)), t._version


def _tell(name: str, t: Tensor) -> None:
    channels = (~t.isfinite()).nonzero().flatten().tolist()
    if channels:
        warnings.warn(
            f"{name} is not finite: {t[channels[0]].item()} (channels {some(channels)}). An infinite "
            "variance leaves a channel its bias alone, anything else makes it NaN. Its statistics overflowed "
            "or were written so: scale the input down and take them anew with ms.surgery.recalibrate",
            MusigmaWarning,
            stacklevel=caller()[1] + 1,
        )


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
