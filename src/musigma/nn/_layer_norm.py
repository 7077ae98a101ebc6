"""LayerNorm over the last dims, and over the channels of channels-first input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import torch
from torch import Tensor

from musigma.functional import add_layer_norm, layer_norm
from musigma.functional._checks import refuse_input
from musigma.nn._sizes import check_normalized_shape, check_size


class LayerNorm(torch.nn.LayerNorm):
    """Normalize each example over its own features: `torch.nn.LayerNorm`, through `musigma.functional`.

        y = (x − μ) / √(σ² + eps) · weight + bias,    μ, σ² over `normalized_shape`, σ² biased (1/n)

    The statistics of an (a, b, c, d) input under ``normalized_shape=(c, d)`` have shape (a, b). They belong
    to one example, so a batch of one gives the row of a large batch, and training equals evaluation.

    Args:
        normalized_shape: sizes of the last dims, or the size of the last dim.
        eps: added to the variance; in units of input².
        elementwise_affine: whether weight and bias, of shape `normalized_shape`, are learned.
        bias: whether there is a bias.
        device: where the parameters are made.
        dtype: of the parameters; the result has the input's dtype whatever it is.

    Example:
        >>> import torch, musigma as ms
        >>> ms.nn.LayerNorm(3)(torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 9.0]])).detach()
        tensor([[-1.2247,  0.0000,  1.2247],
                [-0.7071, -0.7071,  1.4142]])

    References:
        Ba, Kiros & Hinton 2016, "Layer Normalization", equation 3.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_normalized_shape(normalized_shape)
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)  # type: ignore[arg-type]  # torch's annotation knows lists only

    @overload
    def forward(self, input: Tensor, *, activation: str | None = None) -> Tensor: ...
    @overload
    def forward(
        self, input: Tensor, *, activation: str | None = None, residual: Tensor
    ) -> tuple[Tensor, Tensor]: ...
    def forward(
        self, input: Tensor, *, activation: str | None = None, residual: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The input normalized, or with `residual` the sum of both.

        Args:
            input: (*batch, *normalized_shape).
            activation: applied to the result, as in `musigma.functional.layer_norm`.
            residual: like the input; added to it first, as in `musigma.functional.add_layer_norm`.

        Returns:
            (*batch, *normalized_shape), in the input's dtype, channels last where the input is; with
            `residual` a pair, this and the sum.
        """
        if residual is not None:
            return add_layer_norm(
                input,
                residual,
                self.normalized_shape,
                self.weight,
                self.bias,
                self.eps,
                activation=activation,
            )
        return layer_norm(
            input, self.normalized_shape, self.weight, self.bias, self.eps, activation=activation
        )


class ChannelsFirst(LayerNorm):
    """LayerNorm over dim 1 of (n, c, *spatial); the public classes fix the number of spatial dims."""

    _spatial: int

    def __init__(
        self,
        num_channels: int,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_size("num_channels", num_channels)
        super().__init__(num_channels, eps, elementwise_affine, bias, device, dtype)

    def forward(self, input: Tensor, *, activation: str | None = None) -> Tensor:  # type: ignore[override]  # no residual: its rows lie across the input
        """The channels of every position normalized.

        Args:
            input: (n, num_channels, *spatial).
            activation: applied to the result, as in `musigma.functional.layer_norm`.

        Returns:
            (n, num_channels, *spatial), in the input's dtype and memory format.

        Raises:
            ValueError: the input has another number of dims or of channels.
        """
        (channels,) = self.normalized_shape
        if not isinstance(input, Tensor):
            refuse_input("layer_norm", input)
            # torch.fx's proxy, of which nothing can be asked
            return super().forward(input.movedim(1, -1), activation=activation).movedim(-1, 1)
        if input.dim() != self._spatial + 2:
            raise ValueError(f"expected {self._spatial + 2}D input (got {input.dim()}D input)")
        if input.shape[1] != channels:
            raise ValueError(
                f"expected {channels} channels in dim 1, got input of shape {tuple(input.shape)}"
                + ("; for channels-last input use ms.nn.LayerNorm" * (input.shape[-1] == channels))
            )
        y = super().forward(input.movedim(1, -1), activation=activation).movedim(-1, 1)
        return y.contiguous() if input.is_contiguous() else y


class LayerNorm1d(ChannelsFirst):
    """`LayerNorm2d` for (n, c, length)."""

    _spatial = 1


class LayerNorm2d(ChannelsFirst):
    """LayerNorm over the channels of channels-first images, each position for itself (ConvNeXt's).

        y = LayerNorm(c)(x moved to channels last), moved back

    `LayerNorm(c)` itself normalizes the last dim: on (n, c, h, w) that is the width, and where w = c without
    an error.

    Args:
        num_channels: c, the size of dim 1.
        eps: added to the variance; in units of input². (ConvNeXt uses 1e-6.)
        elementwise_affine: whether weight and bias, of shape (c,), are learned.
        bias: whether there is a bias.
        device: where the parameters are made.
        dtype: of the parameters.

    Example:
        >>> import torch, musigma as ms
        >>> x = torch.randn(2, 8, 8, 8)
        >>> y = ms.nn.LayerNorm2d(8)(x)
        >>> bool(y.mean(1).abs().max() < 1e-6), y.shape
        (True, torch.Size([2, 8, 8, 8]))

    References:
        Liu et al. 2022, "A ConvNet for the 2020s".
    """

    _spatial = 2


class LayerNorm3d(ChannelsFirst):
    """`LayerNorm2d` for (n, c, depth, height, width)."""

    _spatial = 3
