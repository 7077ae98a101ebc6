"""By how much an activation shrinks a signal, for any activation."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from musigma.init.meanfield._activations import Activation, canonical_name, resolve
from musigma.init.meanfield._quadrature import expect

# 1/√E[φ(z)²], z ~ N(0, 1): a cache of what the quadrature gives (tests/init/test_gains.py holds it to that).
GAINS: dict[str, float] = {
    "elu": 1.2451983007007066,
    "gelu": 1.5335304411955353,
    "gelu_tanh": 1.5335805216661471,
    "hardtanh": 1.3920361404483097,
    "identity": 1.0,
    "leaky_relu": 1.4141428569978354,
    "mish": 1.486847581273208,
    "relu": math.sqrt(2.0),
    "relu_squared": 0.8164965809277261,
    "selu": 1.0,
    "sigmoid": 1.8462285453386054,
    "silu": 1.6765324703310913,
    "softplus": 1.0418668355353016,
    "softsign": 2.3375333631085398,
    "tanh": 1.5925374197228315,
}


class ActivationMoments(NamedTuple):
    """What an activation makes of a normal pre-activation: E[φ(z)] and E[φ(z)²].

    Example:
        >>> import torch, musigma as ms
        >>> ms.init.ActivationMoments(0.5, 1.25).var
        1.0
    """

    mean: float
    mean_square: float

    @property
    def var(self) -> float:
        """Variance of the activation, E[φ²] − E[φ]²."""
        return self.mean_square - self.mean**2


def moments_of(activation: Activation, mean: float = 0.0, std: float = 1.0) -> ActivationMoments:
    """First two moments of φ(z) for z ~ N(mean, std²).

    Law: E[φ(z)] = ∫ φ(mean + std·t) e^(−t²/2)/√(2π) dt, and the same with φ².

    Args:
        activation: a name, (name, keywords), a callable or an activation module.
        mean: mean of the pre-activation.
        std: its standard deviation, at least 0.

    Returns:
        The two moments, to about ten digits.

    Raises:
        ValueError: unknown name; std negative or not finite; φ not finite, or its square not integrable.
        TypeError: φ is not a fixed elementwise function.

    Example:
        >>> import torch, musigma as ms
        >>> m = ms.init.moments_of("relu")
        >>> round(m.mean, 6), round(m.mean_square, 6)      # 1/√(2π), 1/2
        (0.398942, 0.5)

    References:
        Poole et al. 2016, eq. 3 (the variance map).
    """
    if not (math.isfinite(mean) and 0 <= std < math.inf):
        raise ValueError(f"mean and std must be finite and std at least 0, got mean={mean}, std={std}")
    function, label = resolve(activation)

    def both(z: Tensor) -> Tensor:
        out = function(z)
        return torch.stack([out, out.square()])

    if std == 0:
        first, second = both(torch.tensor([mean], dtype=torch.float64, device="cpu")).squeeze(-1).tolist()
    else:
        first, second = expect(both, mean, std, label).tolist()
    return ActivationMoments(first, second)


def gain(activation: Activation) -> float:
    """The factor on the weights' standard deviation that makes up for an activation, forward.

    With Var(W) = gain²/fan_in a layer whose pre-activations are N(0, 1) gives the next one N(0, 1) too.

    Law: gain = 1/√E[φ(z)²], z ~ N(0, 1).

    It differs from `torch.nn.init.calculate_gain` where that is no second-moment gain: tanh 1.5925
    (torch 5/3), sigmoid 1.8462 (torch 1), selu 1.0000 (torch 3/4, which breaks self-normalization),
    and in that it knows every activation.

    Args:
        activation: a name, (name, keywords), a callable or an activation module; "linear" and torch's
            layer names ("conv2d") have gain 1.

    Returns:
        The gain.

    Raises:
        ValueError: unknown name; φ is 0 almost everywhere, not finite or not square-integrable.
        TypeError: φ is not a fixed elementwise function.

    Example:
        >>> import torch, musigma as ms
        >>> round(ms.init.gain("relu"), 4), round(ms.init.gain("gelu"), 4), round(ms.init.gain(torch.sin), 4)
        (1.4142, 1.5335, 1.5209)

    References:
        He et al. 2015, eq. 10 (ReLU); Klambauer et al. 2017 (SELU); pytorch/pytorch#24991.
    """
    if isinstance(activation, str):
        name = canonical_name(activation)
        if name in GAINS:
            return GAINS[name]
    mean_square = moments_of(activation).mean_square
    if mean_square == 0.0:
        raise ValueError(
            f"an activation must pass something on, but {activation!r} is 0 for (almost) every z ~ N(0, 1); "
            f"no gain makes up for that"
        )
    return 1 / math.sqrt(mean_square)
