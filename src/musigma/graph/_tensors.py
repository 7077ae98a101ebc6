"""Finding the tensors in what a call takes and gives."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


def named_tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor in `value` with the expression that reaches it from `name`.

    Looks into lists, tuples, named tuples, mappings and dataclasses. Other objects are left alone:
    what their attributes mean is not ours to guess.
    """
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from named_tensors(item, f"{name}[{key!r}]" if name else str(key))
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        for field in value._fields:
            yield from named_tensors(getattr(value, field), f"{name}.{field}" if name else field)
    elif isinstance(value, list | tuple | set | frozenset):
        for index, item in enumerate(value):
            yield from named_tensors(item, f"{name}[{index}]" if name else str(index))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            item = getattr(value, field.name, None)
            yield from named_tensors(item, f"{name}.{field.name}" if name else field.name)
    elif isinstance(value, slice):
        yield from named_tensors((value.start, value.stop, value.step), name)


def tensors(value: Any) -> list[Tensor]:
    """Every tensor in `value`, in order."""
    return [tensor for _, tensor in named_tensors(value)]


_PLAIN = (
    bool, int, float, complex, str, type(None), type(Ellipsis),
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip


def is_plain(value: Any) -> bool:
    """Whether `value` is data that can be kept when the tensors are gone."""
    if isinstance(value, _PLAIN):
        return True
    if isinstance(value, slice):
        return all(map(is_plain, (value.start, value.stop, value.step)))
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return isinstance(value, dict) and all(map(is_plain, value.values()))
