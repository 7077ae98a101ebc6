"""Kaiming He's schemes: the mean square through an activation."""

import math

import torch
from torch import Tensor

from musigma.init._fans import FansLike
from musigma.init.meanfield._activations import Activation, canonical_name
from musigma.init.meanfield._gains import gain
from musigma.init.schemes._draw import fill_normal, fill_uniform
from musigma.init.schemes._scaling import (
    BAD_FANS,
    GIVEN_FANS,
    SHAPE_SAMPLES,
    fan_std,
    scaled_normal_law,
    scaled_uniform_law,
)
from musigma.init.schemes._scheme import Sample, Setting, scheme

_SAMPLES = (
    *SHAPE_SAMPLES,
    GIVEN_FANS,
    BAD_FANS,
    Sample((60, 50), {"mode": "fan_out"}),
    Sample((60, 50), {"nonlinearity": "gelu"}),
    Sample((60, 50), {"nonlinearity": torch.sin}),
    Sample((60, 50), {"nonlinearity": "leaky_relu"}),
    Sample((60, 50), {"nonlinearity": "leaky_relu", "negative_slope": 0.5}),
    Sample((6, 5), {"mode": "fan_sum"}, error=ValueError),
    Sample((6, 5), {"nonlinearity": "rleu"}, error=ValueError),
    Sample((6, 5), {"nonlinearity": "relu", "negative_slope": 0.5}, error=ValueError),
)


def _he_var(setting: Setting) -> float:
    factor = _activation_gain(setting.options["nonlinearity"], setting.options["negative_slope"])
    fan = setting.fans.fan_in if setting.options["mode"] == "fan_in" else setting.fans.fan_out
    return factor**2 / fan


def _activation_gain(nonlinearity: Activation, negative_slope: float | None) -> float:
    if negative_slope is None:
        return gain(nonlinearity)
    if not isinstance(nonlinearity, str) or canonical_name(nonlinearity) != "leaky_relu":
        raise ValueError(
            f"negative_slope ({negative_slope}) belongs to nonlinearity='leaky_relu', "
            f"got nonlinearity={nonlinearity!r}; drop one of the two"
        )
    return math.sqrt(2 / (1 + negative_slope**2))


def _require_mode(mode: str) -> None:
    if mode not in ("fan_in", "fan_out"):
        raise ValueError(f"Mode {mode} not supported, please use one of ['fan_in', 'fan_out']")


@scheme(
    law=lambda setting: scaled_normal_law(_he_var(setting)),
    formula="w ~ N(0, gain(φ)²/fan)",
    source="He et al. 2015",
    samples=_SAMPLES,
)
def he_normal_(
    w: Tensor,
    *,
    mode: str = "fan_in",
    nonlinearity: Activation = "relu",
    negative_slope: float | None = None,
    fans: FansLike | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Write normal numbers that keep the mean square through an activation (Kaiming He).

    Law: mean 0, Var = gain(φ)²/fan with gain(φ)² = 1/E[φ(z)²]: 2 for ReLU, 2/(1 + slope²) for leaky ReLU.

    Args:
        w: (out, in, *kernel), any floating dtype.
        mode: "fan_in" keeps the signal forward, "fan_out" the gradient backward (exact for ReLU and
            leaky ReLU only, whose derivative has the same second moment as they have).
        nonlinearity: the activation φ: a name, (name, keywords), any callable or a module.
        negative_slope: of "leaky_relu"; default: torch's 0.01.
        fans: effective fans; default: counted from the shape (`fans(module)` knows better).
        generator: source of randomness; default: torch's own.

    Returns:
        w, written in place.

    Raises:
        ValueError: fewer than two dimensions, fans not positive, unknown mode or activation, a slope
            for something that has none.

    Example:
        >>> import torch, musigma as ms
        >>> g = torch.Generator().manual_seed(0)
        >>> w = ms.init.he_normal_(torch.empty(300, 400), generator=g)
        >>> round(400 * ms.moments(w, None).var().item(), 1)
        2.0
        >>> w = ms.init.he_normal_(torch.empty(300, 400), nonlinearity=torch.nn.GELU(), generator=g)
        >>> round(400 * ms.moments(w, None).var().item(), 1)     # 1/E[gelu(z)²] = 2.35
        2.4

    References:
        He et al. 2015, Delving Deep into Rectifiers, eq. 10, 14 and 15.
    """
    _require_mode(mode)
    fill_normal(w, 0.0, fan_std(w, fans, mode, _activation_gain(nonlinearity, negative_slope)), generator)
    return w


@scheme(
    law=lambda setting: scaled_uniform_law(_he_var(setting)),
    formula="w ~ U[±gain(φ)·√(3/fan)]",
    source="He et al. 2015",
    samples=_SAMPLES,
)
def he_uniform_(
    w: Tensor,
    *,
    mode: str = "fan_in",
    nonlinearity: Activation = "relu",
    negative_slope: float | None = None,
    fans: FansLike | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Write uniform numbers that keep the mean square through an activation (Kaiming He).

    Law: mean 0, Var = gain(φ)²/fan, bounds ±gain(φ)·√(3/fan).

    Args:
        w: (out, in, *kernel), any floating dtype.
        mode: "fan_in" keeps the signal forward, "fan_out" the gradient backward.
        nonlinearity: the activation φ: a name, (name, keywords), any callable or a module.
        negative_slope: of "leaky_relu"; default: torch's 0.01.
        fans: effective fans; default: counted from the shape (`fans(module)` knows better).
        generator: source of randomness; default: torch's own.

    Returns:
        w, written in place.

    Raises:
        ValueError: fewer than two dimensions, fans not positive, unknown mode or activation, a slope
            for something that has none.

    Example:
        >>> import torch, musigma as ms
        >>> bool((ms.init.he_uniform_(torch.empty(4, 6)).abs() <= 1).all())
        True

    References:
        He et al. 2015, Delving Deep into Rectifiers, eq. 10, 14 and 15.
    """
    _require_mode(mode)
    bound = math.sqrt(3) * fan_std(w, fans, mode, _activation_gain(nonlinearity, negative_slope))
    fill_uniform(w, -bound, bound, generator)
    return w
