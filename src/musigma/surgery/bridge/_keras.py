"""Keras's normalization layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import nn

from musigma.inputs import Standardizer
from musigma.nn import Standardize, Unstandardize
from musigma.surgery.bridge._spec import Array, Spec, build, plain, read, rounded

# What Keras divides by where a feature is constant (keras.backend.epsilon()).
SMALLEST = 1e-7
# Keras's own, for a `KerasLayer` that does not say them.
_DEFAULTS = {"epsilon": 1e-3, "momentum": 0.99, "groups": 32, "axis": -1}


@dataclass(frozen=True)
class KerasLayer:
    """A Keras layer as plain data: what `to_keras` gives, and `from_keras` takes too.

    Args:
        kind: its class in `keras.layers`.
        config: arguments of its constructor.
        weights: what `set_weights` takes, in that order, by name.
    """

    kind: str
    config: Mapping[str, Any]
    weights: Mapping[str, Array]

    def make(self, input_shape: Sequence[int | None]) -> Any:
        """The layer itself, built and with its weights.

        Args:
            input_shape: of its inputs there, the batch as None: (None, height, width, channels).

        Raises:
            ImportError: Keras is not installed.
        """
        try:
            import keras
        except ImportError as error:
            raise ImportError("making a Keras layer needs Keras: pip install keras") from error
        layer = getattr(keras.layers, self.kind)(**self.config)
        layer.build(tuple(input_shape))
        if self.weights:
            layer.set_weights(list(self.weights.values()))
        return layer


def to_keras(
    layer: nn.Module | Standardizer, *, channels_last: bool = True, values: int | None = None
) -> KerasLayer:
    """A normalization or a standardization as a Keras layer that gives the same outputs.

        momentum there = 1 − momentum here,   gamma, beta = weight, bias

    | here | there |
    |---|---|
    | BatchNorm, SyncBatchNorm, FrozenBatchNorm | BatchNormalization (synchronized; not trainable) |
    | LayerNorm | LayerNormalization |
    | RMSNorm | RMSNormalization |
    | GroupNorm, InstanceNorm | GroupNormalization, of one channel a group |
    | Standardize, Unstandardize, Standardizer | Normalization (invert) |

    Args:
        layer: torch's or ours; its weights are copied.
        channels_last: whether channels stand last in Keras's inputs, its default; they stand at dim 1 here.
            The weights of a LayerNorm over several dims are moved accordingly.
        values: the values a channel of one training batch, n. Keras averages the variance with 1/n, torch
            with 1/(n − 1); given n, the running variance is converted, for training on. None copies it, which
            keeps evaluation what it is.

    Returns:
        the layer as plain data; ``.make(input_shape)`` makes the real one.

    Raises:
        TypeError: there is nothing like it in Keras.
        ValueError: momentum=None, no running statistics where they are needed, or a clipping Standardize.

    Example:
        >>> import torch, musigma as ms
        >>> there = ms.surgery.bridge.to_keras(torch.nn.BatchNorm2d(3, momentum=0.1))
        >>> there.kind, there.config["momentum"], list(there.weights)
        ('BatchNormalization', 0.9, ['gamma', 'beta', 'moving_mean', 'moving_variance'])

    References:
        Keras 3.15, `keras.layers.BatchNormalization`, "momentum".
    """
    if isinstance(layer, Standardizer):
        layer = layer.layer()
    if isinstance(layer, Standardize | Unstandardize):
        return _normalization(layer, channels_last)
    spec = read(layer).with_biased_variance(values)
    channel = -1 if channels_last else 1
    if spec.kind == "batch":
        config: dict[str, Any] = {
            "axis": channel,
            "momentum": rounded(spec.momentum),
            "epsilon": spec.eps,
            "synchronized": spec.synchronized,
            "trainable": not spec.frozen,
        }
        return _layer("BatchNormalization", config, spec)
    if spec.kind in ("group", "instance"):
        groups = spec.groups if spec.kind == "group" else -1
        return _layer("GroupNormalization", {"groups": groups, "axis": channel, "epsilon": spec.eps}, spec)
    axis: Any = channel if spec.channels_first else list(range(-len(spec.shape), 0))
    axis = axis[0] if isinstance(axis, list) and len(axis) == 1 else axis
    if channels_last:
        spec = spec.moved(0, -1)
    if spec.kind == "rms":
        scale = np.ones(spec.shape, np.float32) if spec.weight is None else spec.weight
        return KerasLayer("RMSNormalization", {"axis": axis, "epsilon": spec.eps}, {"scale": scale})
    return _layer("LayerNormalization", {"axis": axis, "epsilon": spec.eps}, spec)


def from_keras(
    layer: Any, *, dims: int | None = None, channels_last: bool = True, values: int | None = None
) -> nn.Module:
    """A Keras normalization as a layer of `musigma.nn` that gives the same outputs, channels at dim 1.

    The conventions are those of `to_keras`, the other way.

    Args:
        layer: a built BatchNormalization, LayerNormalization, RMSNormalization, GroupNormalization or
            Normalization of Keras 3, or a `KerasLayer`.
        dims: the number of dims of its inputs; what it was built on if None. It chooses between BatchNorm1d,
            2d and 3d, and makes a LayerNormalization over the channels of images a LayerNorm2d.
        channels_last: whether channels stand last in Keras's inputs.
        values: the values a channel of one training batch, as in `to_keras`; None copies the variance.

    Returns:
        the layer, in training mode.

    Raises:
        TypeError: it is none of these.
        ValueError: it has not been built, needs `dims`, or computes what torch's layers do not.

    Example:
        >>> import torch, musigma as ms
        >>> there = ms.surgery.bridge.to_keras(torch.nn.BatchNorm2d(3))
        >>> ms.surgery.bridge.from_keras(there, dims=4)
        BatchNorm2d(3, eps=1e-05, momentum=0.1, affine=True, bias=True, track_running_stats=True)
    """
    kind, config, weights, seen = _taken(layer)
    dims = seen if dims is None else dims
    if kind == "Normalization":
        return _standardize(config, weights, channels_last)
    if kind not in ("BatchNormalization", "LayerNormalization", "RMSNormalization", "GroupNormalization"):
        raise TypeError(f"{kind} is no normalization of Keras that has a counterpart here")
    if not weights and (kind in ("BatchNormalization", "RMSNormalization") or config.get("scale", True)):
        raise ValueError(f"this {kind} holds no weights yet; build it, or call it once")
    for odd, why in (
        ("renorm", "renormalization"),
        # Keras multiplies x, not x − mean, by 1/√(var + eps), and that is no RMSNorm
        ("rms_scaling", "scaling by the variance without subtracting the mean"),
    ):
        if config.get(odd):
            raise ValueError(f"{kind} with {odd}=True computes {why}, which no layer here does")
    config = _DEFAULTS | ({"epsilon": 1e-6} if kind == "RMSNormalization" else {}) | dict(config)
    spec = _spec(kind, config, weights, dims, channels_last).with_unbiased_variance(values)
    return build(spec, dims)


def _layer(kind: str, config: dict[str, Any], spec: Spec) -> KerasLayer:
    names = {
        "weight": "gamma",
        "bias": "beta",
        "running_mean": "moving_mean",
        "running_var": "moving_variance",
    }
    config |= {"center": spec.bias is not None, "scale": spec.weight is not None}
    return KerasLayer(kind, config, {names[name]: value for name, value in spec.state.items()})


def _taken(layer: Any) -> tuple[str, Mapping[str, Any], dict[str, Array], int | None]:
    """Kind, config, weights by name, and the number of dims that a layer was built on."""
    if isinstance(layer, KerasLayer):
        return layer.kind, layer.config, dict(layer.weights), None
    if not hasattr(layer, "get_config") or not hasattr(layer, "weights"):
        raise TypeError(f"from_keras takes a Keras layer or a KerasLayer, got {type(layer).__name__}")
    weights = {w.path.rpartition("/")[2]: np.asarray(w.numpy()) for w in layer.weights}
    built = (layer.get_build_config() or {}).get("input_shape") if layer.built else None
    kind = type(layer).__name__
    config = dict(layer.get_config()) | {"trainable": layer.trainable}
    if kind == "Normalization" and config.get("mean") is None and layer.built:
        config |= {"mean": np.asarray(layer.mean), "variance": np.asarray(layer.variance)}
    return kind, config, weights, None if built is None else len(built)


def _spec(
    kind: str, config: Mapping[str, Any], weights: Mapping[str, Array], dims: int | None, channels_last: bool
) -> Spec:
    weight, bias = weights.get("gamma", weights.get("scale")), weights.get("beta")
    axis = config.get("axis", -1)
    shape = next((tuple(w.shape) for w in weights.values()), ())
    eps = float(config["epsilon"])
    if kind == "BatchNormalization":
        return Spec(
            "batch",
            shape,
            eps,
            weight,
            bias,
            weights["moving_mean"],
            weights["moving_variance"],
            rounded(float(config["momentum"])),
            frozen=not config.get("trainable", True),
            synchronized=bool(config.get("synchronized")),
        )
    if kind == "GroupNormalization":
        groups = int(config["groups"])
        return Spec("group", shape, eps, weight, bias, groups=shape[0] if groups == -1 else groups)
    axes = tuple(axis) if isinstance(axis, Sequence) else (int(axis),)
    _refuse_gaps(kind, axes, dims)
    spec = Spec("rms" if kind == "RMSNormalization" else "layer", shape, eps, weight, bias)
    # One axis is the features of a sequence, last here too, or the channels of images, which stand at dim 1.
    images = len(axes) == 1 and spec.kind == "layer" and dims is not None and dims > 3
    first = len(axes) == 1 and axes[0] == 1 and dims is not None and dims > 2 and not channels_last
    spec = replace(spec, channels_first=images or first)
    return spec.moved(-1, 0) if channels_last else spec


def _refuse_gaps(kind: str, axes: tuple[int, ...], dims: int | None) -> None:
    """LayerNorm here is over the last dims; of images, all but the batch's, in another order."""
    last = tuple(range(-len(axes), 0))
    positive = tuple(range(dims - len(axes), dims)) if dims is not None else None
    if tuple(axes) not in (last, positive) and axes not in ((1,), (-1,)):
        raise ValueError(
            f"{kind} must be over the last axes to have a counterpart here; got axis={list(axes)}"
        )


