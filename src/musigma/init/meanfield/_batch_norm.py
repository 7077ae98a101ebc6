"""How fast gradients grow in nets of BatchNorm."""

import math

import torch
from torch import Tensor

from musigma.init.meanfield._activations import Activation
from musigma.init.meanfield._curve import Curve, curve_of

# Points an axis of the two-dimensional rule for small batches, in equal shares of the probability.
_POINTS = 2048


def batch_norm_growth(activation: Activation, *, batch: int | None = None) -> float:
    """Factor on a gradient's variance per layer, backward, of linear → BatchNorm → φ without skips.

    Law: E[φ'(z)²]/Var[φ(z)], z ~ N(0, 1), for a large batch. It is at least 1, and 1 for a linear φ only:
    BatchNorm divides by the spread it finds, and a nonlinear φ's slope is more than its spread. No weight
    variance changes it, since BatchNorm takes that out.

    With a batch of B the normalized values lie on a sphere in the B − 1 dimensions without the mean: see
    the references. A linear φ has (B − 2)/(B − 3).

    Args:
        activation: φ: a name, (name, keywords), a callable or an activation module.
        batch: examples BatchNorm takes its statistics over, at least 4; None for very many.

    Returns:
        The factor: 50 layers of ReLU multiply a gradient's variance by (π/(π − 1))⁵⁰ = 2·10⁸.

    Raises:
        ValueError: batch below 4 (the factor is infinite); φ is constant; unknown name; φ or φ' not finite.
        TypeError: φ is not a fixed elementwise function.

    Example:
        >>> import torch, musigma as ms
        >>> round(ms.init.meanfield.batch_norm_growth("relu"), 6)      # π/(π − 1)
        1.466942

    References:
        Yang et al. 2019, A mean field theory of batch normalization.
    """
    if batch is not None and batch < 4:
        raise ValueError(f"batch must be at least 4, got {batch}: with fewer the expected factor is infinite")
    curve = curve_of(activation)
    point = curve.point(1.0)
    spread = point.square - point.mean**2
    if not spread > 1e-14 * point.square:
        raise ValueError(f"BatchNorm needs something that varies, but {curve.label} gives one value only")
    if batch is None:
        return point.slope_square / spread
    return curve.remember(("batch norm", batch), lambda: _of_batch(curve, batch))


def _of_batch(curve: Curve, batch: int) -> float:
    """The factor with the batch's own sphere: y = √B·u, u uniform on the unit sphere orthogonal to 1.

    The backward pass through BatchNorm is (√B/r)(1 − 11ᵀ/B − uuᵀ), with r² = s²χ²(B−1) independent of u
    and s² = σw²(E[φ₁²] − E[φ₁φ₂]); what comes from above is normal with covariance 1 − 11ᵀ/B over the batch.
    """
    first, second = _two_of(batch)
    pair, _, _ = curve.pair
    (value, slope), (value2, slope2) = pair(first), pair(second)
    at, between = _mean(slope**2), _mean(slope * slope2)
    aligned, crossed = _mean((first * slope) ** 2), _mean(first * second * slope * slope2)
    spread = _mean(value**2) - _mean(value * value2)
    kept = (batch - 1) * at - at + (at + (batch - 1) * between) / batch
    kept -= aligned - (aligned + (batch - 1) * crossed) / batch
    return batch * kept / ((batch - 3) * (batch - 1) * spread)


def _two_of(batch: int) -> tuple[Tensor, Tensor]:
    """Two coordinates of y on a grid of equal shares: their sum and difference lie in a disc."""
    shares = (torch.arange(_POINTS, dtype=torch.float64, device="cpu") + 0.5) / _POINTS
    # P(1 − ρ² ≤ s) = s^((B−3)/2) for two coordinates of a unit vector in B − 1 dimensions.
    radius = (1 - shares ** (2 / (batch - 3))).clamp_min(0).sqrt()
    angle = 2 * math.pi * shares
    total = (radius[:, None] * torch.cos(angle)).flatten() * math.sqrt((batch - 2) / 2)
    difference = (radius[:, None] * torch.sin(angle)).flatten() * math.sqrt(batch / 2)
    return total + difference, total - difference


def _mean(x: Tensor) -> float:
    return x.mean().item()
