"""A normalization in torch's conventions, as numbers: what every library's layers are read into."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

import musigma.nn as layers
from musigma.functional._rows import RMS_EPS
from musigma.surgery._layers import FROZEN, KNOWN_BATCH_NORMS, KNOWN_INSTANCE_NORMS, own_behaviour

Array = NDArray[Any]
Kind = Literal["batch", "layer", "rms", "group", "instance"]

_KINDS: tuple[tuple[Kind, tuple[type[nn.Module], ...]], ...] = (
    ("batch", (_BatchNorm, FROZEN)),
    ("instance", (_InstanceNorm,)),
    ("group", (nn.GroupNorm,)),
    ("rms", (nn.RMSNorm,)),
    ("layer", (nn.LayerNorm,)),
)
_CHANNELS_FIRST = (layers.LayerNorm1d, layers.LayerNorm2d, layers.LayerNorm3d)
_KNOWN = (
    *KNOWN_BATCH_NORMS,
    *KNOWN_INSTANCE_NORMS,
    FROZEN,
    layers.FrozenBatchNorm1d,
    layers.FrozenBatchNorm2d,
    layers.FrozenBatchNorm3d,
    nn.GroupNorm,
    layers.GroupNorm,
    nn.RMSNorm,
    layers.RMSNorm,
    nn.LayerNorm,
    layers.LayerNorm,
    *_CHANNELS_FIRST,
)


@dataclass(frozen=True)
class Spec:
    """One normalization.

    Args:
        kind: over which axes.
        shape: of weight and bias: (c,), or the normalized shape.
        eps: added to the variance.
        weight, bias: or None.
        mean, var: the running statistics, of a BatchNorm; the variance unbiased.
        momentum: the weight of the new value in them.
        groups: of a GroupNorm.
        channels_first: whether a LayerNorm's features stand at dim 1.
        frozen: whether statistics and parameters stay what they are in training.
        synchronized: whether statistics are shared over replicas.
    """

    kind: Kind
    shape: tuple[int, ...]
    eps: float
    weight: Array | None = None
    bias: Array | None = None
    mean: Array | None = None
    var: Array | None = None
    momentum: float = 0.1
    groups: int = 1
    channels_first: bool = False
    frozen: bool = False
    synchronized: bool = False

    @property
    def state(self) -> dict[str, Array]:
        """What it holds, by torch's names."""
        named = {"weight": self.weight, "bias": self.bias, "running_mean": self.mean, "running_var": self.var}
        return {name: value for name, value in named.items() if value is not None}

    def with_biased_variance(self, values: int | None) -> Spec:
        """The running variance as 1/n averages it; unchanged without n, which keeps evaluation what it is."""
        return self if self.var is None else replace(self, var=self.var / _bessel(values))

    def with_unbiased_variance(self, values: int | None) -> Spec:
        """The running variance as 1/(n − 1) averages it; unchanged without n."""
        return self if self.var is None else replace(self, var=self.var * _bessel(values))

    def moved(self, source: int, target: int) -> Spec:
        """Weight and bias with one axis elsewhere."""
        if len(self.shape) < 2:
            return self
        weight, bias = (
            None if a is None else np.moveaxis(a, source, target) for a in (self.weight, self.bias)
        )
        shape = tuple(np.moveaxis(np.empty(self.shape), source, target).shape)
        return replace(self, shape=shape, weight=weight, bias=bias)


def _bessel(values: int | None) -> float:
    if values is None:
        return 1.0
    if values < 2:
        raise ValueError(
            f"values must be at least 2, the values a channel of one training batch; got {values}"
        )
    return values / (values - 1)


def plain(tensor: Tensor | None) -> Array | None:
    """A tensor's values; types that NumPy lacks as float32."""
    if tensor is None:
        return None
    held = tensor.detach().cpu()
    return (held if held.dtype in (torch.float32, torch.float64) else held.float()).numpy().copy()


