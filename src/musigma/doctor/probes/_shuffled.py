"""A model as another draw of its initialization would have left it."""

import copy

import torch
from torch import nn

__all__ = ["shuffled"]


def shuffled(model: nn.Module, seed: int) -> nn.Module:
    """A copy with the entries of every weight matrix in another order.

    Independent draws are as likely in any order: a fresh net becomes another fresh net of the same variances.
    What a fitted one has learned is lost.

    Args:
        model: stays as it was.
        seed: of the order.
    """
    twin, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in twin.parameters():
            if p.ndim >= 2:
                order = torch.randperm(p.numel(), generator=generator).to(p.device)
                p.copy_(p.flatten()[order].reshape(p.shape))
    return twin
