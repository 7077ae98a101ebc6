"""RMSNorm: LayerNorm without centering."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from musigma.functional import rms_norm
from musigma.nn._sizes import check_normalized_shape


class RMSNorm(torch.nn.RMSNorm):
    """Scale each example's features to root mean square 1: `torch.nn.RMSNorm`, through `musigma.functional`.

        y = x / √(mean(x²) + eps) · weight,    mean(x²) over `normalized_shape`

    Args:
        normalized_shape: sizes of the last dims, or the size of the last dim.
        eps: added to the mean square, in units of input²; None is 1.19e-7, float32's machine epsilon,
            whatever the dtype of the input. (torch takes 2.2e-16 for float64.)
        elementwise_affine: whether a weight of shape `normalized_shape` is learned.
        device: where the weight is made.
        dtype: of the weight; the result has the input's dtype whatever it is.

    Example:
        >>> import torch, musigma as ms
        >>> ms.nn.RMSNorm(2)(torch.tensor([[3.0, 4.0]])).detach()
        tensor([[0.8485, 1.1314]])

    References:
        Zhang & Sennrich 2019, "Root Mean Square Layer Normalization", equation 4.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_normalized_shape(normalized_shape)
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)  # type: ignore[arg-type]  # torch's annotation knows lists only

    def forward(self, x: Tensor, *, activation: str | None = None) -> Tensor:
        """The input scaled.

        Args:
            x: (*batch, *normalized_shape).
            activation: applied to the result, as in `musigma.functional.rms_norm`.

        Returns:
            (*batch, *normalized_shape), in the input's dtype, channels last where the input is.
        """
        return rms_norm(x, self.normalized_shape, self.weight, self.eps, activation=activation)
