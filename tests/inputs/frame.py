"""A data frame for tests, without a library of them."""

from __future__ import annotations

from typing import Any

import numpy as np


class Frame:
    """As much of a data frame as NumPy and we look at."""

    def __init__(self, columns: dict[str, list[Any]]) -> None:
        self.columns = list(columns)
        self._values = np.array(list(columns.values()), dtype=object).T

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self._values, dtype=dtype)
