"""Fixed standardization of a model's input, and its inverse, as modules with buffers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from jaxtyping import Shaped
from numpy.typing import NDArray
from torch import Tensor

Dims: TypeAlias = int | Sequence[int] | None
"""The dim or dims with a statistic of their own; None for one statistic over everything."""

Statistic: TypeAlias = Tensor | NDArray[Any] | Sequence[Any] | float

F = TypeVar("F", bound="_Fixed")

STATISTICS = ("mean", "mean_tail", "scale")

# Integers of these types are exact in float32's 24 bits; the wider ones need float64.
_NARROW = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16})
_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


def output_dtype(x: Tensor, otherwise: torch.dtype = torch.float32) -> torch.dtype:
    """x's own type if it is one of the usual floats, else `otherwise` (integers, booleans, 8-bit floats)."""
    return x.dtype if x.dtype in _FLOATS else otherwise


def _arithmetic_dtype(x: Tensor) -> torch.dtype:
    if x.device.type == "mps" or x.dtype in _NARROW or x.dtype.itemsize < 4 or x.dtype == torch.float32:
        return torch.float32
    return torch.float64


def split_integers(x: Tensor) -> tuple[Tensor, Tensor]:
    """64-bit integers as two float64 tensors with x = high + low exactly (float64 alone stops at 2⁵³).

    `high` is x rounded and `low` what that lost: the plain halves of −3 are −2³² and 2³² − 3, and whatever is
    subtracted from either is rounded to 2⁻²⁰.
    """
    bits = x.view(torch.int64)
    upper, lower = bits >> 32, bits & 0xFFFFFFFF
    if x.dtype == torch.uint64:
        upper = upper & 0xFFFFFFFF
    large, small = upper.to(torch.float64) * 2.0**32, lower.to(torch.float64)
    high = large + small
    return high, small - (high - large)  # fast two-sum (Dekker): exact, for large is 0 or above small


def standardize(x: Tensor, mean: Tensor, tail: Tensor, scale: Tensor) -> Tensor:
    """(x − mean − tail) / scale, in float32 or wider; the statistics broadcast against x.

    The mean is subtracted in two parts. One float32 part would leave an error of ½ ulp(mean), which for a
    mean of 10⁶ standard deviations is 4·10⁴ ulp of the result; x − high is exact when x is near the mean
    (Sterbenz), and the rest is small.
    """
    if x.dtype in (torch.int64, torch.uint64) and x.device.type != "mps":
        high, low = split_integers(x)
        return ((high - mean) + (low - tail)) / scale
    dtype = _arithmetic_dtype(x)
    high = mean.to(dtype)
    low = ((mean - high.to(mean.dtype)) + tail).to(dtype)
    return ((x.to(dtype) - high) - low) / scale.to(dtype)


def unstandardize(z: Tensor, mean: Tensor, tail: Tensor, scale: Tensor) -> Tensor:
    """z · scale + mean + tail, in float32 or wider; the statistics broadcast against z."""
    dtype = _arithmetic_dtype(z)
    high = mean.to(dtype)
    low = ((mean - high.to(mean.dtype)) + tail).to(dtype)
    return (z.to(dtype) * scale.to(dtype) + low) + high


def align(statistic: Tensor, dims: Sequence[int], ndim: int) -> Tensor:
    """A statistic with one axis for each of `dims`, in their order, shaped to meet an ndim-tensor."""
    places = [dim % ndim for dim in dims]
    order = sorted(range(len(places)), key=places.__getitem__)
    shape = [1] * ndim
    for axis in order:
        shape[places[axis]] = statistic.shape[axis]
    return statistic.permute(order).reshape(shape)


def _statistic(value: Any, name: str, device: torch.device | None) -> Tensor:
    tensor = value if isinstance(value, Tensor) else torch.from_numpy(np.array(value))
    if tensor.is_complex():
        raise TypeError(f"{name} must be real, got {tensor.dtype}")
    where = device if device is not None or isinstance(value, Tensor) else torch.get_default_device()
    return tensor.detach().to(device=where, dtype=torch.float64, copy=True)


