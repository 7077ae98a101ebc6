"""The activations an op can apply to its result: for the references, and by name for everybody."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}
"""Name to function; ``"gelu"`` is the exact one."""


def check_activation(activation: str | None) -> None:
    """Refuse an activation that no kernel knows.

    Raises:
        ValueError: another name than those of `ACTIVATIONS`.
    """
    if activation is not None and activation not in ACTIVATIONS:
        raise ValueError(
            f"activation must be None or one of {', '.join(map(repr, ACTIVATIONS))}; got {activation!r}. "
            "Apply any other function to the result, or wrap both in ms.nn.NormAct"
        )


def activate(y: Tensor, activation: str | None) -> Tensor:
    """The activation of y; y itself for None."""
    return y if activation is None else ACTIVATIONS[activation](y)


def slope(z: Tensor, activation: str) -> Tensor:
    """The derivative of an activation at z, itself differentiable.

    Clamped where it is 0 or 1 to the last place, so that no inf meets a 0 on the way.
    """
    if activation == "relu":
        return (z <= 0).logical_not().to(z.dtype)
    if activation == "silu":
        h = z.clamp(-1000, 1000)
        return torch.sigmoid(h) * (1 + h * torch.sigmoid(-h))
    h = z.clamp(-40, 40)
    if activation == "gelu":
        return 0.5 * torch.erfc(-h / math.sqrt(2)) + h * torch.exp(-0.5 * h * h) / math.sqrt(2 * math.pi)
    scale, cubic = 2 * math.sqrt(2 / math.pi), 0.044715  # z·½(1 + tanh u) = z·σ(2u)
    w, dw = scale * h * (1 + cubic * h * h), scale * (1 + 3 * cubic * h * h)
    return torch.sigmoid(w) * (1 + h * dw * torch.sigmoid(-w))
