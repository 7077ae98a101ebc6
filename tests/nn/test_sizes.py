"""A layer that can't exist is refused when it is built, in torch's class and our words."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import musigma as ms

LAYERS: dict[str, Callable[..., nn.Module]] = {
    name: getattr(ms.nn, name)
    for name in ms.nn.__all__
    if name.rstrip("123d") in {"LayerNorm", "RMSNorm", "BatchNorm", "SyncBatchNorm", "InstanceNorm"}
    or name.startswith("Frozen")
} | {"GroupNorm": lambda size, **options: ms.nn.GroupNorm(1, size, **options)}


@pytest.mark.parametrize("options", [{}, {"device": "meta"}], ids=str)
@pytest.mark.parametrize("layer", LAYERS)
def test_negative_sizes(layer: str, options: dict[str, Any]) -> None:
    """torch builds a BatchNorm of −3 channels where it has no parameters, and fails at the first batch."""
    words = r"negative dimension -3: (normalized_shape|num_\w+) must not be negative, got -3"
    with pytest.raises(RuntimeError, match=words):
        LAYERS[layer](-3, **options)


def test_negative_sizes_without_parameters() -> None:
    with pytest.raises(RuntimeError, match="num_features must not be negative, got -3"):
        ms.nn.BatchNorm1d(-3, affine=False, track_running_stats=False)
    with pytest.raises(RuntimeError, match=r"normalized_shape\[1\] must not be negative, got -1"):
        ms.nn.LayerNorm((2, -1), elementwise_affine=False)


@pytest.mark.parametrize("name", LAYERS)
def test_empty_layers_and_sizes_of_every_kind(name: str) -> None:
    """As torch has them."""
    layer = LAYERS[name](0)
    assert all(t.numel() == 0 or t.dim() == 0 for t in layer.state_dict().values())
    assert ms.nn.LayerNorm(torch.Size([2, 3])).normalized_shape == (2, 3)
    assert ms.nn.RMSNorm([2, 3]).normalized_shape == (2, 3)


@pytest.mark.parametrize(
    "name", ["LayerNorm", "RMSNorm", "BatchNorm2d", "SyncBatchNorm", "InstanceNorm1d", "GroupNorm"]
)
def test_the_arguments_are_torchs(name: str) -> None:
    ours, theirs = (inspect.signature(getattr(m, name).__init__).parameters for m in (ms.nn, nn))
    assert [(p.name, p.kind, p.default) for p in ours.values()] == [
        (p.name, p.kind, p.default) for p in theirs.values()
    ]