def read(layer: nn.Module) -> Spec:
    """A layer of torch's or ours.

    Raises:
        TypeError: it is no normalization that is known, or computes something else too.
        ValueError: it averages its statistics cumulatively, or needs statistics that it does not have.
    """
    kind = next((kind for kind, types in _KINDS if isinstance(layer, types)), None)
    if kind is None:
        raise TypeError(
            f"{type(layer).__name__} is no BatchNorm, LayerNorm, RMSNorm, GroupNorm, InstanceNorm, "
            "Standardize or Standardizer, which is what can be carried over"
        )
    if (reason := own_behaviour(layer, _KNOWN)) is not None:
        raise TypeError(f"{type(layer).__name__} cannot be carried over: {reason}")
    held: Any = layer
    shape = getattr(held, "normalized_shape", None) or (
        getattr(held, "num_features", 0) or held.num_channels,
    )
    eps = RMS_EPS if held.eps is None else float(held.eps)
    spec = Spec(kind, tuple(shape), eps, plain(held.weight), plain(getattr(held, "bias", None)))
    if kind == "batch":
        return _with_statistics(held, spec)
    if kind == "instance" and held.running_mean is not None:
        raise ValueError("an InstanceNorm with running statistics has no counterpart; freeze it first")
    groups = held.num_groups if kind == "group" else 1
    return replace(spec, groups=groups, channels_first=isinstance(layer, _CHANNELS_FIRST))


def _with_statistics(layer: Any, spec: Spec) -> Spec:
    frozen = isinstance(layer, FROZEN)
    momentum = 0.0 if frozen else layer.momentum
    if momentum is None:
        raise ValueError(
            "momentum=None averages over all batches, which has no counterpart there; give the layer a "
            "momentum, e.g. 0.1"
        )
    if layer.running_mean is None:
        raise ValueError(
            "it keeps no running statistics (track_running_stats=False), which has no counterpart"
        )
    return replace(
        spec,
        mean=plain(layer.running_mean),
        var=plain(layer.running_var),
        momentum=float(momentum),
        frozen=frozen,
        synchronized=isinstance(layer, nn.SyncBatchNorm),
    )


def build(spec: Spec, dims: int | None) -> nn.Module:
    """The layer of ours, in evaluation mode if it is frozen.

    Args:
        spec: what it holds.
        dims: the number of dims of its inputs, where its class depends on it.

    Raises:
        ValueError: the number of dims is needed and missing.
    """
    layer = _built(spec, dims)
    with torch.no_grad():
        for name, value in spec.state.items():
            held = getattr(layer, name)
            held.copy_(torch.from_numpy(np.array(value)))
    return layer


def _built(spec: Spec, dims: int | None) -> nn.Module:
    affine, biased = spec.weight is not None or spec.bias is not None, spec.bias is not None
    held = next(iter(spec.state.values()), np.zeros(0, np.float32))
    options: dict[str, Any] = {"eps": spec.eps, "dtype": torch.from_numpy(np.array(held)).dtype}
    if spec.kind == "rms":
        return layers.RMSNorm(spec.shape, elementwise_affine=spec.weight is not None, **options)
    if spec.kind == "group":
        return layers.GroupNorm(spec.groups, spec.shape[0], affine=affine, bias=biased, **options)
    if spec.kind == "layer":
        options |= {"elementwise_affine": affine, "bias": biased}
        if spec.channels_first:
            return _of_dims("LayerNorm{}d", dims)(spec.shape[0], **options)
        return layers.LayerNorm(spec.shape, **options)
    options |= {"affine": affine, "bias": biased}
    if spec.kind == "instance":
        return _of_dims("InstanceNorm{}d", dims)(spec.shape[0], **options)
    if spec.frozen:
        return _of_dims("FrozenBatchNorm{}d", dims)(spec.shape[0], **options)
    if spec.synchronized:
        return layers.SyncBatchNorm(spec.shape[0], momentum=spec.momentum, **options)
    return _of_dims("BatchNorm{}d", dims)(spec.shape[0], momentum=spec.momentum, **options)


def _of_dims(name: str, dims: int | None) -> Any:
    if dims is None or not 2 <= dims <= 5:
        raise ValueError(
            f"dims must be the number of dims of the layer's inputs, 2 to 5, to choose {name.format('1')}, "
            f"{name.format('2')} or {name.format('3')}; got {dims}"
        )
    return getattr(layers, name.format(max(dims - 2, 1)))


def rounded(momentum: float) -> float:
    """1 − momentum without the rounding of the subtraction: 0.9 for 0.1, and back."""
    return float(f"{1 - momentum:.12g}")
