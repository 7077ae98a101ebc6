"""The general scheme: any scale, any fan, any of three distributions."""

import math

import torch
from torch import Tensor

from musigma.init._fans import FansLike
from musigma.init.schemes._draw import fill_normal, fill_uniform
from musigma.init.schemes._scaling import (
    BAD_FANS,
    GIVEN_FANS,
    SHAPE_SAMPLES,
    fan_std,
    scaled_normal_law,
    scaled_uniform_law,
)
from musigma.init.schemes._scheme import SCHEMES, Law, Sample, Setting, scheme
from musigma.init.schemes._truncated import truncated_normal_

_DISTRIBUTIONS = ("truncated_normal", "normal", "uniform")


def _law(setting: Setting) -> Law:
    fan_in, fan_out = setting.fans
    fan = {"fan_in": fan_in, "fan_out": fan_out, "fan_avg": (fan_in + fan_out) / 2}[setting.options["mode"]]
    var = float(setting.options["scale"] / fan)
    if setting.options["distribution"] == "uniform":
        return scaled_uniform_law(var)
    if setting.options["distribution"] == "normal":
        return scaled_normal_law(var)
    return SCHEMES["truncated_normal"].law(setting.shape, options={"std": math.sqrt(var)})


@scheme(
    law=_law,
    formula="Var = scale/fan, truncated normal (±2σ, std after the cut), normal or uniform",
    source="Keras and JAX variance_scaling",
    samples=(
        *SHAPE_SAMPLES,
        GIVEN_FANS,
        BAD_FANS,
        Sample((60, 50), {"scale": 2.0, "mode": "fan_out", "distribution": "normal"}),
        Sample((60, 50), {"scale": 2.0, "mode": "fan_avg", "distribution": "uniform"}),
        Sample((6, 5), {"mode": "fan_sum"}, error=ValueError),
        Sample((6, 5), {"distribution": "cauchy"}, error=ValueError),
        Sample((6, 5), {"scale": 0.0}, error=ValueError),
    ),
)
def variance_scaling_(
    w: Tensor,
    *,
    scale: float = 1.0,
    mode: str = "fan_in",
    distribution: str = "truncated_normal",
    fans: FansLike | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Write numbers of variance scale/fan: the scheme of which LeCun's, Glorot's and He's are cases.

    Law: mean 0, Var = scale/fan, whatever the distribution (the truncated normal is cut at two standard
    deviations of its parent and widened by 1/0.8796 to make up for it).

    Args:
        w: (out, in, *kernel), any floating dtype.
        scale: numerator, positive: 1 for LeCun and Glorot, gain² for He.
        mode: "fan_in", "fan_out" or "fan_avg", the mean of both.
        distribution: "truncated_normal", "normal" or "uniform".
        fans: effective fans; default: counted from the shape.
        generator: source of randomness; default: torch's own.

    Returns:
        w, written in place.

    Raises:
        ValueError: fewer than two dimensions, fans or scale not positive, unknown mode or distribution.

    Example:
        >>> import torch, musigma as ms
        >>> w = ms.init.variance_scaling_(torch.empty(8, 12), distribution="uniform")
        >>> bool((w.abs() <= 0.5).all())
        True

    References:
        jax.nn.initializers.variance_scaling; He et al. 2015.
    """
    if distribution not in _DISTRIBUTIONS:
        raise ValueError(f"distribution must be one of {list(_DISTRIBUTIONS)}, got {distribution!r}")
    if not 0 < scale < math.inf:
        raise ValueError(f"scale must be positive and finite, got {scale}; zeros_ writes zeros")
    std = fan_std(w, fans, mode, math.sqrt(scale))
    if distribution == "truncated_normal":
        truncated_normal_(w, std=std, generator=generator)
    elif distribution == "normal":
        fill_normal(w, 0.0, std, generator)
    else:
        fill_uniform(w, -math.sqrt(3) * std, math.sqrt(3) * std, generator)
    return w
