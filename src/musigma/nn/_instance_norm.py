"""InstanceNorm: each channel of each example by itself."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from musigma._errors import MusigmaWarning
from musigma.functional import instance_norm
from musigma.functional._checks import refuse_input
from musigma.nn._sizes import check_size
from musigma.nn._statistics import KeepsStatistics


class _InstanceNorm(KeepsStatistics, torch.nn.modules.instancenorm._InstanceNorm):
    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = False,
        track_running_stats: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
    ) -> None:
        check_size("num_features", num_features)
        super().__init__(
            num_features=num_features,
            eps=eps,
            momentum=momentum,
            affine=affine,
            track_running_stats=track_running_stats,
            device=device,
            dtype=dtype,
            bias=bias,
        )

    def forward(self, input: Tensor, *, mask: Tensor | None = None, activation: str | None = None) -> Tensor:
        """The input normalized.

        Args:
            input: (n, num_features, *spatial), or (num_features, *spatial) for one example.
            mask: what enters the statistics, broadcastable to the input: (n, 1, *spatial), True keeps.
            activation: applied to the result, as in `musigma.functional.instance_norm`.

        Returns:
            the input's shape, dtype and memory format.

        Raises:
            ValueError: one position a channel, another number of dims than this class takes, or another
                number of channels than num_features.
        """
        unbatched = False
        if isinstance(input, Tensor):
            self._check_input_dim(input)
            unbatched = input.dim() == self._get_no_batch_dim()
            channel_dim = 0 if unbatched else 1
            if input.shape[channel_dim] != self.num_features:
                self._refuse_channels(input, channel_dim)
        else:
            refuse_input("instance_norm", input)  # but not torch.fx's proxies, which stand for batches
        y = instance_norm(
            input.unsqueeze(0) if unbatched else input,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            self.training or not self.track_running_stats,
            self.momentum if self.momentum is not None else 0.0,
            self.eps,
            mask=mask,
            activation=activation,
        )
        return y.squeeze(0) if unbatched else y

    def _refuse_channels(self, input: Tensor, channel_dim: int) -> None:
        shape, c = tuple(input.shape), self.num_features
        expected = f"expected input's size at dim={channel_dim} to match num_features ({c}), but got: "
        if channel_dim == 0:
            meant = (
                f". (n, {c}) data has one value a channel, nothing to normalize: use BatchNorm1d or LayerNorm"
                if len(shape) == 2
                else f"; a batch has {len(shape) + 1} dims"
            )
            raise ValueError(
                f"{expected}{shape[0]}. Input of {len(shape)} dims, here {shape}, is one example without a "
                f"batch dim, (c, *spatial){meant}"
            )
        if self.affine:
            raise ValueError(f"{expected}{shape[1]}. The input has shape {shape}")
        warnings.warn(
            f"input's size at dim={channel_dim} does not match num_features ({shape[1]} against {c}); it is "
            "not used because affine=False, but the layer was built for other input",
            MusigmaWarning,
            stacklevel=3,
        )


class InstanceNorm1d(_InstanceNorm, torch.nn.InstanceNorm1d):
    """Normalize each channel of each example over its positions: `torch.nn.InstanceNorm1d`.

        y = (x − μ) / √(σ² + eps) · weight + bias,    μ, σ² over (*spatial), σ² biased (1/n)

    A 2-D input is always read as one example without a batch dim, (c, length), never as (n, c), which has
    one value a channel and nothing to normalize. If its first size is not num_features that is an error; if
    n happens to equal c it is still (c, length).

    Args:
        num_features: c.
        eps: added to the variance; in units of input².
        momentum: the weight of the new value in the running statistics (see `BatchNorm1d`).
        affine: whether weight and bias, of shape (c,), are learned.
        track_running_stats: whether running statistics are kept, and used in evaluation. They stay float32
            under ``.half()`` and its like.
        device: where parameters and buffers are made.
        dtype: of the parameters, and of the buffers unless it is narrower than float32.
        bias: whether there is a bias, if affine.

    Example:
        >>> import torch, musigma as ms
        >>> ms.nn.InstanceNorm1d(2)(torch.tensor([[[1.0, 3.0], [10.0, 30.0]]]))
        tensor([[[-1.0000,  1.0000],
                 [-1.0000,  1.0000]]])

    References:
        Ulyanov, Vedaldi & Lempitsky 2016, "Instance Normalization".
    """


class InstanceNorm2d(_InstanceNorm, torch.nn.InstanceNorm2d):
    """`InstanceNorm1d` for (n, c, height, width), or (c, height, width) for one example.

    channels_last input gives channels_last output, which torch's own layer loses.
    """


class InstanceNorm3d(_InstanceNorm, torch.nn.InstanceNorm3d):
    """`InstanceNorm1d` for (n, c, depth, height, width), or (c, depth, height, width) for one example."""
