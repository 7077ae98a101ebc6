"""Telling what function a piece of arithmetic computes, by its values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

Elementwise = Callable[[Tensor], Tensor]

# Where activations differ from each other: the bend at 0, the flat parts, and the slopes between.
_GRID: Final = tuple(i / 8 for i in range(-64, 65))

_KNOWN: Final[dict[str, Elementwise]] = {
    "relu": F.relu,
    "relu6": F.relu6,
    "square": torch.square,
    "squared_relu": lambda x: F.relu(x) ** 2,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": F.silu,
    "mish": F.mish,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "softplus": F.softplus,
    "softsign": F.softsign,
    "elu": F.elu,
    "selu": F.selu,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "hardtanh": F.hardtanh,
}


def recognize(function: Elementwise) -> tuple[str, dict[str, object]] | None:
    """The name and the numbers of the activation that a function equals, None if it is none we know.

    Example:
        >>> recognize(lambda x: x * torch.sigmoid(x))
        ('silu', {})
        >>> recognize(lambda x: torch.maximum(x, 0.25 * x))
        ('leaky_relu', {'negative_slope': 0.25})
    """
    values, grid = _values(function), _grid()
    if values is None:
        return None
    for name, function_of in _KNOWN.items():
        # Constants such as 0.044715 are written with five digits, which is closer than 1e-6 here.
        if torch.allclose(values, function_of(grid), rtol=0, atol=1e-6):
            return name, {}
    slope = values[0] / grid[0]
    if torch.allclose(values, torch.where(grid > 0, grid, slope * grid), rtol=0, atol=1e-6):
        return "leaky_relu", {"negative_slope": round(float(slope), 9)}
    return None


def known(name: str) -> Elementwise | None:
    """The function of an activation's name."""
    return _KNOWN.get(name)


def _grid() -> Tensor:
    return torch.tensor(_GRID, dtype=torch.float64, device="cpu")


def bends(function: Elementwise) -> bool:
    """Whether a function is more than a scale and a shift (and gives numbers, not a mask)."""
    values = _values(function)
    if values is None:
        return False
    bend = values[2:] - 2 * values[1:-1] + values[:-2]
    # The second differences of a line are rounding: a few units of its largest value.
    return not bool(bend.abs().max() <= 8 * torch.finfo(values.dtype).eps * values.abs().max())


def _values(function: Elementwise) -> Tensor | None:
    try:
        values = function(_grid())
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        return None  # the op refuses float64 or a vector: then its values tell nothing
    return values if values.dtype == torch.float64 else None
