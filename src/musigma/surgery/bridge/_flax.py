"""Flax's normalization layers, of both of its interfaces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from musigma.inputs import Standardizer
from musigma.nn import Standardize
from musigma.surgery.bridge._spec import Array, Spec, build, plain, read, rounded

# Flax's own, for a `FlaxLayer` that does not say them.
_DEFAULTS = {"epsilon": 1e-6, "momentum": 0.99, "num_groups": 32}
_NAMES = {"weight": "scale", "bias": "bias", "running_mean": "mean", "running_var": "var"}
_STATISTICS = ("mean", "var")


@dataclass(frozen=True)
class FlaxLayer:
    """A Flax layer as plain data: what `to_flax` gives, and `from_flax` takes too.

    Args:
        kind: its class in `flax.linen`.
        config: arguments of its constructor.
        variables: its collections, "params" and "batch_stats".
    """

    kind: str
    config: Mapping[str, Any]
    variables: Mapping[str, Mapping[str, Array]]

    def make(self) -> Any:
        """The `flax.linen` module itself; call ``.apply(variables, x, ...)`` on it.

        Raises:
            ImportError: Flax is not installed.
        """
        try:
            import flax.linen
        except ImportError as error:
            raise ImportError("making a Flax module needs Flax: pip install flax") from error
        return getattr(flax.linen, self.kind)(**self.config)


def to_flax(
    layer: nn.Module | Standardizer, *, channels_last: bool = True, values: int | None = None
) -> FlaxLayer:
    """A normalization or a standardization as a Flax layer that gives the same outputs.

        momentum there = 1 − momentum here,   scale = weight

    | here | there |
    |---|---|
    | BatchNorm, SyncBatchNorm, FrozenBatchNorm | BatchNorm |
    | LayerNorm, RMSNorm, GroupNorm, InstanceNorm | the same |
    | Standardize, Standardizer | BatchNorm with epsilon 0 by its statistics |

    Args:
        layer: torch's or ours; its weights are copied.
        channels_last: whether channels stand last in Flax's inputs, its default; they stand at dim 1 here.
            Flax's GroupNorm and InstanceNorm know nothing else. The weights of a LayerNorm over several dims
            are moved accordingly.
        values: the values a channel of one training batch, n. Flax averages the variance with 1/n, torch
            with 1/(n − 1); given n, the running variance is converted, for training on. None copies it, which
            keeps evaluation what it is.

    Returns:
        the layer as plain data; ``.make()`` makes the `flax.linen` module, and ``.variables`` are what it is
        applied with. A BatchNorm is told at the call whether to use its statistics.

    Raises:
        TypeError: there is nothing like it in Flax.
        ValueError: momentum=None, no running statistics where they are needed, a clipping Standardize, or
            channels first where Flax has them last.

    Example:
        >>> import torch, musigma as ms
        >>> there = ms.surgery.bridge.to_flax(torch.nn.BatchNorm2d(3))
        >>> there.config["momentum"], {name: list(held) for name, held in there.variables.items()}
        (0.9, {'params': ['scale', 'bias'], 'batch_stats': ['mean', 'var']})

    References:
        Flax 0.12, `flax.linen.BatchNorm`, "momentum".
    """
    if isinstance(layer, Standardizer):
        layer = layer.layer()
    spec = _fixed(layer) if isinstance(layer, Standardize) else read(layer).with_biased_variance(values)
    channel = -1 if channels_last else 1
    config: dict[str, Any] = {"epsilon": spec.eps, "use_scale": spec.weight is not None}
    if spec.kind != "rms":
        config["use_bias"] = spec.bias is not None
    if spec.kind == "batch":
        config |= {"momentum": rounded(spec.momentum), "axis": channel}
        return _layer("BatchNorm", config, spec)
    if spec.kind in ("group", "instance"):
        if not channels_last:
            raise ValueError("Flax's GroupNorm and InstanceNorm take channels last; use channels_last=True")
        if spec.kind == "instance":
            return _layer("InstanceNorm", config, spec)
        return _layer("GroupNorm", config | {"num_groups": spec.groups}, spec)
    axes: Any = channel if spec.channels_first else tuple(range(-len(spec.shape), 0))
    axes = axes[0] if isinstance(axes, tuple) and len(axes) == 1 else axes
    config |= {"reduction_axes": axes, "feature_axes": axes}
    kind = "RMSNorm" if spec.kind == "rms" else "LayerNorm"
    return _layer(kind, config, spec.moved(0, -1) if channels_last else spec)


def from_flax(
    layer: Any,
    variables: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    dims: int | None = None,
    channels_last: bool = True,
    values: int | None = None,
) -> nn.Module:
    """A Flax normalization as a layer of `musigma.nn` that gives the same outputs, channels at dim 1.

    The conventions are those of `to_flax`, the other way.

    Args:
        layer: a BatchNorm, LayerNorm, RMSNorm, GroupNorm or InstanceNorm of `flax.linen` with its variables,
            or of `flax.nnx`, which holds its own; or a `FlaxLayer`.
        variables: the collections of a linen module: "params" and, for BatchNorm, "batch_stats".
        dims: the number of dims of its inputs, to choose between BatchNorm1d, 2d and 3d and their like; of
            a LayerNorm, 4 or 5 says that they are images and makes it a LayerNorm2d or 3d.
        channels_last: whether channels stand last in Flax's inputs.
        values: the values a channel of one training batch, as in `to_flax`; None copies the variance.

    Returns:
        the layer, in training mode.

    Raises:
        TypeError: it is none of these.
        ValueError: it lacks its variables, needs `dims`, or is over other axes than the last.

    Example:
        >>> import torch, musigma as ms
        >>> there = ms.surgery.bridge.to_flax(torch.nn.GroupNorm(2, 4))
        >>> ms.surgery.bridge.from_flax(there)
        GroupNorm(2, 4, eps=1e-05, affine=True, bias=True)
    """
    if isinstance(layer, FlaxLayer):
        kind, config = layer.kind, dict(layer.config)
        variables = layer.variables
    else:
        kind = type(layer).__name__
        config = {n: getattr(layer, n) for n in _CONFIG if hasattr(layer, n)}
    if kind not in ("BatchNorm", "LayerNorm", "RMSNorm", "GroupNorm", "InstanceNorm"):
        raise TypeError(f"{kind} is no normalization of Flax that has a counterpart here")
    config = _DEFAULTS | ({"epsilon": 1e-5} if kind == "BatchNorm" else {}) | config
    held = _held(kind, layer, config, variables)
    return build(_spec(kind, config, held, dims, channels_last).with_unbiased_variance(values), dims)


_CONFIG = (
    "epsilon",
    "momentum",
    "axis",
    "num_groups",
    "group_size",
    "reduction_axes",
    "feature_axes",
    "use_scale",
    "use_bias",
)


def _fixed(layer: Standardize) -> Spec:
    if layer.clip is not None:
        raise ValueError(f"no normalization of Flax clips, and this layer does at {layer.clip}")
    if layer.dim not in (1, -1):
        raise ValueError(f"statistics must be of the channels, dim 1 or −1, got dim={layer.dim}")
    mean, scale = plain(layer.mean), plain(layer.scale)
    assert mean is not None
    assert scale is not None
    return Spec("batch", mean.shape, 0.0, mean=mean, var=scale**2, momentum=0.0, frozen=True)


def _layer(kind: str, config: dict[str, Any], spec: Spec) -> FlaxLayer:
    collections: dict[str, dict[str, Array]] = {"params": {}, "batch_stats": {}}
    for name, value in spec.state.items():
        theirs = _NAMES[name]
        collections["batch_stats" if theirs in _STATISTICS else "params"][theirs] = value
    return FlaxLayer(kind, config, {name: held for name, held in collections.items() if held})


def _held(
    kind: str, layer: Any, config: Mapping[str, Any], variables: Mapping[str, Mapping[str, Any]] | None
) -> dict[str, Array]:
    """Scale, bias, mean and var, by these names."""
    wanted = [
        name for name in ("scale", "bias") if config.get(f"use_{name}", (kind, name) != ("RMSNorm", "bias"))
    ]
    wanted = [*wanted, *(_STATISTICS if kind == "BatchNorm" else ())]
    if variables is not None:
        merged = {**variables.get("params", {}), **variables.get("batch_stats", {})}
    else:
        merged = {name: getattr(layer, name) for name in wanted if getattr(layer, name, None) is not None}
    missing = [name for name in wanted if name not in merged]
    if missing:
        raise ValueError(
            f"{kind} needs its {', '.join(missing)}; pass the variables of a linen module, "
            "{'params': ..., 'batch_stats': ...}"
        )
    return {name: _array(merged[name]) for name in wanted}


def _array(value: Any) -> Array:
    # nnx keeps arrays in variables, linen as they are
    return np.asarray(value.get_value() if hasattr(value, "get_value") else value)


def _spec(
    kind: str, config: Mapping[str, Any], held: Mapping[str, Array], dims: int | None, channels_last: bool
) -> Spec:
    shape = next((tuple(value.shape) for value in held.values()), ())
    eps, weight, bias = float(config["epsilon"]), held.get("scale"), held.get("bias")
    if not shape:
        raise ValueError(f"{kind} without scale and bias does not know its channels here; build it by hand")
    if kind == "BatchNorm":
        momentum = rounded(float(config["momentum"]))
        return Spec("batch", shape, eps, weight, bias, held["mean"], held["var"], momentum)
    if kind == "InstanceNorm":
        return Spec("instance", shape, eps, weight, bias)
    if kind == "GroupNorm":
        size = config.get("group_size")
        groups = shape[0] // size if size else int(config["num_groups"])
        return Spec("group", shape, eps, weight, bias, groups=groups)
    axes = _axes(config.get("reduction_axes", -1))
    last = tuple(range(-len(axes), 0))
    if axes != _axes(config.get("feature_axes", -1)) or axes not in (last, _positive(axes, dims), (1,)):
        raise ValueError(f"{kind} must be over the last axes to have a counterpart here; got {axes}")
    images = len(axes) == 1 and kind == "LayerNorm" and dims is not None and dims > 3
    spec = Spec("rms" if kind == "RMSNorm" else "layer", shape, eps, weight, bias, channels_first=images)
    return spec.moved(-1, 0) if channels_last else spec


def _axes(axes: Any) -> tuple[int, ...]:
    return tuple(axes) if isinstance(axes, Sequence) else (int(axes),)


def _positive(axes: Sequence[int], dims: int | None) -> tuple[int, ...] | None:
    return None if dims is None else tuple(range(dims - len(axes), dims))
