"""The activations a normalization can apply to its own result."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

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