def _together(
    mean: Statistic, scale: Statistic, mean_tail: Statistic | None, device: torch.device | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, its tail and scale as float64 copies of one shape, or what is wrong with them."""
    means, scales = _statistic(mean, "mean", device), _statistic(scale, "scale", device)
    tail = torch.zeros_like(means) if mean_tail is None else _statistic(mean_tail, "mean_tail", device)
    shape = max(means.shape, scales.shape, key=len)  # a number stands for all
    if means.shape not in ((), shape) or scales.shape not in ((), shape) or tail.shape not in ((), shape):
        raise ValueError(
            f"mean and scale must be of the same features; got mean {tuple(means.shape)} and scale "
            f"{tuple(scales.shape)}"
        )
    fault = _faults(means, scales)
    if fault is not None:
        raise ValueError(fault)
    whole = [t.expand(shape).contiguous() for t in (means, tail, scales)]
    return whole[0], whole[1], whole[2]


def _faults(mean: Tensor, scale: Tensor) -> str | None:
    """What is wrong with these statistics, or None; a meta tensor has no values to be wrong."""
    if mean.is_meta or scale.is_meta:
        return None
    for name, value, bad, fix in (
        ("mean", mean, ~mean.isfinite(), "drop the features that were never observed"),
        ("scale", scale, ~(scale.isfinite() & (scale > 0)), "a constant feature takes scale 1"),
    ):
        where = bad.nonzero().tolist()
        if where:
            at = where[0][0] if len(where[0]) == 1 else tuple(where[0])
            rule = "positive and finite" if name == "scale" else "finite"
            got = value[tuple(where[0])].item()
            more = f" and {len(where) - 1} more" if len(where) > 1 else ""
            return f"{name} must be {rule}, got {got} at index {at}{more}; {fix}"
    return None


class _Fixed(torch.nn.Module):
    """A mean and a scale per channel that training, casting and loading leave as exact as they came."""

    mean: Tensor
    mean_tail: Tensor
    scale: Tensor
    _like: Tensor

    def __init__(
        self,
        mean: Statistic,
        scale: Statistic,
        *,
        dim: Dims = 1,
        clip: float | None = None,
        mean_tail: Statistic | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        device = None if device is None else torch.device(device)
        self.dim = dim if dim is None or isinstance(dim, int) else tuple(dim)
        self._dims = () if dim is None else (dim,) if isinstance(dim, int) else tuple(dim)
        buffers = _together(mean, scale, mean_tail, device)
        if len(self._dims) != buffers[0].dim():
            raise ValueError(
                f"mean and scale need one axis for each of dim={self.dim}, got {tuple(buffers[0].shape)}"
            )
        if clip is not None and not clip > 0:
            raise ValueError(f"clip must be positive, got {clip}; None does not clip")
        self.clip = clip
        for name, value in zip(STATISTICS, buffers, strict=True):
            self.register_buffer(name, value)
        # Follows .half(), .to(dtype) and the like: the type that integer inputs come out in.
        self.register_buffer(
            "_like", torch.empty(0, dtype=torch.float32, device=buffers[0].device), persistent=False
        )

    @classmethod
    def from_standardizer(
        cls: type[F], fitted: Any, *, dim: Dims = 1, device: torch.device | str | None = None
    ) -> F:
        """The module that does what a fitted scaler's ``transform`` does (or, for the inverse, undoes).

        Args:
            fitted: anything with ``mean_`` and ``scale_``, None where it does not center or scale:
                scikit-learn's StandardScaler as well as ``musigma.inputs.Standardizer`` (whose own
                ``.layer()`` also knows its axis and the second part of its mean).
            dim: the dim of the features.
            device: where the buffers live.

        Raises:
            ValueError: it neither centers nor scales, or a statistic is not finite.

        Example:
            >>> import torch, musigma as ms
            >>> s = ms.inputs.Standardizer().fit(torch.tensor([[1.0], [3.0]]))
            >>> ms.nn.Standardize.from_standardizer(s)(torch.tensor([[5.0]]))
            tensor([[3.]])
        """
        mean, scale = fitted.mean_, fitted.scale_
        if getattr(fitted, "with_mean", True) is False:
            mean = None
        if mean is None and scale is None:
            raise ValueError("this scaler neither centers nor scales: both mean_ and scale_ are None")
        return cls(0.0 if mean is None else mean, 1.0 if scale is None else scale, dim=dim, device=device)

    @property
    def num_features(self) -> int:
        """How many means and scales there are."""
        return math.prod(self.mean.shape)

    def _statistics_for(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if x.is_complex():
            raise TypeError(f"x must be real, got {x.dtype}")
        for dim, size in zip(self._dims, self.mean.shape, strict=True):
            if not -x.dim() <= dim < x.dim():
                raise ValueError(f"x must have a dim {dim} of size {size}, got shape {tuple(x.shape)}")
            if x.shape[dim] != size:
                raise ValueError(
                    f"x has {x.shape[dim]} features along dim {dim}, but mean and scale are of {size}; "
                    f"got shape {tuple(x.shape)}"
                )
        mean, tail, scale = (align(s, self._dims, x.dim()) for s in (self.mean, self.mean_tail, self.scale))
        return mean, tail, scale

    def _apply(self: F, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> F:
        """Move along but keep float64: `.half()` would bend a mean by ½ ‰ and lose a scale of 1e-8."""
        if fn(self._like).device.type == "mps":  # has no float64: the mean goes over in two float32 parts
            self._narrow()
        exact = {name: self._buffers[name] for name in STATISTICS}
        super()._apply(fn, recurse)
        for name, before in exact.items():
            after = self._buffers[name]
            if before is not None and after is not None and after.dtype != before.dtype:
                self._buffers[name] = before.to(after.device)
        return self

    def _narrow(self) -> None:
        high = self.mean.to(torch.float32)
        self._buffers["mean_tail"] = ((self.mean - high.to(self.mean.dtype)) + self.mean_tail).to(
            torch.float32
        )
        self._buffers["mean"], self._buffers["scale"] = high, self.scale.to(torch.float32)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        mean, scale = (state_dict.get(prefix + name) for name in ("mean", "scale"))
        fault = None  # torch itself names what is missing
        if isinstance(mean, Tensor) and isinstance(scale, Tensor):
            fault = _faults(mean, scale)
        if fault is not None:
            # torch collects these and raises once; nothing of this module has been written
            args[4].append(f"{prefix or type(self).__name__}: {fault}")
            return
        if isinstance(mean, Tensor):  # statistics from elsewhere come without a second part
            state_dict.setdefault(f"{prefix}mean_tail", torch.zeros_like(mean))
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        shown = f"num_features={self.num_features}, dim={self.dim}"
        return shown if self.clip is None else f"{shown}, clip={self.clip}"


class Standardize(_Fixed):
    r"""Bring every feature to mean 0 and standard deviation 1, with statistics fixed beforehand.

        y = (x − mean) / scale,   cut to [−clip, clip] if asked

    The module to put in front of a model: it has no parameters, moves with the model, and is saved with it.
    Its statistics stay float64 under ``.half()``, ``.bfloat16()`` and ``.to(dtype)``, and the mean is
    subtracted in two parts, so that the output is within 3 units in the last place of the exact result also
    for a mean of 10⁶ standard deviations.

    A floating-point input keeps its type (half types are computed in float32). Integers and booleans come
    out in float32, or in the type the module was last cast to. NaN stays NaN, infinities stay infinite.

    Args:
        mean: one per feature; a number for all of them.
        scale: one per feature, positive; a number for all. Usually the standard deviation.
        dim: the dim of the features: 1 for (n, features) and (n, c, h, w), −1 for channels last, several
            dims for one statistic per position, None for a single one.
        clip: the largest absolute output, None for no limit.
        mean_tail: what float64 leaves of the mean, subtracted after it. `Standardizer.layer()` sets it.
        device: where the buffers live.

    Raises:
        ValueError: a scale that is zero, negative or not finite; a mean that is not finite; shapes that do
            not fit `dim`. In the forward: x has another number of features.

    Example:
        >>> import torch, musigma as ms
        >>> layer = ms.nn.Standardize(mean=[0.5, 2.0], scale=[0.5, 4.0])
        >>> layer(torch.tensor([[1.0, 2.0], [0.0, 10.0]]))
        tensor([[ 1.,  0.],
                [-1.,  2.]])
        >>> layer
        Standardize(num_features=2, dim=1)

    References:
        LeCun, Bottou, Orr & Müller 1998, "Efficient BackProp", section 4.3.
    """

    def forward(self, x: Shaped[Tensor, "*shape"]) -> Shaped[Tensor, "*shape"]:
        mean, tail, scale = self._statistics_for(x)
        y = standardize(x, mean, tail, scale)
        if self.clip is not None:
            y = y.clamp(-self.clip, self.clip)
        return y.to(output_dtype(x, self._like.dtype))

    def inverse(self) -> Unstandardize:
        """The module that undoes this one (what `clip` cut off stays lost)."""
        return Unstandardize(
            self.mean, self.scale, dim=self.dim, mean_tail=self.mean_tail, device=self.mean.device
        )


class Unstandardize(_Fixed):
    r"""Undo `Standardize`: bring standardized values back to their own units.

        y = x · scale + mean

    The arguments, types and errors are those of `Standardize`; `clip` is not used. Typical use: behind a
    model that was trained on standardized targets.

    Example:
        >>> import torch, musigma as ms
        >>> ms.nn.Standardize(mean=[0.5], scale=[0.5]).inverse()(torch.tensor([[1.0], [-1.0]]))
        tensor([[1.],
                [0.]])
    """

    def forward(self, x: Shaped[Tensor, "*shape"]) -> Shaped[Tensor, "*shape"]:
        mean, tail, scale = self._statistics_for(x)
        return unstandardize(x, mean, tail, scale).to(output_dtype(x, self._like.dtype))

    def inverse(self) -> Standardize:
        """The module that undoes this one."""
        return Standardize(
            self.mean, self.scale, dim=self.dim, mean_tail=self.mean_tail, device=self.mean.device
        )
