"""The memory of large results: what the native kernels keep of it for the next call, and how to get it back.

Past a few megabytes malloc maps every new block afresh, the first touch faults it in page by page, and
freeing unmaps it: together more than the arithmetic of a normalization. So freed results of 1 MB and more are
kept, up to a limit, and given out again; the longest idle goes first.
"""

from __future__ import annotations

import os

from musigma.ops._kernels import extension

VARIABLE = "MUSIGMA_CACHE_MB"
MB = 1 << 20
# What one block of a Transformer or a ResNet frees at once at the sizes that a CPU trains: of an
# add_layer_norm at 2048 × 4096 in float32, y, the sum and the gradient are 96 MB.
DEFAULT = 256


def memory_cached() -> int:
    """How many bytes of freed results are kept for the next call; 0 without native kernels.

    Example:
        >>> import musigma as ms
        >>> ms.ops.empty_cache()
        >>> ms.ops.memory_cached()
        0
    """
    native = extension()
    return 0 if native is None else int(native.memory_cached())


def empty_cache() -> None:
    """Give the memory of freed results back to the system; tensors that are alive keep theirs.

    Example:
        >>> import musigma as ms
        >>> ms.ops.empty_cache()
    """
    native = extension()
    if native is not None:
        native.empty_cache()


def set_cache_limit(limit: int) -> None:
    """Choose how much memory of freed results may be kept; what is above it is given back at once.

    The environment variable ``MUSIGMA_CACHE_MB`` sets the limit a process starts with, in megabytes.

    Args:
        limit: in bytes; 256 MB at the start, 0 keeps nothing.

    Raises:
        ValueError: no number of bytes.

    Example:
        >>> import musigma as ms
        >>> ms.ops.set_cache_limit(0)  # every large result is allocated anew
        >>> ms.ops.set_cache_limit(256 << 20)
    """
    if isinstance(limit, bool) or not isinstance(limit, int) or not 0 <= limit < 1 << 63:
        raise ValueError(f"the limit must be a number of bytes, 0 for none; got {limit!r}")
    native = extension()
    if native is not None:
        native.set_cache_limit(limit)


def _from_environment() -> int:
    value = os.environ.get(VARIABLE, str(DEFAULT))
    if not (value.isascii() and value.isdecimal()):
        raise ValueError(f"{VARIABLE} must be a whole number of megabytes, 0 for none; got {value!r}")
    return int(value) * MB


set_cache_limit(_from_environment())
