"""What the references share: the accumulator type, layouts, and how a per-channel vector meets its tensor."""

from __future__ import annotations

import torch
from torch import Tensor


def accumulator(x: Tensor) -> torch.dtype:
    """The type statistics are computed and kept in: float64, or float32 where the device has none."""
    return torch.float32 if x.device.type == "mps" else torch.float64


def memory_format(x: Tensor) -> torch.memory_format:
    """The memory format a result takes from its input: channels last if the input is, else contiguous."""
    if torch._C._are_functorch_transforms_active():
        return torch.contiguous_format  # under vmap the layout of one example can't be asked for
    for dim, last in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if x.dim() == dim and not x.is_contiguous() and x.is_contiguous(memory_format=last):
            return last
    return torch.contiguous_format


def like(value: Tensor, x: Tensor) -> Tensor:
    """`value` in x's dtype and memory format."""
    return value.to(x.dtype).contiguous(memory_format=memory_format(x))


def empty_like(x: Tensor) -> Tensor:
    """What `like` returns, unwritten."""
    return torch.empty_like(x, memory_format=memory_format(x))


def parameter_dtype(x: Tensor, parameter: Tensor | None) -> torch.dtype:
    """The dtype of a parameter's gradient: the parameter's own, or at least float32 where there is none."""
    if parameter is not None:
        return parameter.dtype
    return torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype


def per_channel(v: Tensor, x: Tensor) -> Tensor:
    """A vector over x's channels (dim 1), shaped to broadcast against x: (n, c, *spatial)."""
    return v.reshape(-1, *[1] * (x.dim() - 2))


def all_but_channels(x: Tensor) -> list[int]:
    """The dims of x that one channel's values run along."""
    return [0, *range(2, x.dim())]


def check_add(x: Tensor, add: Tensor | None) -> None:
    """What is added is like x.

    Raises:
        RuntimeError: it has another shape or dtype.
    """
    if add is not None and (add.shape != x.shape or add.dtype is not x.dtype):
        raise RuntimeError(
            f"add must be like x, {x.dtype} of shape {tuple(x.shape)}; got {add.dtype} of shape "
            f"{tuple(add.shape)}"
        )


def none(x: Tensor) -> Tensor:
    """The empty tensor that stands for a gradient nobody asked for."""
    return x.new_empty(0)


def first(rows: Tensor) -> Tensor:
    """A constant near the values of each row, (*rows, 1): its first value, or 0 for an empty row.

    Subtracting it before anything is summed is exact near the mean (Sterbenz), makes a constant row exactly
    zero, and cancels out of every derivative, which is why it is detached.
    """
    if rows.shape[-1] == 0:
        return rows.new_zeros((*rows.shape[:-1], 1))
    return rows[..., :1].detach()
