"""GroupNorm: the channels of one example, a group at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from musigma.functional import group_norm
from musigma.functional._checks import divisors


class GroupNorm(torch.nn.GroupNorm):
    """Normalize groups of each example's channels: `torch.nn.GroupNorm`, through `musigma.functional`.

        y = (x − μ) / √(σ² + eps) · weight + bias,    μ, σ² over (num_channels/num_groups, *spatial)

    One group is LayerNorm over (c, *spatial), one channel a group is InstanceNorm; the batch plays no part.

    Args:
        num_groups: how many groups the channels form; it divides num_channels.
        num_channels: c, the size of dim 1.
        eps: added to the variance; in units of input².
        affine: whether weight and bias, of shape (c,), are learned.
        device: where the parameters are made.
        dtype: of the parameters; the result has the input's dtype whatever it is.
        bias: whether there is a bias.

    Raises:
        ValueError: num_groups does not divide num_channels.

    Example:
        >>> import torch, musigma as ms
        >>> ms.nn.GroupNorm(2, 4)(torch.tensor([[1.0, 3.0, 10.0, 30.0]])).detach()
        tensor([[-1.0000,  1.0000, -1.0000,  1.0000]])

    References:
        Wu & He 2018, "Group Normalization".
    """

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
    ) -> None:
        if num_groups < 1 or num_channels % num_groups:
            raise ValueError(
                f"num_channels ({num_channels}) must be divisible by num_groups ({num_groups}); "
                f"try {divisors(num_channels)}"
            )
        super().__init__(num_groups, num_channels, eps, affine, device, dtype, bias=bias)

    def forward(self, input: Tensor, *, mask: Tensor | None = None, activation: str | None = None) -> Tensor:
        """The input normalized.

        Args:
            input: (n, num_channels, *spatial).
            mask: what enters the statistics, broadcastable to the input: (n, 1, *spatial), True keeps.
            activation: applied to the result, as in `musigma.functional.group_norm`.

        Returns:
            (n, num_channels, *spatial), in the input's dtype and memory format.
        """
        return group_norm(
            input, self.num_groups, self.weight, self.bias, self.eps, mask=mask, activation=activation
        )
