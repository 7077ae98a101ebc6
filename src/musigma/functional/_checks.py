"""What must hold before anything is computed: torch's exception classes and words, plus the fix."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

_TORCHS_NAMES = {
    torch.bool: "Bool",
    torch.uint8: "Byte",
    torch.int8: "Char",
    torch.int16: "Short",
    torch.int32: "Int",
    torch.int64: "Long",
    torch.uint16: "UInt16",
    torch.uint32: "UInt32",
    torch.uint64: "UInt64",
}


def refuse_input(function: str, x: Any) -> None:
    """Say why x can't be normalized; whoever asks has seen that it is no floating-point tensor.

    Complex tensors and objects that answer to torch's functions are left to those.

    Raises:
        TypeError: it is no tensor.
        NotImplementedError: it is a tensor of integers; torch's class, a RuntimeError, and its words.
    """
    if not isinstance(x, Tensor):
        if hasattr(type(x), "__torch_function__"):
            return
        fix = (
            "nothing came in; does the layer before return its result?" if x is None else "torch.as_tensor(x)"
        )
        raise TypeError(f"{function} normalizes a tensor, got {type(x).__module__}.{type(x).__name__}: {fix}")
    if x.dtype in _TORCHS_NAMES:
        raise NotImplementedError(
            f'"{function}" not implemented for {_TORCHS_NAMES[x.dtype]!r}: mean 0 and spread 1 need '
            f"fractions, and the input of shape {tuple(x.shape)} is {x.dtype}; convert it first, x.float()"
        )


def check_eps(function: str, eps: float, *, positive: bool = False) -> None:
    """`eps` is a number, not negative, and in BatchNorm's training not zero."""
    try:
        fits = eps > 0.0 if positive else eps >= 0.0  # NaN is neither
    except TypeError:
        raise TypeError(f"{function} eps must be a number, but got {eps!r}; torch's is 1e-5") from None
    if not fits:
        wanted = "positive during training" if positive else "non-negative"
        raise ValueError(f"{function} eps must be {wanted}, but got {eps}; torch's is 1e-5")


def check_rows(
    function: str,
    x: Tensor,
    normalized_shape: tuple[int, ...],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> None:
    """The last dims of x are `normalized_shape`, which is also the shape of weight and bias."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        refuse_input(function, x)
    if not normalized_shape or x.shape[-len(normalized_shape) :] != normalized_shape:
        _refuse_rows(x, normalized_shape)
    if weight is not None and weight.shape != normalized_shape:
        _refuse_row_parameter("weight", weight, normalized_shape)
    if bias is not None and bias.shape != normalized_shape:
        _refuse_row_parameter("bias", bias, normalized_shape)
    if type(eps) is not float or not eps >= 0.0:
        check_eps(function, eps)


def _refuse_rows(x: Tensor, normalized_shape: tuple[int, ...]) -> None:
    wanted, got = list(normalized_shape), list(x.shape)
    if not normalized_shape:
        raise RuntimeError(
            "Expected normalized_shape to be at least 1-dimensional, i.e., containing at least one element, "
            f"but got normalized_shape = {wanted}; for the last dim pass ({got[-1] if got else 1},)"
        )
    expected = ", ".join(["*", *map(str, wanted)])
    if len(wanted) == 1 and len(got) > 2 and got[1] == wanted[0]:
        fix = f"dim 1 has size {wanted[0]}: for channels-first input use ms.nn.LayerNorm2d"
    else:
        fix = f"to normalize over the last dim pass ({got[-1] if got else 1},)"
    raise RuntimeError(
        f"Given normalized_shape={wanted}, expected input with shape [{expected}], "
        f"but got input of size{got}; {fix}"
    )


def _refuse_row_parameter(name: str, parameter: Tensor, normalized_shape: tuple[int, ...]) -> None:
    raise RuntimeError(
        f"Expected {name} to be of same shape as normalized_shape, but got {name} of shape "
        f"{list(parameter.shape)} and normalized_shape = {list(normalized_shape)}"
    )


def check_residual(x: Tensor, residual: Tensor) -> None:
    """x and residual are added value by value: one shape, one dtype."""
    for term in (x, residual):
        if not isinstance(term, Tensor):
            refuse_input("add_norm", term)
    if x.shape != residual.shape or x.dtype is not residual.dtype:
        raise ValueError(
            "x and residual must have the same shape and dtype, got "
            f"{tuple(x.shape)} {x.dtype} and {tuple(residual.shape)} {residual.dtype}"
        )


def check_channels(function: str, x: Tensor, **vectors: Tensor | None) -> None:
    """x is (n, c, *spatial), and every vector given is (c,)."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        refuse_input(function, x)
    if x.dim() < 2:
        raise IndexError(
            f"{function}'s input must be (n, c, *spatial), at least 2-D; got shape {tuple(x.shape)}"
        )
    channels = x.shape[1]
    for name, vector in vectors.items():
        if vector is not None and vector.shape != (channels,):
            raise RuntimeError(
                f"{name} should contain {channels} elements not {vector.numel()}: the input of shape "
                f"{tuple(x.shape)} has {channels} channels (dim 1), {name} has shape {tuple(vector.shape)}"
            )


def check_running(running_mean: Tensor | None, running_var: Tensor | None, needed: str) -> None:
    """Both running statistics are there or neither is, and there they must be where `needed` says why."""
    if (running_mean is None) != (running_var is None):
        raise ValueError("running_mean and running_var must either both be None or neither be None")
    if needed and running_mean is None:
        raise RuntimeError(needed)


def check_add(x: Tensor, add: Tensor) -> None:
    """`add` is added value by value."""
    if add.shape != x.shape:
        raise ValueError(f"add must have the input's shape {tuple(x.shape)}, got {tuple(add.shape)}")


def check_groups(x: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None) -> None:
    """x is (n, c, *spatial), the groups divide the channels, weight and bias are (c,)."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        refuse_input("group_norm", x)
    if x.dim() < 2:
        raise RuntimeError(f"Expected at least 2 dimensions for input tensor but received {x.dim()}")
    channels = x.shape[1]
    if num_groups < 1 or channels % num_groups:
        raise RuntimeError(
            "Expected number of channels in input to be divisible by num_groups, but got input of shape "
            f"{list(x.shape)} and num_groups={num_groups}; try {divisors(channels)}"
        )
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None and vector.shape != (channels,):
            raise RuntimeError(
                f"Expected {name} to be a vector of size equal to the number of channels in input, but got "
                f"{name} of shape {list(vector.shape)} and input of shape {list(x.shape)}"
            )


def divisors(n: int) -> str:
    """The numbers that divide n, in words: "1, 2, 5 or 10"."""
    small = [d for d in range(1, math.isqrt(max(n, 1)) + 1) if n % d == 0]
    found = sorted({*small, *(n // d for d in small)})
    words = [str(d) for d in found]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
