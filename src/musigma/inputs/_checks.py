"""What an array, its weights and its mask must be before anything is added up."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from musigma.inputs._arrays import Data, as_data
from musigma.inputs._tally import feature_count, labels


def check_parameters(missing: Any, clip: Any) -> None:
    """What the constructor stored unseen."""
    if missing not in ("keep", "raise"):
        raise ValueError(f'missing must be "keep" or "raise", got {missing!r}')
    if clip is not None and not clip > 0:
        raise ValueError(f"clip must be positive, got {clip}; None does not clip")


def kept_dims(axis: Any, data: Data) -> tuple[int, ...]:
    """The axes with statistics of their own, counted from the front, in the order given.

    Raises:
        TypeError: axis is no integer, tuple of integers or None.
        ValueError: an axis does not exist, stands twice or is the first, along which examples run.
    """
    ndim = len(data.shape)
    asked = () if axis is None else tuple(axis) if isinstance(axis, (tuple, list)) else (axis,)
    if not all(type(a) is int for a in asked):
        raise TypeError(f"axis must be an integer, a tuple of integers or None, got {axis!r}")
    if ndim == 0 or not all(-ndim <= a < ndim for a in asked) or (ndim == 1 and asked):
        need = max((a + 1 if a >= 0 else -a for a in asked), default=1)
        raise ValueError(
            f"Expected {max(need, 2 if asked else 1)}D array, got {ndim}D array instead (shape {data.shape}, "
            f"axis={axis}). Reshape your data: x.reshape(-1, 1) for a single feature, x.reshape(1, -1) for a "
            "single example; axis=None takes everything as one feature."
        )
    dims = tuple(a % ndim for a in asked)
    if 0 in dims or len(set(dims)) != len(dims):
        raise ValueError(
            f"axis={axis} must name each axis once and not the first, which runs over examples; "
            f"got shape {data.shape}"
        )
    return dims


def feature_shape(data: Data, dims: tuple[int, ...]) -> tuple[int, ...]:
    """The sizes of the kept axes; none may be 0."""
    shape = tuple(data.shape[d] for d in dims)
    if feature_count(shape) == 0:
        raise ValueError(
            f"Found array with 0 feature(s) (shape={data.shape}) while a minimum of 1 is required."
        )
    return shape


def require_features(got: tuple[int, ...], expected: tuple[int, ...], what: str) -> None:
    """The same features as before, both numbers named if not."""
    if got != expected:
        one = len(got) == len(expected) == 1
        seen, want = (got[0], expected[0]) if one else (got, expected)
        raise ValueError(
            f"{what} has {seen} features, but Standardizer is expecting {want} features as input"
        )


def as_weights(sample_weight: Any, data: Data) -> Tensor | None:
    """One finite, non-negative float64 weight per example: (n,)."""
    if sample_weight is None:
        return None
    given = as_data(sample_weight)
    n = data.shape[0]
    if given.shape not in ((), (n,)):
        raise ValueError(f"sample_weight must have shape ({n},), one weight per example; got {given.shape}")
    weights = given.block(...).detach().to(torch.float64).expand(n)
    bad = (~(weights.isfinite() & (weights >= 0))).nonzero().reshape(-1).tolist()
    if bad:
        raise ValueError(
            f"weights must be finite and not negative; got {weights[bad[0]].item()} at example {bad[0]}"
            + (f" and {len(bad) - 1} more" if len(bad) > 1 else "")
        )
    return weights


def as_mask(mask: Any, data: Data) -> Tensor | None:
    """A boolean tensor expanded to the shape of the data, as a view."""
    if mask is None:
        return None
    given = as_data(mask)
    whole = given.array if isinstance(given.array, Tensor) else torch.from_numpy(given.array.copy())
    if whole.dtype != torch.bool:
        raise TypeError(
            f"mask must be boolean (True takes part), got {whole.dtype}; weights go in sample_weight"
        )
    try:
        return whole.expand(data.shape)
    except RuntimeError:
        raise ValueError(f"mask must broadcast to x: {tuple(whole.shape)} against {data.shape}") from None


def refuse_infinite(
    x: Tensor, weight: Tensor | None, shape: tuple[int, ...], columns: list[str] | None
) -> None:
    """Infinities among the values that take part, (values, features), are named by feature."""
    if x.is_floating_point():
        _refuse(
            x.isinf(), weight, shape, columns, "infinite", "replace them by NaN (missing) or drop the rows"
        )


def refuse_missing(
    x: Tensor, weight: Tensor | None, shape: tuple[int, ...], columns: list[str] | None
) -> None:
    """NaN among the values that take part, named by feature."""
    if x.is_floating_point():
        _refuse(x.isnan(), weight, shape, columns, "NaN", 'missing="keep" leaves them out')


def _refuse(
    bad: Tensor,
    weight: Tensor | None,
    shape: tuple[int, ...],
    columns: list[str] | None,
    what: str,
    fix: str,
) -> None:
    if weight is not None:
        bad = bad & (weight != 0)
    if bad.any():
        raise ValueError(
            f"Input contains {what} values ({'infinity' if what == 'infinite' else what}): "
            f"{int(bad.sum())} of them in {labels(bad.any(0), shape, columns)}; {fix}"
        )
