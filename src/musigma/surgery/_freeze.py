"""Freeze normalizations for good, and undo it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.parametrize import is_parametrized

import musigma.nn as layers
from musigma.surgery._certificate import Certificate
from musigma.surgery._layers import (
    FROZEN,
    KNOWN_BATCH_NORMS,
    KNOWN_INSTANCE_NORMS,
    LAZY,
    Where,
    become,
    changed_copy,
    chosen,
    is_lazy,
    is_norm,
    materialized,
    own_behaviour,
    paths_of,
    tied,
)
from musigma.surgery._seen import dims_seen

_BEFORE = "_before_freezing"


def freeze(model: nn.Module, example: Any = None, *, where: Where = None) -> tuple[nn.Module, Certificate]:
    """Freeze normalizations: statistics, weight and bias stay what they are, under `.train()` too.

        y = (x − running_mean) / √(running_var + eps) · weight + bias

    A BatchNorm becomes a `musigma.nn.FrozenBatchNorm`, and so does an InstanceNorm with running statistics.
    Other normalizations, which have none, keep their class. Weight and bias become buffers in all of them, so
    no optimizer and no `requires_grad_()` reaches them. Names in the state_dict, eps, hooks, `.training`,
    num_batches_tracked, types and devices are what they were, and each state_dict loads into the other model.

    Left alone, with the reason: BatchNorms that keep no statistics, subclasses with a forward of their own,
    layers whose parameters are tied to another's, and lazy layers where there is no example.

    Args:
        model: any module; left as it is.
        example: what the model is called with; lazy layers see it, and outputs are compared on it. None
            compares nothing.
        where: names or patterns of layers, or a function of name and layer; all normalizations if None.

    Returns:
        a copy with frozen layers, and the certificate: the outputs in evaluation are what they were.

    Raises:
        ValueError: `where` names no normalization.
        CertificateError: the outputs moved; nothing was changed.

    Example:
        >>> import torch, musigma as ms
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8))
        >>> frozen, certificate = ms.surgery.freeze(net, torch.randn(2, 3, 8, 8))
        >>> type(frozen.train()[1]).__name__, certificate.changed
        ('FrozenBatchNorm2d', ('1: BatchNorm2d, 8 channels, keeps its statistics, weight and bias',))

    References:
        He et al. 2017, "Mask R-CNN", on freezing BatchNorm while fine-tuning.
    """
    model = materialized(model, example)
    layers_ = chosen(model, where, lambda m: is_norm(m) and not _is_frozen(m))
    unbatched = _unbatched(model, example)
    reasons = {name: _why_not(model, m, name in unbatched) for name, m in layers_.items()}
    meant = [name for name, reason in reasons.items() if reason is None]

    def change(twin: nn.Module) -> None:
        for name in meant:
            _freeze(twin.get_submodule(name))

    changed = [f"{paths_of(model, layers_[name])}: {_said(layers_[name])}" for name in meant]
    refused = [f"{paths_of(model, layers_[n])}: {reason}" for n, reason in reasons.items() if reason]
    return changed_copy("freeze", model, change, example, changed=changed, refused=refused, modes=(False,))


def unfreeze(model: nn.Module, example: Any = None, *, where: Where = None) -> tuple[nn.Module, Certificate]:
    """Undo `freeze`: layers learn again, and their statistics move in training.

    What `freeze` froze is what it was before, `requires_grad` of each parameter included. A FrozenBatchNorm
    that was built as one becomes a BatchNorm of musigma with momentum 0.1, for its number of dims.

    Args:
        model: any module; left as it is.
        example: what the model is called with; outputs are compared on it, and a `FrozenBatchNorm` for any
            number of dims shows which it gets. None compares nothing.
        where: names or patterns of layers, or a function of name and layer; all frozen layers if None.

    Returns:
        a copy whose layers learn, and the certificate: the outputs in evaluation are what they were.

    Raises:
        ValueError: `where` names no frozen layer.
        CertificateError: the outputs moved; nothing was changed.

    Example:
        >>> import torch, musigma as ms
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.BatchNorm1d(8, momentum=None))
        >>> again, _ = ms.surgery.unfreeze(ms.surgery.freeze(net)[0])
        >>> again[1]
        BatchNorm1d(8, eps=1e-05, momentum=None, affine=True, bias=True, track_running_stats=True)
    """
    frozen = chosen(model, where, _is_frozen)
    dims = dims_seen(model, frozen, example)
    kinds = {name: _kind_before(m, dims.get(name, ())) for name, m in frozen.items()}
    meant = [name for name, kind in kinds.items() if kind is not None]

    def change(twin: nn.Module) -> None:
        for name in meant:
            layer, kind = twin.get_submodule(name), kinds[name]
            assert kind is not None
            _thaw(layer, kind)

    changed = [f"{paths_of(model, frozen[n])}: learns again, as {kinds[n].__name__}" for n in meant]  # type: ignore[union-attr]  # not None: meant
    refused = [
        f"{paths_of(model, frozen[n])}: it takes any number of dims; pass an example that shows which"
        for n in frozen
        if n not in meant
    ]
    return changed_copy("unfreeze", model, change, example, changed=changed, refused=refused, modes=(False,))


def _is_frozen(module: nn.Module) -> bool:
    return isinstance(module, FROZEN) or _BEFORE in vars(module)


def _why_not(model: nn.Module, layer: nn.Module, unbatched: bool) -> str | None:
    if is_lazy(layer):
        return LAZY
    if isinstance(layer, _BatchNorm | _InstanceNorm):
        known = KNOWN_BATCH_NORMS + KNOWN_INSTANCE_NORMS
        if isinstance(layer, _BatchNorm) and layer.running_mean is None:
            return "it keeps no running statistics (track_running_stats=False); let it track them first"
        if layer.running_mean is not None and (reason := own_behaviour(layer, known)):
            return reason
        if layer.running_mean is not None and unbatched:
            return "it is called with an example without a batch dim, which the frozen layer would misread"
    elif is_parametrized(layer):
        return own_behaviour(layer, ())
    return tied(model, layer)


def _unbatched(model: nn.Module, example: Any) -> set[str]:
    norms = {n: m for n, m in model.named_modules() if isinstance(m, _InstanceNorm)}
    seen = dims_seen(model, norms, example) if norms else {}
    return {name for name, dims in seen.items() if norms[name]._get_no_batch_dim() in dims}


def _said(layer: nn.Module) -> str:
    kind = type(layer).__name__
    if getattr(layer, "running_mean", None) is None:
        return f"{kind} keeps its {' and '.join(layer._parameters) or 'nothing'}"
    held = [name for name, p in layer._parameters.items() if p is not None]
    channels = getattr(layer, "num_features", "")
    return f"{kind}, {channels} channels, keeps its statistics{', ' * bool(held)}{' and '.join(held)}"


def _freeze(layer: nn.Module) -> None:
    grads = {name: None if p is None else p.requires_grad for name, p in layer._parameters.items()}
    vars(layer)[_BEFORE] = (type(layer), grads)
    buffers: dict[str, Any] = {n: None if p is None else p.detach() for n, p in layer._parameters.items()}
    layer._parameters.clear()
    # parameters first: the order of a BatchNorm's state_dict
    held = buffers | layer._buffers
    layer._buffers.clear()
    if getattr(layer, "running_mean", None) is None and held.get("running_mean") is None:
        layer._buffers.update(held)
        return
    dims = _dims(layer)
    become(layer, _frozen_class(layer))
    if isinstance(dims, tuple):  # an InstanceNorm: (c, length) without a batch dim is no (n, c)
        vars(layer)["_dims"] = dims
    for name, value in held.items():
        layer.register_buffer(name, value)
    layer._buffers.setdefault("num_batches_tracked", torch.zeros((), dtype=torch.long))


def _dims(layer: nn.Module) -> tuple[int, ...] | None:
    return (layer._get_no_batch_dim() + 1,) if isinstance(layer, _InstanceNorm) else None


def _frozen_class(layer: nn.Module) -> type[nn.Module]:
    for dim, kind in enumerate(
        (layers.FrozenBatchNorm1d, layers.FrozenBatchNorm2d, layers.FrozenBatchNorm3d), 1
    ):
        known = (getattr(nn, f"BatchNorm{dim}d"), getattr(nn, f"InstanceNorm{dim}d"))
        if isinstance(layer, known):
            return kind
    return FROZEN


def _kind_before(layer: nn.Module, dims: tuple[int, ...]) -> type[nn.Module] | None:
    if _BEFORE in vars(layer):
        kind: type[nn.Module] = vars(layer)[_BEFORE][0]
        return kind
    return batch_norm_for(layer._dims or dims, layers)  # type: ignore[arg-type,union-attr]  # a FrozenBatchNorm


def batch_norm_for(dims: tuple[int, ...], namespace: Any) -> type[nn.Module] | None:
    """The BatchNorm of `torch.nn` or `musigma.nn` for inputs of these numbers of dims; None if none fits."""
    spatial = {max(d - 2, 1) for d in dims}
    kind: Callable[..., Any] | None = (
        getattr(namespace, f"BatchNorm{spatial.pop()}d", None) if len(spatial) == 1 else None
    )
    return kind if isinstance(kind, type) else None


def _thaw(layer: nn.Module, kind: type[nn.Module]) -> None:
    _, grads = vars(layer).pop(_BEFORE, (None, {}))
    vars(layer).pop("_dims", None)
    if type(layer) is not kind:
        become(layer, kind)
        for name, value in (("momentum", 0.1), ("track_running_stats", True)):
            vars(layer).setdefault(name, value)
    grads = grads or {"weight": True, "bias": True}
    for name in [name for name in layer._buffers if name in grads]:
        held = layer._buffers.pop(name)
        layer._parameters[name] = (
            None if held is None else nn.Parameter(held, requires_grad=bool(grads[name]))
        )
