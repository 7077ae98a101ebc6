"""A normalization and an activation, in either order."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from torch import Tensor, nn

from musigma.ops import activate, check_activation


class NormAct(nn.Module):
    """A normalization before its activation, or after it: the question the notes leave open, as a switch.

        y = activation(norm(x))    (norm_first, as in the BatchNorm paper)
        y = norm(activation(x))    (else)

    Before it, the activation sees values of mean bias and spread weight, whatever came in. After it, the next
    layer does. With ``norm_first`` and a layer of ``ms.nn``, both are one call that a fused kernel can serve.

    Args:
        norm: the normalization.
        activation: ``"relu"``, ``"silu"``, ``"gelu"`` (exact), ``"gelu_tanh"``, or any function or module.
        norm_first: which of the two comes first.

    Raises:
        ValueError: an unknown activation's name.

    Example:
        >>> import torch, musigma as ms
        >>> x = torch.tensor([[-1.0], [0.0], [4.0]])
        >>> norm = ms.nn.BatchNorm1d(1, affine=False)
        >>> ms.nn.NormAct(norm, "relu")(x).flatten()
        tensor([0.0000, 0.0000, 1.3887])
        >>> ms.nn.NormAct(norm, "relu", norm_first=False)(x).flatten()
        tensor([-0.7071, -0.7071,  1.4142])

    References:
        Ioffe & Szegedy 2015, "Batch Normalization", section 3.2, on the order.
    """

    def __init__(
        self,
        norm: nn.Module,
        activation: str | nn.Module | Callable[[Tensor], Tensor] = "relu",
        *,
        norm_first: bool = True,
    ) -> None:
        super().__init__()
        if isinstance(activation, str):
            check_activation(activation)
        self.norm = norm
        self.activation = activation
        self.norm_first = norm_first
        takes = "activation" in inspect.signature(norm.forward).parameters
        self._fused = norm_first and takes and isinstance(activation, str)

    def forward(self, x: Tensor) -> Tensor:
        """Both, in their order.

        Args:
            x: whatever the norm takes.

        Returns:
            like x.
        """
        if self._fused:
            return self.norm(x, activation=self.activation)
        if self.norm_first:
            return self._activate(self.norm(x))
        return self.norm(self._activate(x))

    def _activate(self, x: Tensor) -> Tensor:
        if isinstance(self.activation, str):
            return activate(x, self.activation)
        return self.activation(x)

    def extra_repr(self) -> str:
        shown = "" if isinstance(self.activation, nn.Module) else f"{self.activation!r}, "
        return f"{shown}norm_first={self.norm_first}"
