"""What a BatchNorm becomes, and where that is nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import nn

import musigma.nn as layers
from musigma.functional._checks import divisors

# A variance of m values is off by √(2/m): by 35 % for 16.
VALUES_A_GROUP = 16
MOST_GROUPS = 32


def default_groups(channels: int, positions: int) -> int:
    """As many groups as leave each at least two channels and sixteen values, 32 at most; one if none do.

    References:
        Wu & He 2018, "Group Normalization", table 3, on 32 groups and on 16 channels a group.
    """
    fits = [
        g
        for g in range(1, min(channels, MOST_GROUPS) + 1)
        if channels % g == 0 and channels // g >= 2 and channels // g * positions >= VALUES_A_GROUP
    ]
    return max(fits, default=1)


def why_not(target: str, channels: int, shapes: Sequence[tuple[int, ...]], groups: int | None) -> str | None:
    """Why a layer of so many channels, called with such inputs, cannot become the target; None if it can."""
    positions = fewest_positions(shapes)
    if target == "instancenorm" and positions < 2:
        return "InstanceNorm would normalize single values: its inputs have one position a channel"
    if target == "layernorm" and channels < 2:
        return "LayerNorm would normalize single values: it has one channel"
    if target != "groupnorm":
        return None
    if groups is not None and channels % groups:
        return f"its {channels} channels do not make {groups} groups; try {divisors(channels)}"
    if channels // (groups or 1) * positions < 2:
        return f"GroupNorm of {groups or 1} would normalize single values: take fewer groups"
    return None


def fewest_positions(shapes: Sequence[tuple[int, ...]]) -> int:
    """Positions of the smallest input (n, c, *positions)."""
    return min((math.prod(shape[2:]) for shape in shapes), default=1)


def make(
    target: str, old: nn.Module, channels: int, shapes: Sequence[tuple[int, ...]], groups: int | None
) -> nn.Module:
    """The new layer, torch's in place of torch's and ours in place of ours, with eps and type of the old."""
    ours = type(old).__module__.startswith("musigma")
    like = next((t for t in (*old.parameters(), *old.buffers()) if t.is_floating_point()), None)
    options: dict[str, Any] = {"eps": old.eps}
    if like is not None:
        options |= {"device": like.device, "dtype": like.dtype}
    space: Any = layers if ours else nn
    dims = max(len(shape) for shape in shapes) - 2
    if target == "groupnorm":
        number = default_groups(channels, fewest_positions(shapes)) if groups is None else groups
        return space.GroupNorm(number, channels, **options)
    if target == "layernorm":
        # of the channels, each position for itself: torch has that for the last dim only
        kind = space.LayerNorm if dims == 0 else getattr(layers, f"LayerNorm{dims}d")
        return kind(channels, **options)
    return getattr(space, f"InstanceNorm{dims}d")(channels, affine=True, **options)
