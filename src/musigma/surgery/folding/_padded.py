"""Padding with a value of its own for every channel, which a scale and a shift in front leave behind."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def pad_by_channel(x: Tensor, padding: Sequence[int], value: Tensor) -> Tensor:
    """`x` with a border: value[c] all around channel c.

    Args:
        x: (n, c, *spatial) or (c, *spatial).
        padding: left and right of the last dim, of the one before, and so on.
        value: (c,).
    """
    spatial = len(padding) // 2
    one = torch.ones(x.shape[x.ndim - spatial :], dtype=x.dtype, device=x.device)
    border = 1 - F.pad(one, tuple(padding))
    return F.pad(x, tuple(padding)) + border * value.to(x.dtype).reshape(-1, *[1] * spatial)


class ChannelPad(nn.Module):
    """What takes the place of a ConstantPad when the values around it have been rescaled by channel.

    Args:
        padding: as `torch.nn.functional.pad` takes it.
        value: (c,).
    """

    value: Tensor

    def __init__(self, padding: Sequence[int], value: Tensor) -> None:
        super().__init__()
        self.padding = tuple(padding)
        self.register_buffer("value", value)

    def forward(self, x: Tensor) -> Tensor:
        return pad_by_channel(x, self.padding, self.value)

    def extra_repr(self) -> str:
        return f"{self.padding}, channels={len(self.value)}"


class _PadsByChannel:
    """A convolution that pads each channel with its own value where it padded with zeros."""

    padding_value: Tensor
    _reversed_padding_repeated_twice: list[int]

    def forward(self, input: Tensor) -> Tensor:
        x = pad_by_channel(input, self._reversed_padding_repeated_twice, self.padding_value)
        return self._unpadded(x)

    def _unpadded(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class PaddedConv1d(_PadsByChannel, nn.Conv1d):
    """Conv1d that pads channel c with padding_value[c]."""

    def _unpadded(self, x: Tensor) -> Tensor:
        return F.conv1d(x, self.weight, self.bias, self.stride, 0, self.dilation, self.groups)


class PaddedConv2d(_PadsByChannel, nn.Conv2d):
    """Conv2d that pads channel c with padding_value[c]."""

    def _unpadded(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight, self.bias, self.stride, 0, self.dilation, self.groups)


class PaddedConv3d(_PadsByChannel, nn.Conv3d):
    """Conv3d that pads channel c with padding_value[c]."""

    def _unpadded(self, x: Tensor) -> Tensor:
        return F.conv3d(x, self.weight, self.bias, self.stride, 0, self.dilation, self.groups)


PADDED: dict[type[nn.Module], type[nn.Module]] = {
    nn.Conv1d: PaddedConv1d,
    nn.Conv2d: PaddedConv2d,
    nn.Conv3d: PaddedConv3d,
}


def pad_conv(conv: nn.Module, value: Tensor) -> None:
    """Let a plain convolution pad with values of each channel, in place: its parameters keep their names.

    Args:
        conv: a Conv1d, Conv2d or Conv3d that pads with zeros, or one that went through here already.
        value: (in_channels,), in the units of its new input.
    """
    kind = type(conv)
    weight: Tensor = conv.weight  # type: ignore[assignment]
    if kind in PADDED:
        # The class alone changes: hooks, names and identity stay.
        conv.__class__ = PADDED[kind]
        conv.register_buffer("padding_value", value.to(weight))
    else:
        conv.padding_value = value.to(weight)
