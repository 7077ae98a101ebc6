"""What the schemes that scale with the fans share."""

import math

from torch import Tensor

from musigma.init._fans import Fans, FansLike
from musigma.init._fans import fans as count_fans
from musigma.init.schemes._fixed import normal_law, uniform_law
from musigma.init.schemes._scheme import Law, Sample

SHAPE_SAMPLES = (
    Sample((60, 50)),
    Sample((63, 1)),
    Sample((1, 100)),
    Sample((24, 5, 3, 3)),
    Sample((16, 7, 5)),
    Sample((5,), error=ValueError),
)
GIVEN_FANS = Sample((60, 50), {"fans": Fans(9, 16)})
BAD_FANS = Sample((60, 50), {"fans": Fans(0, 0)}, error=ValueError)
FAN_SAMPLES = (
    *SHAPE_SAMPLES,
    GIVEN_FANS,
    BAD_FANS,
    Sample((60, 50), {"gain": 1.7}),
    Sample((6, 5), {"gain": -1.0}, error=ValueError),
)


def fan_std(w: Tensor, fans: FansLike | None, mode: str, gain: float) -> float:
    """Standard deviation gain/√fan for the fan that a mode names.

    Args:
        w: the weight.
        fans: its effective fans; None counts them from the shape.
        mode: "fan_in", "fan_out" or "fan_avg", the mean of both.
        gain: factor, at least 0.

    Returns:
        The standard deviation.

    Raises:
        ValueError: gain negative or not finite, fans not positive, unknown mode.

    Example:
        >>> import torch
        >>> fan_std(torch.empty(4, 16), None, "fan_in", 2.0)
        0.5

    References:
        Glorot & Bengio 2010; He et al. 2015.
    """
    if not 0 <= gain < math.inf:
        raise ValueError(f"gain must be finite and at least 0, got {gain}")
    fan_in, fan_out = count_fans(w) if fans is None else fans
    if not (0 < fan_in < math.inf and 0 < fan_out < math.inf):
        raise ValueError(
            f"fans must be positive for a weight with elements, got fan_in={fan_in}, fan_out={fan_out} "
            f"for shape {tuple(w.shape)}"
        )
    choices = {"fan_in": fan_in, "fan_out": fan_out, "fan_avg": (fan_in + fan_out) / 2}
    if mode not in choices:
        raise ValueError(f"Mode {mode} not supported, please use one of {list(choices)}")
    return gain / math.sqrt(choices[mode])


def scaled_normal_law(var: float) -> Law:
    """Law of N(0, var).

    Args:
        var: variance.

    Returns:
        The law.

    Example:
        >>> scaled_normal_law(0.25).std
        0.5

    References:
        None.
    """
    return normal_law(0.0, math.sqrt(var))


def scaled_uniform_law(var: float) -> Law:
    """Law of the centered uniform distribution of a given variance: bounds ±√(3·var).

    Args:
        var: variance.

    Returns:
        The law.

    Example:
        >>> scaled_uniform_law(3.0).high
        3.0

    References:
        None.
    """
    bound = math.sqrt(3 * var)
    return uniform_law(-bound, bound)
