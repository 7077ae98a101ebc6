"""What is left of a normalization whose statistics are fixed: a scale and a shift."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from musigma.nn._sizes import check_normalized_shape


class Affine(nn.Module):
    """A learned scale and shift per channel or feature.

        y = x · weight + bias

    Args:
        shape: of weight and bias.
        dim: where in the input that shape begins: 1 for the channels of (n, c, *spatial), −1 for the last
            dim.
        bias: whether there is a bias.
        device: where the parameters are made.
        dtype: of the parameters.

    Example:
        >>> import torch, musigma as ms
        >>> layer = ms.nn.Affine(2)
        >>> layer(torch.tensor([[[1.0], [2.0]]])).shape
        torch.Size([1, 2, 1])

    References:
        Touvron et al. 2021, "ResMLP", section 2.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self,
        shape: int | Sequence[int],
        dim: int = 1,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_normalized_shape(shape)
        super().__init__()
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        self.dim = dim
        self.weight = nn.Parameter(torch.ones(sizes, device=device, dtype=dtype))
        self.register_parameter("bias", nn.Parameter(torch.zeros_like(self.weight)) if bias else None)

    def forward(self, input: Tensor) -> Tensor:
        """The input scaled and shifted.

        Args:
            input: holds `shape` from `dim` on.

        Returns:
            like the input, in its dtype.

        Raises:
            ValueError: the input's sizes there are others.
        """
        shape = tuple(self.weight.shape)
        start = self.dim % max(input.dim(), 1)
        if tuple(input.shape[start : start + len(shape)]) != shape:
            raise ValueError(
                f"input must have sizes {shape} from dim {self.dim} on, got shape {tuple(input.shape)}"
            )
        after = [1] * (input.dim() - start - len(shape))
        y = input * self.weight.reshape(*shape, *after)
        if self.bias is not None:
            y = y + self.bias.reshape(*shape, *after)
        return y.to(input.dtype)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, dim={self.dim}, bias={self.bias is not None}"
