"""Which code runs an op: torch's own kernels, or musigma's; the one place where that is decided."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor

from musigma.ops._define import OPS

Mode = Literal["auto", "off", "reference"]
VARIABLE = "MUSIGMA_KERNELS"


@dataclass(frozen=True)
class Kernel:
    """What runs one op, and why."""

    op: str
    runs: str
    reason: str


def _from_environment() -> Mode:
    value = os.environ.get(VARIABLE, "auto").lower()
    if value not in get_args(Mode):
        raise ValueError(f"{VARIABLE} must be one of {', '.join(get_args(Mode))}; got {value!r}")
    return value  # type: ignore[return-value]  # narrowed by the line above


_mode: Mode = _from_environment()  # a plain global: torch.compile guards on it, where a ContextVar breaks


@contextlib.contextmanager
def use_kernels(mode: Mode) -> Iterator[None]:
    """Choose what runs inside this block: ``"auto"``, ``"off"`` or ``"reference"``.

    ``"auto"`` takes musigma's kernel where there is one and torch's where there is none, ``"off"`` always
    torch's, ``"reference"`` the readable float64 reference of every op: slow, and exact, which tells a
    numerical fault of a kernel from one of the model. The environment variable ``MUSIGMA_KERNELS`` sets the
    mode of the whole process.

    Args:
        mode: one of the three.

    Raises:
        ValueError: another mode.

    Example:
        >>> import torch, musigma as ms
        >>> x = torch.tensor([[1e4, 1e4 + 1e-2]])
        >>> with ms.ops.use_kernels("reference"):
        ...     y = ms.functional.layer_norm(x, (2,))
        >>> bool((y.double() - torch.nn.functional.layer_norm(x.double(), (2,))).abs().max() < 1e-6)
        True
    """
    if mode not in get_args(Mode):
        raise ValueError(f"mode must be one of {', '.join(get_args(Mode))}; got {mode!r}")
    global _mode
    before, _mode = _mode, mode
    try:
        yield
    finally:
        _mode = before


def selected(op: str, x: Tensor) -> bool:
    """Whether a call of `op` on `x` goes to the op; if not, torch.nn.functional's own kernel serves it."""
    return _mode == "reference"


def kernels() -> list[Kernel]:
    """What runs each op in this process, and why; ``musigma env`` prints it.

    Example:
        >>> import musigma as ms
        >>> [k.op for k in ms.ops.kernels()]
        ['affine', 'group_norm', 'moments', 'row_norm']
    """
    if _mode == "reference":
        return [Kernel(name, "reference", f"{VARIABLE} asks for it") for name in sorted(OPS)]
    # `moments` and `affine` have no counterpart in torch: whoever calls them gets the reference.
    without_peer = {"moments", "affine"}
    return [
        Kernel(name, "reference" if name in without_peer else "torch", "no native kernel is built")
        for name in sorted(OPS)
    ]