def _normalization(layer: Standardize | Unstandardize, channels_last: bool) -> KerasLayer:
    if getattr(layer, "clip", None) is not None:
        raise ValueError(f"Keras's Normalization does not clip, and this layer does at {layer.clip}")
    dim = layer.dim
    if isinstance(dim, tuple):
        if channels_last:
            raise ValueError(f"statistics along several dims {dim} have no one place with channels last")
    elif dim == 1 and channels_last:
        dim = -1
    mean, scale = plain(layer.mean), plain(layer.scale)
    assert mean is not None
    assert scale is not None
    config = {"axis": dim, "mean": mean, "variance": scale**2, "invert": isinstance(layer, Unstandardize)}
    return KerasLayer("Normalization", config, {})


def _standardize(config: Mapping[str, Any], weights: Mapping[str, Array], channels_last: bool) -> nn.Module:
    mean, variance = (config.get(name) for name in ("mean", "variance"))
    mean = weights.get("mean") if mean is None else mean
    variance = weights.get("variance") if variance is None else variance
    if mean is None or variance is None:
        raise ValueError("this Normalization has no statistics yet; adapt() it to data first")
    axis: Any = config.get("axis", -1)
    axes = tuple(axis) if isinstance(axis, Sequence) else () if axis is None else (int(axis),)
    if len(axes) > 1:
        raise ValueError(f"a Normalization along several axes {axes} has no place here; give it one axis")
    dim = (1 if channels_last or axes[0] == 1 else axes[0]) if axes else None
    scale = np.maximum(np.sqrt(np.asarray(variance, np.float64)), SMALLEST)
    shape = scale.size if axes else ()
    kind = Unstandardize if config.get("invert") else Standardize
    return kind(np.asarray(mean, np.float64).reshape(shape), scale.reshape(shape), dim=dim)
