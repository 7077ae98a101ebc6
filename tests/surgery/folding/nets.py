"""Models for the folding tests, with numbers that are anything but 0 and 1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def settled(model: nn.Module, seed: int = 0) -> nn.Module:
    """The model in eval mode with drawn statistics, weights and biases, negative ones too."""
    g = torch.Generator().manual_seed(seed)

    def draw(t: Tensor, low: float, high: float) -> None:
        t.data.copy_(low + (high - low) * torch.rand(t.shape, generator=g, dtype=torch.float64))

    for module in model.modules():
        for name, t in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            if name == "running_var":
                draw(t, 0.1, 3.0)
            elif t.is_floating_point():
                draw(t, -1.5, 1.5)
    return model.eval()


class Net(nn.Module):
    """Layers by name and a forward given as a function, for models that a Sequential is not."""

    def __init__(self, forward: Callable[..., Any], **layers: nn.Module) -> None:
        super().__init__()
        self._forward = forward
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x: Tensor) -> Any:
        return self._forward(self, x)
