"""Matrices that keep lengths."""

import math

import torch
from torch import Tensor

from musigma.init.schemes._draw import standard_normal
from musigma.init.schemes._scheme import Law, Sample, Setting, scheme


def matrix_shape(w: Tensor, groups: int) -> tuple[int, int]:
    """Rows and columns of each of the stacked matrices that a weight (groups·rows, *) holds.

    Args:
        w: weight, flattened from the second dimension on.
        groups: number of equal blocks along the first dimension.

    Returns:
        (rows, columns) of one block.

    Raises:
        ValueError: fewer than two dimensions, or the first is not divisible by groups.

    Example:
        >>> matrix_shape(torch.empty(6, 2, 3), 2)
        (3, 6)

    References:
        None.
    """
    if w.dim() < 2:
        raise ValueError(
            f"Only tensors with 2 or more dimensions are supported, got shape {tuple(w.shape)}; "
            f"a bias or a norm's weight holds no matrix"
        )
    require_groups(w, groups)
    return w.shape[0] // groups, math.prod(w.shape[1:])


def require_groups(w: Tensor, groups: int) -> None:
    """Refuse a number of blocks that does not divide the first dimension.

    Args:
        w: weight.
        groups: number of equal blocks along the first dimension.

    Raises:
        ValueError: it doesn't.

    Example:
        >>> require_groups(torch.empty(6, 2), 3)

    References:
        None.
    """
    if groups < 1 or w.shape[0] % groups:
        # torch's dirac_ says "dim 0 must be divisible by groups".
        raise ValueError(f"dim 0 must be divisible by groups: {w.shape[0]} is not by {groups}")


def _require_gain(gain: float) -> None:
    if not math.isfinite(gain):
        raise ValueError(f"gain must be finite, got {gain}; it is the singular value of what is written")


def _haar(groups: int, rows: int, columns: int, w: Tensor, generator: torch.Generator | None) -> Tensor:
    """Random (groups, rows, columns) matrices with orthonormal rows or columns, whichever are fewer."""
    # Always float64: float32 weights then keep lengths to their own rounding, and are the float64 ones
    # rounded.
    z = standard_normal((groups, max(rows, columns), min(rows, columns)), w, generator)
    q, r = torch.linalg.qr(z)
    # QR leaves signs to the algorithm; with a positive diagonal of R the factor is unique, hence uniform.
    diagonal = r.diagonal(dim1=-2, dim2=-1)
    q = q * torch.where(diagonal < 0, -1.0, 1.0).unsqueeze(-2)
    return q.mT if rows < columns else q


def _orthogonal_law(setting: Setting) -> Law:
    rows, columns = setting.shape[0] // setting.options["groups"], math.prod(setting.shape[1:])
    gain = abs(setting.options["gain"])
    # One entry of a uniformly random unit vector in n dimensions has kurtosis 3n/(n + 2).
    n = max(rows, columns)
    return Law(0.0, gain**2 / n, kurtosis=3 * n / (n + 2), low=-gain, high=gain)


_GROUPED = (
    Sample((60, 50)),
    Sample((50, 60)),
    Sample((63, 7), {"gain": 1.5}),
    Sample((24, 5, 3, 3)),
    Sample((24, 1, 3, 3), {"groups": 24}),
    Sample((60, 20), {"groups": 3}),
    Sample((5,), error=ValueError),
    Sample((4, 4), {"groups": 3}, error=ValueError),
    Sample((4, 4), {"groups": 0}, error=ValueError),
    Sample((4, 4), {"gain": math.inf}, error=ValueError),
)


@scheme(
    law=_orthogonal_law,
    formula="W Wᵀ = gain²·I or Wᵀ W = gain²·I, Var = gain²/max(rows, columns)",
    source="Saxe et al. 2014",
    samples=_GROUPED,
)
def orthogonal_(
    w: Tensor, *, gain: float = 1.0, groups: int = 1, generator: torch.Generator | None = None
) -> Tensor:
    """Write a uniformly random orthogonal matrix: every singular value equals the gain.

    A square one keeps the length of every vector exactly, forward and backward, at any depth; a tall one
    forward, a wide one backward.

    Law: W Wᵀ = gain²·I (rows ≤ columns) or Wᵀ W = gain²·I; mean 0, Var = gain²/max(rows, columns).

    Args:
        w: (out, in, *kernel), flattened to (out, in·Πkernel); any floating dtype. The QR decomposition is
            done in float64, then rounded.
        gain: the singular value.
        groups: number of equal blocks along dim 0, each a matrix by itself: a convolution's groups, 3 for
            packed query, key and value, 4 for an LSTM's gates.
        generator: source of randomness; default: torch's own.

    Returns:
        w, written in place.

    Raises:
        ValueError: fewer than two dimensions, dim 0 not divisible by groups, gain not finite.

    Example:
        >>> import torch, musigma as ms
        >>> w = ms.init.orthogonal_(torch.empty(3, 5))
        >>> bool(torch.allclose(w @ w.T, torch.eye(3), atol=1e-6))
        True

    References:
        Saxe, McClelland & Ganguli 2014; Mezzadri 2007 (the sign of R); Le, Jaitly & Hinton 2015.
    """
    _require_gain(gain)
    rows, columns = matrix_shape(w, groups)
    if not w.is_meta:
        w.copy_((gain * _haar(groups, rows, columns, w, generator)).reshape(w.shape))
    return w


