"""Sizes that a layer is built with: whole numbers, refused before anything is allocated."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any


def check_size(name: str, size: Any) -> None:
    """A layer's size is a whole number and not negative; 0 is an empty layer, as in torch.

    Raises:
        TypeError: it is no whole number.
        RuntimeError: it is negative; torch's class, and the words of its `empty`.
    """
    try:
        whole = operator.index(size)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, got {size!r} ({type(size).__name__})") from None
    if whole < 0:
        raise RuntimeError(
            f"Trying to create tensor with negative dimension {whole}: {name} must not be negative, got "
            f"{size}; it is the size of the dim that is normalized"
        )


def check_normalized_shape(normalized_shape: Any) -> None:
    """`normalized_shape` is one size or several.

    Raises:
        TypeError: it is neither.
        RuntimeError: a size is negative.
    """
    if isinstance(normalized_shape, str) or not isinstance(normalized_shape, Iterable):
        check_size("normalized_shape", normalized_shape)
        return
    for position, size in enumerate(normalized_shape):
        check_size(f"normalized_shape[{position}]", size)
