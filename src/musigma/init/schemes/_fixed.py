"""Schemes of a fixed spread, whatever the layer's size: what was done before fan-in was counted."""

import math

import torch
from torch import Tensor

from musigma.init.schemes._draw import fill_normal, fill_uniform
from musigma.init.schemes._scheme import Law, Sample, Setting, scheme

_ANY_SHAPE = (Sample((60, 50)), Sample((100,)), Sample((8, 3, 5, 7)))


def normal_law(mean: float, std: float) -> Law:
    """Law of N(mean, std²).

    Args:
        mean: expected value.
        std: standard deviation.

    Returns:
        The law; a normal's kurtosis is 3.

    Example:
        >>> normal_law(0.0, 0.5).var
        0.25

    References:
        None.
    """
    return Law(mean, std**2, kurtosis=3.0)


def uniform_law(low: float, high: float) -> Law:
    """Law of U[low, high]: variance (high − low)²/12, kurtosis 9/5.

    Args:
        low: lower bound.
        high: upper bound.

    Returns:
        The law.

    Example:
        >>> uniform_law(0.0, 6.0).var
        3.0

    References:
        None.
    """
    return Law((low + high) / 2, (high - low) ** 2 / 12, kurtosis=1.8, low=low, high=high)


def _uniform_options(setting: Setting) -> Law:
    return uniform_law(float(setting.options["low"]), float(setting.options["high"]))


def _normal_options(setting: Setting) -> Law:
    return normal_law(float(setting.options["mean"]), float(setting.options["std"]))


@scheme(
    law=_uniform_options,
    formula="w ~ U[low, high], default U[0, 1]",
    source="lecture notes, section 7.2",
    samples=(
        *_ANY_SHAPE,
        Sample((63, 9), {"low": -3.0, "high": -1.0}),
        Sample((4,), {"low": 1.0, "high": 0.0}, error=RuntimeError),
        Sample((4,), {"low": 0.0, "high": math.nan}, error=RuntimeError),
    ),
)
def uniform_(
    w: Tensor, *, low: float = 0.0, high: float = 1.0, generator: torch.Generator | None = None
) -> Tensor:
    """Write independent uniform numbers; by default U[0, 1], the oldest and worst choice.

    U[0, 1] is not centered: with fan_in inputs of one sign the pre-activations share a mean that grows
    as fan_in/2, and the spread is independent of the layer's size.

    Law: mean (low+high)/2, Var = (high−low)²/12.

    Args:
        w: (*), any floating dtype.
        low: lower bound.
        high: upper bound.
        generator: source of randomness; default: torch's own.

    Returns:
        w, written in place.

    Raises:
        RuntimeError: low > high, or a bound is NaN.

    Example:
        >>> import torch, musigma as ms
        >>> w = ms.init.uniform_(torch.empty(1000), low=-1.0, high=1.0)
        >>> bool((w.abs() <= 1).all())
        True

    References:
        Lecture notes, section 7.2.
    """
    fill_uniform(w, low, high, generator)
    return w


@scheme(
    law=lambda setting: uniform_law(-0.5, 0.5),
    formula="w ~ U[−0.5, 0.5]",
    source="lecture notes, section 7.2",
    samples=_ANY_SHAPE,
)
def uniform_centered_(w: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
    """Write U[−0.5, 0.5]: centered, but as wide in a layer of 10 inputs as in one of 10,000.

    Law: mean 0, Var = 1/12.

    Args:
        w: (*), any floating dtype.
        generator: source of randomness; default: torch's own.

    Returns:
        w, written in place.

    Example:
        >>> import torch, musigma as ms
        >>> bool((ms.init.uniform_centered_(torch.empty(1000)).abs() <= 0.5).all())
        True

    References:
        Lecture notes, section 7.2.
    """
    fill_uniform(w, -0.5, 0.5, generator)
    return w


@scheme(
    law=_normal_options,
    formula="w ~ N(mean, std²), default N(0, 1)",
    source="lecture notes, section 7.2",
    samples=(
        *_ANY_SHAPE,
        Sample((63, 9), {"mean": 2.0, "std": 0.5}),
        Sample((4,), {"std": -1.0}, error=RuntimeError),
        Sample((4,), {"std": math.nan}, error=RuntimeError),
    ),
)
def normal_(
    w: Tensor, *, mean: float = 0.0, std: float = 1.0, generator: torch.Generator | None = None
) -> Tensor:
    """Write independent normal numbers of a given mean and standard deviation.

    Law: mean, Var = std².

    Args:
        w: (*), any floating dtype.
        mean: expected value.
        std: standard deviation (not the variance).
        generator: source of randomness; default: torch's own.

    Returns:
        w, written in place.

    Raises:
        RuntimeError: std is negative or NaN.

    Example:
        >>> import torch, musigma as ms
        >>> ms.init.normal_(torch.empty(2), mean=3.0, std=0.0)
        tensor([3., 3.])

    References:
        Lecture notes, section 7.2.
    """
    fill_normal(w, mean, std, generator)
    return w


@scheme(
    law=lambda setting: normal_law(0.0, 0.1),
    formula="w ~ N(0, 0.1²)",
    source="lecture notes, section 7.2",
    samples=_ANY_SHAPE,
)
def normal_tenth_(w: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
    """Write N(0, 0.1²), one of the two small Gaussians of the lecture notes.

    The notes speak of a variance of 0.1, torch's second argument is the standard deviation; this is the
    usual reading, std = 0.1. For the other one write `normal_(w, std=0.1**0.5)`.

    Law: mean 0, Var = 0.01.

    Args:
        w: (*), any floating dtype.
        generator: source of randomness; default: torch's own.

    Returns:
        w, written in place.

    Example:
        >>> import torch, musigma as ms
        >>> g = torch.Generator().manual_seed(0)
        >>> w = ms.init.normal_tenth_(torch.empty(300, 400), generator=g)
        >>> round(ms.moments(w, None).std().item(), 2)
        0.1

    References:
        Lecture notes, section 7.2.
    """
    fill_normal(w, 0.0, 0.1, generator)
    return w


@scheme(
    law=lambda setting: normal_law(0.0, 0.01),
    formula="w ~ N(0, 0.01²)",
    source="lecture notes, section 7.2",
    samples=_ANY_SHAPE,
)
def normal_hundredth_(w: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
    """Write N(0, 0.01²), the smaller of the two small Gaussians of the lecture notes.

    A layer of fan_in inputs multiplies the standard deviation by 0.01·√fan_in: 0.1 at a hundred
    inputs, so the signal is gone after a few layers. `normal_tenth_` says how the notes' variance reads.

    Law: mean 0, Var = 0.0001.

    Args:
        w: (*), any floating dtype.
        generator: source of randomness; default: torch's own.

    Returns:
        w, written in place.

    Example:
        >>> import torch, musigma as ms
        >>> g = torch.Generator().manual_seed(0)
        >>> w = ms.init.normal_hundredth_(torch.empty(300, 400), generator=g)
        >>> round(ms.moments(w, None).std().item(), 3)
        0.01

    References:
        Lecture notes, section 7.2; Krizhevsky et al. 2012 (AlexNet's weights).
    """
    fill_normal(w, 0.0, 0.01, generator)
    return w
