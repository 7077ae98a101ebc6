"""RMSNorm: LayerNorm without centering."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import torch
from torch import Tensor

from musigma.functional import add_rms_norm, rms_norm
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

    @overload
    def forward(self, x: Tensor, *, activation: str | None = None) -> Tensor: ...
    @overload
    def forward(
        self, x: Tensor, *, activation: str | None = None, residual: Tensor
    ) -> tuple[Tensor, Tensor]: ...
    def forward(
        self, x: Tensor, *, activation: str | None = None, residual: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The input scaled, or with `residual` the sum of both.

        Args:
            x: (*batch, *normalized_shape).
            activation: applied to the result, as in `musigma.functional.rms_norm`.
            residual: like x; added to it first, as in `musigma.functional.add_rms_norm`.

        Returns:
            (*batch, *normalized_shape), in the input's dtype, channels last where the input is; with
            `residual` a pair, this and the sum.
        """
        if residual is not None:
            return add_rms_norm(
                x, residual, self.normalized_shape, self.weight, self.eps, activation=activation
            )
        return rms_norm(x, self.normalized_shape, self.weight, self.eps, activation=activation)
