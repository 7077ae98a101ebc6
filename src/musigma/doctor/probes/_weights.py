"""The parameters: their moments, and the tables that reports draw."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from musigma.doctor.probes._summary import overall
from musigma.statistics import Moments

__all__ = ["WeightMeasure", "histogram", "measure_weights"]


@dataclass(frozen=True)
class WeightMeasure:
    """One parameter.

    Args:
        name: qualified; a tied parameter appears once, under its first name.
        shape: its shape.
        values: moments over all its values.
        zeros: fraction of values that are exactly 0.
        trainable: `requires_grad`.
    """

    name: str
    shape: tuple[int, ...]
    values: Moments
    zeros: float
    trainable: bool


def measure_weights(model: nn.Module) -> dict[str, WeightMeasure]:
    """Measure every floating parameter that has values; those on the meta device have none."""
    with torch.no_grad():
        return {
            name: WeightMeasure(
                name, tuple(p.shape), overall(p), float((p == 0).double().mean()), p.requires_grad
            )
            for name, p in model.named_parameters()
            if p.is_floating_point() and p.numel() and not p.is_meta
        }


def histogram(t: Tensor, *, bins: int = 40) -> Mapping[str, Any]:
    """Counts of a tensor's finite values in equal bins, with the edges: what a plot needs and no more."""
    values = t.detach().double().flatten()
    values = values[torch.isfinite(values)].cpu()
    if not values.numel():
        return {"edges": [], "counts": []}
    low, high = float(values.min()), float(values.max())
    if low == high:
        return {"edges": [low, high], "counts": [values.numel()]}
    counts, edges = torch.histogram(values, bins=bins)
    return {"edges": edges.tolist(), "counts": [int(c) for c in counts]}