def _delta_law(setting: Setting) -> Law:
    gain = abs(setting.options["gain"])
    rows, columns = setting.shape[0] // setting.options["groups"], setting.shape[1]
    taps = math.prod(setting.shape[2:])
    n = max(rows, columns)
    # All but one tap are 0: both moments of that tap's entries are diluted by the number of taps.
    return Law(0.0, gain**2 / (n * taps), kurtosis=3 * n / (n + 2) * taps, low=-gain, high=gain)


@scheme(
    law=_delta_law,
    formula="central tap orthogonal, the others 0",
    source="Xiao et al. 2018",
    samples=(
        Sample((24, 20, 3, 3)),
        Sample((20, 24, 5)),
        Sample((6, 5, 1, 3, 2)),
        Sample((24, 5, 3, 3), {"groups": 2, "gain": 2.0}),
        Sample((4, 4), error=ValueError),
        Sample((2, 2, 2, 2, 2, 2), error=ValueError),
        Sample((4, 4, 3), {"groups": 3}, error=ValueError),
        Sample((4, 4, 3), {"gain": math.nan}, error=ValueError),
    ),
)
def delta_orthogonal_(
    w: Tensor, *, gain: float = 1.0, groups: int = 1, generator: torch.Generator | None = None
) -> Tensor:
    """Write a convolution that mixes channels by an orthogonal matrix and doesn't mix positions.

    With circular padding and stride 1 it keeps the norm of every feature map exactly if no group has more
    inputs than outputs; else the gradient's. (An orthogonal *flattened* kernel does neither.)

    Law: W[:, :, center] orthogonal·gain, 0 elsewhere; mean 0, Var = gain²/(max(out, in)·Πkernel).

    Args:
        w: (out, in, *kernel) with one to three kernel dimensions, any floating dtype.
        gain: the singular value.
        groups: the convolution's groups.
        generator: source of randomness; default: torch's own.

    Returns:
        w, written in place. The center is kernel_size // 2, as in torch.nn.init.dirac_.

    Raises:
        ValueError: not three to five dimensions, dim 0 not divisible by groups, gain not finite.

    Example:
        >>> import torch, musigma as ms
        >>> w = ms.init.delta_orthogonal_(torch.empty(4, 4, 3))
        >>> bool(torch.allclose(w[:, :, 1] @ w[:, :, 1].T, torch.eye(4), atol=1e-6))
        True

    References:
        Xiao et al. 2018, Dynamical Isometry and a Mean Field Theory of CNNs, algorithm 1.
    """
    _require_gain(gain)
    center = central_tap(w)
    require_groups(w, groups)
    if not w.is_meta:
        q = gain * _haar(groups, w.shape[0] // groups, w.shape[1], w, generator)
        w.zero_()[center] = q.reshape(w.shape[:2]).to(w)
    return w


def central_tap(w: Tensor) -> tuple[slice | int, ...]:
    """The index of a kernel's central tap, for all outputs and inputs.

    Args:
        w: (out, in, *kernel) with one to three kernel dimensions.

    Returns:
        An index that leaves (out, in).

    Raises:
        ValueError: not three to five dimensions.

    Example:
        >>> central_tap(torch.empty(1, 1, 3, 5))
        (slice(None, None, None), slice(None, None, None), 1, 2)

    References:
        None.
    """
    if w.dim() not in (3, 4, 5):
        raise ValueError(
            f"Only tensors with 3, 4, or 5 dimensions are supported, got shape {tuple(w.shape)}; "
            f"for a matrix use orthogonal_ or identity_"
        )
    return (slice(None), slice(None), *(size // 2 for size in w.shape[2:]))
