"""Xavier Glorot's schemes: a compromise between the forward and the backward variance."""

import math

import torch
from torch import Tensor

from musigma.init._fans import FansLike
from musigma.init.schemes._draw import fill_normal, fill_uniform
from musigma.init.schemes._scaling import FAN_SAMPLES, fan_std, scaled_normal_law, scaled_uniform_law
from musigma.init.schemes._scheme import Setting, scheme


def _xavier_var(setting: Setting) -> float:
    return float(2 * setting.options["gain"] ** 2 / (setting.fans.fan_in + setting.fans.fan_out))


@scheme(
    law=lambda setting: scaled_normal_law(_xavier_var(setting)),
    formula="w ~ N(0, 2·gain²/(fan_in + fan_out))",
    source="Glorot & Bengio 2010",
    samples=FAN_SAMPLES,
)
def xavier_normal_(
    w: Tensor, *, gain: float = 1.0, fans: FansLike | None = None, generator: torch.Generator | None = None
) -> Tensor:
    """Write normal numbers that share the error between forward and backward variance (Glorot).

    It is right for tanh near 0. Before ReLU it loses half of the mean square in every layer; `he_normal_`
    doesn't.

    Law: mean 0, Var = 2·gain²/(fan_in + fan_out).

    Args:
        w: (out, in, *kernel), any floating dtype.
        gain: factor on the standard deviation.
        fans: effective fans; default: counted from the shape. A packed weight needs those of one block.
        generator: source of randomness; default: torch's own.

    Returns:
        w, written in place.

    Raises:
        ValueError: fewer than two dimensions, fans not positive, gain negative.

    Example:
        >>> import torch, musigma as ms
        >>> g = torch.Generator().manual_seed(0)
        >>> w = ms.init.xavier_normal_(torch.empty(300, 500), generator=g)
        >>> round(400 * ms.moments(w, None).var().item(), 1)
        1.0

    References:
        Glorot & Bengio 2010, eq. 12 and 16.
    """
    fill_normal(w, 0.0, fan_std(w, fans, "fan_avg", gain), generator)
    return w


@scheme(
    law=lambda setting: scaled_uniform_law(_xavier_var(setting)),
    formula="w ~ U[±gain·√(6/(fan_in + fan_out))]",
    source="Glorot & Bengio 2010",
    samples=FAN_SAMPLES,
)
def xavier_uniform_(
    w: Tensor, *, gain: float = 1.0, fans: FansLike | None = None, generator: torch.Generator | None = None
) -> Tensor:
    """Write uniform numbers that share the error between forward and backward variance (Glorot).

    Law: mean 0, Var = 2·gain²/(fan_in + fan_out), bounds ±gain·√(6/(fan_in + fan_out)).

    Args:
        w: (out, in, *kernel), any floating dtype.
        gain: factor on the standard deviation.
        fans: effective fans; default: counted from the shape. A packed weight needs those of one block.
        generator: source of randomness; default: torch's own.

    Returns:
        w, written in place.

    Raises:
        ValueError: fewer than two dimensions, fans not positive, gain negative.

    Example:
        >>> import torch, musigma as ms
        >>> bool((ms.init.xavier_uniform_(torch.empty(3, 3)).abs() <= 1).all())
        True

    References:
        Glorot & Bengio 2010, eq. 16.
    """
    bound = math.sqrt(3) * fan_std(w, fans, "fan_avg", gain)
    fill_uniform(w, -bound, bound, generator)
    return w
