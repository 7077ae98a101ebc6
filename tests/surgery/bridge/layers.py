"""Layers with nothing at its initial value, and inputs for them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

import musigma as ms


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2 + 1


def used(layer: nn.Module) -> nn.Module:
    g = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, t in layer.state_dict().items():
            if t.is_floating_point():
                t.copy_(
                    torch.rand(t.shape, generator=g) + 0.3
                    if "var" in name
                    else torch.randn(t.shape, generator=g)
                )
    return layer


# layer, shape of its inputs (channels at dim 1)
CASES: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "batch1d": (nn.BatchNorm1d(3, momentum=0.2), (6, 3)),
    "batch1d-length": (nn.BatchNorm1d(3, eps=1e-3), (4, 3, 5)),
    "batch2d": (nn.BatchNorm2d(3, momentum=0.01), (4, 3, 5, 2)),
    "batch2d-plain": (nn.BatchNorm2d(3, affine=False), (4, 3, 5, 2)),
    "batch3d": (ms.nn.BatchNorm3d(3), (2, 3, 2, 2, 3)),
    "frozen2d": (ms.nn.FrozenBatchNorm2d(3), (4, 3, 5, 2)),
    "layer": (nn.LayerNorm(6), (3, 4, 6)),
    "layer-no-bias": (nn.LayerNorm(6, bias=False), (3, 6)),
    "layer-several": (nn.LayerNorm((3, 4, 5)), (2, 3, 4, 5)),
    "layer2d": (ms.nn.LayerNorm2d(6), (2, 6, 3, 4)),
    "rms": (nn.RMSNorm(6), (3, 4, 6)),
    "rms-eps": (ms.nn.RMSNorm(6, eps=1e-3), (3, 6)),
    "group": (nn.GroupNorm(2, 6), (3, 6, 4, 2)),
    "group-flat": (nn.GroupNorm(3, 6), (3, 6)),
    "instance": (nn.InstanceNorm2d(4, affine=True), (3, 4, 5, 2)),
    "standardize": (ms.nn.Standardize([1.0, 20.0, -3.0], [2.0, 0.1, 30.0]), (5, 3)),
}
for case, _ in CASES.values():
    if not isinstance(case, ms.nn.Standardize):
        used(case)
    case.eval()

# whose features stand last in both worlds
SEQUENCES = frozenset(("layer", "layer-no-bias", "rms", "rms-eps"))


def to_last(name: str, x: Tensor) -> np.ndarray:
    """A layer's input or output as a library with channels last has it."""
    return (x if name in SEQUENCES or x.dim() == 2 else x.movedim(1, -1)).detach().numpy().copy()


def from_last(name: str, x: np.ndarray) -> Tensor:
    """The way back."""
    t = torch.from_numpy(np.array(x))
    return t if name in SEQUENCES or t.dim() == 2 else t.movedim(-1, 1)
