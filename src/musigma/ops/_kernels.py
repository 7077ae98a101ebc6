"""Which code runs an op: torch's own kernels, or musigma's; the one place where that is decided."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from musigma._errors import MusigmaWarning
from musigma.ops._add_row_norm.op import add_row_norm
from musigma.ops._affine.op import affine
from musigma.ops._batch_norm.op import batch_norm
from musigma.ops._define import ENTRIES, OPS, leaves_home
from musigma.ops._group_norm.op import group_norm
from musigma.ops._moments.op import moments
from musigma.ops._native.load import Native, load
from musigma.ops._row_norm.op import row_norm
from musigma.ops._running.op import running_update_

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
# Defined before the extension is loaded, which is then held to these schemas, and not they to its own.
_DEFINED = (add_row_norm, affine, batch_norm, group_norm, moments, row_norm, running_update_)
_native: Native = load()
_tell: bool = _native.broken  # whether the first call has to say that it does not get what was installed
_WRITTEN = frozenset({"add_row_norm", "affine", "batch_norm", "group_norm", "moments", "row_norm"})
_NATIVE = _WRITTEN if _native.module is not None else frozenset[str]()
_DTYPES = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16})
_PLAIN = (Tensor, torch.nn.Parameter)
_INSIDE = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))

for _name in _NATIVE:
    if hasattr(_native.module, _name):
        ENTRIES[_name] = getattr(_native.module, _name)
if _native.module is not None:
    _native.module.enable(_mode == "auto")


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
    before = _mode
    _set(mode)
    try:
        yield
    finally:
        _set(before)


def _set(mode: Mode) -> None:
    global _mode
    _mode = mode
    if _native.module is not None:
        _native.module.enable(mode == "auto")


def selected(op: str, x: Tensor) -> bool:
    """Whether a call of `op` on `x` goes to the op; if not, torch.nn.functional's own kernel serves it.

    It does in reference mode, and where a native kernel takes `x`: a plain, dense CPU tensor of a floating
    dtype. What is exported or traced has to run without musigma, so none of its ops may enter it.
    """
    if _mode != "auto":
        return _mode == "reference"
    if _tell and x.device.type == "cpu":
        _tell_once()
    if op not in _NATIVE:
        return False
    # Compiled models keep the op whole: what inductor makes of torch's function instead was measured to save
    # a few µs where the call is all the cost, and to take up to 7 times as long (docs/guides/kernels.md).
    # What _takes asks takes Python as long as a small tensor's arithmetic; dynamo can't look into C.
    return _takes(x) if torch.compiler.is_compiling() else _native.module.takes(x)  # type: ignore[union-attr]


def _takes(x: Tensor) -> bool:
    return (
        x.device.type == "cpu"
        and x.dtype in _DTYPES
        and type(x) in _PLAIN
        and x.layout is torch.strided
        and not leaves_home()
    )


def direct(function: str) -> Callable[..., Any]:
    """The whole of a function of ``ms.functional`` in one step, for calls with nothing unusual about them.

    Looking at arguments one by one takes Python as long as a small tensor's arithmetic. The step returns None
    for whatever it does not take: wrong arguments, other devices and tensor types, masks, traces, kernels
    switched off. Dynamo can't look into it: ask ``torch.compiler.is_compiling()`` first.

    Args:
        function: the name in ``ms.functional``.

    Returns:
        a function of all of its arguments, positionally, that returns what it returns, or None.
    """
    return getattr(_native.module, f"call_{function}", _not_taken)


def _not_taken(*_: object) -> None:
    return None


def extension() -> ModuleType | None:
    """The compiled kernels' module; None where there is none."""
    return _native.module


def _tell_once() -> None:
    global _tell
    if torch.compiler.is_compiling():
        return
    _tell = False
    warnings.warn(
        f"torch's own kernels run instead of musigma's: {_native.reason}",
        MusigmaWarning,
        stacklevel=_users_level(),
    )


def _users_level() -> int:
    """How many frames up from the one that asks the first stands that is neither torch's nor ours."""
    frame: FrameType | None = sys._getframe(1)
    level = 1
    while frame is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame, level = frame.f_back, level + 1
    return level


def kernels() -> list[Kernel]:
    """What runs each op in this process, and why; ``musigma env`` prints it.

    Example:
        >>> import musigma as ms
        >>> [k.op for k in ms.ops.kernels()]
        ['add_row_norm', 'affine', 'batch_norm', 'group_norm', 'moments', 'row_norm']
    """
    if _mode == "reference":
        return [Kernel(name, "reference", f"{VARIABLE} asks for it") for name in sorted(OPS)]
    # `moments` and `affine` have no counterpart in torch: whoever calls them gets the reference.
    without_peer = {"moments", "affine"}
    off = f"switched off by {VARIABLE} or use_kernels" if _mode == "off" else None
    missing = "no native kernel is written" if _native.module is not None else _native.reason
    return [
        Kernel(name, "native", f"{_native.reason}; on CPU tensors")
        if name in _NATIVE and not off
        else Kernel(name, "reference" if name in without_peer else "torch", off or missing)
        for name in sorted(OPS)
    ]
