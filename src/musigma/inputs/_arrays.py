"""What counts as an array, and how any of them becomes blocks of numbers torch can take."""

from __future__ import annotations

import datetime
import numbers
from collections.abc import Iterator
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Values in a block: 8 MiB of float64, so that memory stays constant and a block stays near the cache.
BLOCK_VALUES = 2**20


@dataclass(frozen=True, eq=False)
class Data:
    """A tensor or a NumPy array of real numbers, with the names of its columns if it had any."""

    array: Tensor | NDArray[Any]
    columns: list[str] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.array.shape)

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Slices of the first axis and what stands there, as tensors of at most about BLOCK_VALUES values.

        A NumPy block is a copy: torch takes no foreign byte order, negative stride or read-only memory, and
        a memory map must not be read whole.
        """
        rows = len(self.array)
        step = max(1, BLOCK_VALUES // max(1, int(np.prod(self.shape[1:]))))
        for start in range(0, rows, step):
            part = slice(start, min(start + step, rows))
            yield part, self.block(part)

    def block(self, part: slice | EllipsisType) -> Tensor:
        """What stands at `part` of the first axis (`...` for all), as a tensor."""
        if isinstance(self.array, Tensor):
            return self.array[part]
        values = np.array(
            self.array[part], dtype=_native(self.array.dtype), order="C", copy=True, subok=False
        )
        return torch.from_numpy(values)


def _native(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The type torch reads: this machine's byte order, and float64 for long double."""
    if dtype.kind == "f" and dtype.itemsize > 8:
        return np.dtype(np.float64)
    return dtype.newbyteorder("=")


def is_array(x: object) -> bool:
    """Whether x is one array: a tensor, anything NumPy views as one, a number, nested rows of numbers."""
    if isinstance(x, Tensor) or hasattr(x, "__array__"):
        return True
    if isinstance(x, (str, bytes, type(None))):
        return False
    while isinstance(x, (list, tuple)):
        if not x:
            return True
        if any(isinstance(row, Tensor) or hasattr(row, "shape") or isinstance(row, dict) for row in x):
            return any(getattr(row, "shape", None) == () for row in x)  # a row of NumPy scalars is an array
        x = x[0]
    return isinstance(x, (numbers.Number, str, bytes, type(None)))


def as_data(x: object) -> Data:
    """x as a tensor or NumPy array of real numbers.

    Raises:
        TypeError: it holds objects, or its storage is sparse, quantized, nested or on "meta".
        ValueError: it holds complex numbers, strings or dates (scikit-learn's class for these).
    """
    if isinstance(x, Tensor):
        return Data(_real_tensor(x))
    if hasattr(x, "tocsr"):
        raise TypeError("a sparse matrix has no place for centered values; pass x.toarray()")
    if not is_array(x):
        raise TypeError(
            f"expected one array of numbers, got {type(x).__name__}; fit() takes an iterable of batches, "
            "partial_fit() one batch of it, transform() one array"
        )
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError("a masked array would lose its mask; pass x.filled(np.nan), or mask=~x.mask")
    names = getattr(x, "columns", None)
    columns = None if names is None else [str(name) for name in names]
    return Data(_real_array(np.asarray(x), columns), columns)


def _real_tensor(x: Tensor) -> Tensor:
    if x.is_complex():
        raise ValueError(f"Complex data not supported: got {x.dtype}; pass x.real and x.imag as features")
    for bad, what, fix in (
        (x.is_quantized, "quantized", "x.dequantize()"),
        (x.is_nested, "nested", "one tensor at a time to partial_fit"),
        (x.layout != torch.strided and not x.is_nested, "sparse", "x.to_dense()"),
        (x.is_meta, "meta", "a tensor with values"),
    ):
        if bad:
            raise TypeError(f"a {what} tensor can't be standardized; pass {fix}")
    # MPS has no float64, in which every sum is made; 8-bit floats have next to no arithmetic
    x = x.cpu() if x.device.type == "mps" else x
    return x.to(torch.float32) if x.is_floating_point() and x.dtype.itemsize == 1 else x


def _real_array(x: NDArray[Any], columns: list[str] | None) -> NDArray[Any]:
    kind = x.dtype.kind
    if kind in "biuf":
        return x
    if kind == "O":
        return _from_objects(x, columns)
    if kind == "c":
        raise ValueError(f"Complex data not supported: got {x.dtype}; pass x.real and x.imag as features")
    if kind in "USTMm":
        what = "dates or durations" if kind in "Mm" else "strings"
        raise ValueError(f"expected numbers, got {what} ({x.dtype}); convert them to numbers first")
    raise TypeError(f"expected numbers, got dtype {x.dtype}")


def _from_objects(x: NDArray[Any], columns: list[str] | None) -> NDArray[Any]:
    """Numbers that came as Python objects, None as NaN; whatever else is there is refused by its column."""
    out = np.empty(x.shape, dtype=np.float64)
    for index in np.ndindex(x.shape):
        value = x[index]
        if value is None:
            out[index] = np.nan
        elif isinstance(value, (numbers.Real, np.bool_)):
            out[index] = float(value)
        else:
            at = index[1] if len(index) > 1 else index[0] if index else 0
            name = f"feature {at}" if columns is None else f"column {columns[at]!r}"
            text = isinstance(value, (str, bytes, datetime.date, datetime.timedelta))
            error = ValueError if text else TypeError
            raise error(
                f"every value must be a number: {name} holds a {type(value).__name__} ({value!r:.40}); "
                "encode it or leave the column out"
            )
    return out
