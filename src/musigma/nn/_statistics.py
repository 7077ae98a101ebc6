"""Running statistics that survive what happens to a model: casts, and other people's checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from musigma.functional._variances import some

_NAMES = ("running_mean", "running_var")


class KeepsStatistics(nn.Module):
    """Mixin: running_mean and running_var are never narrower than float32, and never impossible.

    In half precision a running average stops moving once an update is smaller than half a unit in its last
    place (momentum 0.001 leaves a variance at 2.0 where 4.0 is right), and a variance above 65504 is inf.
    So ``.half()``, ``.bfloat16()`` and ``.to(dtype)`` cast the parameters and leave the statistics float32;
    ``.double()`` widens both.
    """

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        # Module.__setattr__ comes through here too, and with it load_state_dict(assign=True).
        super().register_buffer(name, _widened(tensor) if name in _NAMES else tensor, persistent)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        statistics = [b for name in _NAMES if (b := self._buffers.get(name)) is not None]
        counter = self._buffers.get("num_batches_tracked")

        def keep(t: Tensor) -> Tensor:
            moved = fn(t)
            if t is counter:
                return t.to(moved.device) if moved.is_floating_point() else moved  # .type() casts all
            if _is_narrow(moved) and any(t is s for s in statistics):
                return t.to(device=moved.device, dtype=torch.float32)
            return moved

        return super()._apply(keep, recurse)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        problems = [
            f"{prefix}{name} {problem}"
            for name in _NAMES
            if (problem := _impossible(name, state_dict.get(f"{prefix}{name}")))
        ]
        if problems:
            error_msgs.extend(problems)
            return
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


def _is_narrow(t: Tensor) -> bool:
    return t.is_floating_point() and t.dtype.itemsize < torch.float32.itemsize


def _widened(t: Tensor | None) -> Tensor | None:
    return t.to(torch.float32) if t is not None and _is_narrow(t) else t


def _impossible(name: str, statistic: Any) -> str:
    """What is wrong with a running statistic, in words; nothing where it is fine or can't be looked at."""
    if not isinstance(statistic, Tensor) or statistic.is_meta or isinstance(statistic, FakeTensor):
        return ""
    values = statistic.detach().flatten()
    channels = (~values.isfinite()).nonzero().flatten().tolist()
    if channels:
        return (
            f"must be finite, got {values[channels[0]].item()} (channels {some(channels)}); it was saved so. "
            "Nothing of this layer was loaded: take an earlier checkpoint, or write mean 0 and variance 1 "
            "there and have the statistics taken anew by ms.surgery.recalibrate"
        )
    channels = (values < 0).nonzero().flatten().tolist() if name == "running_var" else []
    if not channels:
        return ""
    return (
        f"must not be negative, got {values.min().item():.4g} (channels {some(channels)}); whoever wrote it "
        "may have subtracted eps. Nothing of this layer was loaded: mend the checkpoint, e.g. by adding it "
        "again"
    )


def nonfinite_statistics(model: nn.Module) -> dict[str, list[int]]:
    """The running statistics of a model that are inf or NaN: buffer name to channel indices.

    musigma's own layers skip a channel whose batch statistics are not finite; torch's take them in for good.

    Args:
        model: any module.

    Returns:
        for each buffer called running_mean or running_var with a bad entry, its full name and the indices.

    Example:
        >>> import torch, musigma as ms
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
        >>> _ = model[1](torch.tensor([[0.0, 1.0], [0.0, float("inf")]]))
        >>> ms.nn.nonfinite_statistics(model)
        {'1.running_mean': [1], '1.running_var': [1]}
    """
    return {
        name: bad
        for name, buffer in model.named_buffers()
        if name.rpartition(".")[2] in _NAMES and not buffer.is_meta
        if (bad := (~buffer.isfinite()).flatten().nonzero().flatten().tolist())
    }
