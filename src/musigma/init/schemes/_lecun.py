"""LeCun's schemes: the forward variance of a linear layer."""

import math

import torch
from torch import Tensor

from musigma.init._fans import FansLike
from musigma.init.schemes._draw import fill_normal, fill_uniform
from musigma.init.schemes._scaling import FAN_SAMPLES, fan_std, scaled_normal_law, scaled_uniform_law
from musigma.init.schemes._scheme import Setting, scheme


def _lecun_var(setting: Setting) -> float:
    return float(setting.options["gain"] ** 2 / setting.fans.fan_in)


@scheme(
    law=lambda setting: scaled_normal_law(_lecun_var(setting)),
    formula="w ~ N(0, gain²/fan_in)",
    source="LeCun et al. 1998",
    samples=FAN_SAMPLES,
)
def lecun_normal_(
    w: Tensor, *, gain: float = 1.0, fans: FansLike | None = None, generator: torch.Generator | None = None
) -> Tensor:
    """Write normal numbers that keep the forward variance of centered inputs, and of SELU networks.

    Law: mean 0, Var = gain²/fan_in.

    Args:
        w: (out, in, *kernel), any floating dtype.
        gain: factor on the standard deviation.
        fans: effective fans; default: counted from the shape (`fans(module)` knows better).
        generator: source of randomness; default: torch's own.

    Returns:
        w, written in place.

    Raises:
        ValueError: fewer than two dimensions, fans not positive, gain negative.

    Example:
        >>> import torch, musigma as ms
        >>> g = torch.Generator().manual_seed(0)
        >>> w = ms.init.lecun_normal_(torch.empty(300, 400), generator=g)
        >>> round(400 * ms.moments(w, None).var().item(), 1)
        1.0

    References:
        LeCun, Bottou, Orr & Müller 1998, Efficient BackProp, section 4.6; Klambauer et al. 2017 (SELU).
    """
    fill_normal(w, 0.0, fan_std(w, fans, "fan_in", gain), generator)
    return w


@scheme(
    law=lambda setting: scaled_uniform_law(_lecun_var(setting)),
    formula="w ~ U[±gain·√(3/fan_in)]",
    source="LeCun et al. 1998",
    samples=FAN_SAMPLES,
)
def lecun_uniform_(
    w: Tensor, *, gain: float = 1.0, fans: FansLike | None = None, generator: torch.Generator | None = None
) -> Tensor:
    """Write uniform numbers that keep the forward variance of centered inputs, and of SELU networks.

    Law: mean 0, Var = gain²/fan_in, bounds ±gain·√(3/fan_in).

    Args:
        w: (out, in, *kernel), any floating dtype.
        gain: factor on the standard deviation.
        fans: effective fans; default: counted from the shape.
        generator: source of randomness; default: torch's own.

    Returns:
        w, written in place.

    Raises:
        ValueError: fewer than two dimensions, fans not positive, gain negative.

    Example:
        >>> import torch, musigma as ms
        >>> bool((ms.init.lecun_uniform_(torch.empty(4, 3)).abs() <= 1).all())
        True

    References:
        LeCun, Bottou, Orr & Müller 1998, Efficient BackProp, section 4.6.
    """
    bound = math.sqrt(3) * fan_std(w, fans, "fan_in", gain)
    fill_uniform(w, -bound, bound, generator)
    return w
