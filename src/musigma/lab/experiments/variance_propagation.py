"""Variance through a deep stack: He keeps it behind ReLU, Xavier halves it every layer.

The notes' law Var(z) = fan_in · Var(W) · Var(a) needs centered activations. Behind a ReLU they are not, and
it is E[a²] that propagates: E[a²] = Var(z)/2, so that He's gain √2 keeps Var(z) and a gain of 1 halves it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from musigma import init
from musigma.lab._result import Curve, Quantity, result
from musigma.statistics import moments

WIDTH, DEPTH, EXAMPLES = 512, 30, 256


@result(
    "variance-propagation",
    claim="He initialization keeps the variance of ReLU pre-activations, Xavier halves it every layer",
    source="Lecture notes on initialization, sections 6.2 and 6.3; He et al. 2015, section 2.2",
)
def experiment(seed: int) -> Mapping[str, Any]:
    """A 30-layer ReLU network of width 512 without biases, under both laws."""
    # E‖x‖⁴/(E‖x‖²)² grows as (1 + 5/n) a layer (Hanin 2018), so the log of the mean square wanders by about
    # √(5L/n); three of these over L layers, as an error of the ratio a layer.
    spread = 3 * math.sqrt(5 * DEPTH / WIDTH) / DEPTH
    quantities, curves = [], []
    laws: tuple[tuple[str, Callable[..., Tensor], float], ...] = (
        ("He", init.he_normal_, 1.0),
        ("Xavier", init.xavier_normal_, 0.5),
    )
    for name, scheme, ratio in laws:
        variances = _propagate(scheme, seed)
        measured = (variances[-1] / variances[0]) ** (1 / (DEPTH - 1))
        quantities.append(
            Quantity(f"variance ratio a layer, {name}", ratio, measured, spread, "three sd of finite width")
        )
        curves.append(Curve(name, range(1, DEPTH + 1), variances))
    return {"quantities": tuple(quantities), "curves": tuple(curves), "axes": ("layer", "variance of z")}


def _propagate(scheme: Callable[..., Tensor], seed: int) -> list[float]:
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(EXAMPLES, WIDTH, generator=generator)
    variances = []
    for _ in range(DEPTH):
        z = a @ scheme(torch.empty(WIDTH, WIDTH), generator=generator).T
        variances.append(moments(z).var().item())
        a = z.relu()
    return variances
