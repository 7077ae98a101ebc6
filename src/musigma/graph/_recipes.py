"""Writing down elementwise ops so that they can be run again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from musigma.graph import _kinds as kinds
from musigma.graph._memory import Memory
from musigma.graph._nodes import UNKNOWN, Recipe, Slot, Source
from musigma.graph._tensors import is_plain


def recipe(
    op: str, target: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], memory: Memory
) -> Recipe | None:
    """The recipe of a call that is about to run; None for ops that are not elementwise."""
    of_two = op in ("max", "min") and len(args) > 1 and isinstance(args[1], Tensor)
    if not (op in kinds.ELEMENTWISE or of_two) or "out" in kwargs:
        return None
    operands: list[Source | float] = []

    def slot(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        operands.append(_operand(value, memory))
        return Slot(len(operands) - 1)

    kept = tuple(map(slot, args)), {name: slot(value) for name, value in kwargs.items()}
    plain = all(isinstance(value, Slot) or is_plain(value) for value in (*kept[0], *kept[1].values()))
    return Recipe(target, *kept, tuple(operands)) if plain else None


def _operand(tensor: Tensor, memory: Memory) -> Source | float:
    source = memory.source(tensor)
    # A lone number that the model keeps in a plain attribute is a constant, though of unknown source.
    if memory.is_live(source) and not (source is UNKNOWN and tensor.ndim == 0):
        return source
    number = _constant(tensor)
    return source if number is None else number


def _constant(tensor: Tensor) -> float | None:
    """The number that every element of a tensor holds."""
    if tensor.is_meta or not tensor.numel() or tensor.is_complex():
        return None
    values = tensor.detach().flatten()
    return float(values[0]) if bool((values == values[0]).all()) else None
