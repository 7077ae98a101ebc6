"""Let BatchNorms share their statistics over the ranks of a distributed job, and undo it."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.modules.batchnorm import _BatchNorm

import musigma.nn as layers
from musigma.surgery._certificate import Certificate
from musigma.surgery._freeze import batch_norm_for
from musigma.surgery._layers import (
    KNOWN_BATCH_NORMS,
    LAZY,
    Where,
    become,
    changed_copy,
    chosen,
    is_lazy,
    materialized,
    own_behaviour,
    paths_of,
)
from musigma.surgery._seen import dims_seen

_BEFORE = "_before_sync"


def sync(
    model: nn.Module,
    example: Any = None,
    *,
    process_group: ProcessGroup | None = None,
    where: Where = None,
) -> tuple[nn.Module, Certificate]:
    """Make every BatchNorm a `musigma.nn.SyncBatchNorm`: one set of statistics for all ranks in training.

    Everything a layer has stays: parameters and their `requires_grad`, buffers and counter, eps, momentum
    (None too), `.training`, hooks, names in the state_dict, types and devices. Left alone, with the reason:
    subclasses with a forward of their own, which `torch.nn.SyncBatchNorm.convert_sync_batchnorm` would drop,
    and lazy layers where there is no example. Frozen layers have nothing to share.

    Args:
        model: any module; left as it is.
        example: what the model is called with; lazy layers see it, and outputs are compared on it. None
            compares nothing.
        process_group: the ranks that share statistics; all of them if None.
        where: names or patterns of layers, or a function of name and layer; all BatchNorms if None.

    Returns:
        a copy with shared statistics, and the certificate: outputs are what they were, in one process in
        training too.

    Raises:
        ValueError: `where` names no BatchNorm.
        CertificateError: the outputs moved; nothing was changed.

    Example:
        >>> import torch, musigma as ms
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8, momentum=None))
        >>> shared, certificate = ms.surgery.sync(net, torch.randn(2, 3, 8, 8))
        >>> shared[1]
        SyncBatchNorm(8, eps=1e-05, momentum=None, affine=True, bias=True, track_running_stats=True)
    """
    model = materialized(model, example)
    norms = chosen(model, where, lambda m: isinstance(m, _BatchNorm) and not isinstance(m, nn.SyncBatchNorm))
    reasons = {n: LAZY if is_lazy(m) else own_behaviour(m, KNOWN_BATCH_NORMS) for n, m in norms.items()}
    meant = [name for name, reason in reasons.items() if reason is None]

    def change(twin: nn.Module) -> None:
        for name in meant:
            layer = twin.get_submodule(name)
            become(layer, layers.SyncBatchNorm, process_group=process_group, **{_BEFORE: type(layer)})
            for key, value in list(layer._buffers.items()):
                layer.register_buffer(key, value)  # ours keeps statistics in float32 or wider

    alone = not (dist.is_available() and dist.is_initialized() and dist.get_world_size(process_group) > 1)
    return changed_copy(
        "sync",
        model,
        change,
        example,
        changed=[f"{paths_of(model, norms[n])}: {type(norms[n]).__name__} -> SyncBatchNorm" for n in meant],
        refused=[f"{paths_of(model, norms[n])}: {reason}" for n, reason in reasons.items() if reason],
        modes=(False, True) if alone else (False,),
    )


def unsync(model: nn.Module, example: Any = None, *, where: Where = None) -> tuple[nn.Module, Certificate]:
    """Make every SyncBatchNorm, torch's or ours, a BatchNorm of this process alone.

    What `sync` changed becomes the class it was; of others the example shows the number of dims. Everything
    a layer has stays, as in `sync`.

    Args:
        model: any module; left as it is.
        example: what the model is called with; needed unless `sync` made the layers. Outputs are compared on
            it.
        where: names or patterns of layers, or a function of name and layer; all SyncBatchNorms if None.

    Returns:
        a copy without shared statistics, and the certificate: outputs are what they were.

    Raises:
        ValueError: `where` names no SyncBatchNorm.
        CertificateError: the outputs moved; nothing was changed.

    Example:
        >>> import torch, musigma as ms
        >>> alone, _ = ms.surgery.unsync(torch.nn.SyncBatchNorm(3).eval(), torch.randn(2, 3, 8, 8))
        >>> type(alone)
        <class 'torch.nn.modules.batchnorm.BatchNorm2d'>
    """
    norms = chosen(model, where, lambda m: isinstance(m, nn.SyncBatchNorm))
    dims = dims_seen(model, norms, example)
    kinds: dict[str, type[nn.Module] | None] = {}
    reasons: dict[str, str] = {}
    for name, norm in norms.items():
        kinds[name] = _kind_before(norm, dims.get(name, ()))
        if (reason := own_behaviour(norm, KNOWN_BATCH_NORMS)) is not None:
            reasons[name] = reason
        elif kinds[name] is None:
            reasons[name] = _which(dims.get(name, ()))
    meant = [name for name in norms if name not in reasons]

    def change(twin: nn.Module) -> None:
        for name in meant:
            layer, kind = twin.get_submodule(name), kinds[name]
            assert kind is not None
            become(layer, kind)
            for extra in (_BEFORE, "process_group"):
                vars(layer).pop(extra, None)

    # torch's own layer has no training forward on the CPU, so nothing is compared there in that mode
    ours = all(isinstance(norms[name], layers.SyncBatchNorm) for name in meant)
    alone = not (dist.is_available() and dist.is_initialized())
    return changed_copy(
        "unsync",
        model,
        change,
        example,
        changed=[f"{paths_of(model, norms[n])}: SyncBatchNorm -> {kinds[n].__name__}" for n in meant],  # type: ignore[union-attr]  # not None: meant
        refused=[f"{paths_of(model, norms[n])}: {reason}" for n, reason in reasons.items()],
        modes=(False, True) if ours and alone else (False,),
    )


def _kind_before(norm: nn.Module, dims: tuple[int, ...]) -> type[nn.Module] | None:
    if _BEFORE in vars(norm):
        kind: type[nn.Module] = vars(norm)[_BEFORE]
        return kind
    return batch_norm_for(dims, layers if isinstance(norm, layers.SyncBatchNorm) else nn)


def _which(dims: tuple[int, ...]) -> str:
    if not dims:
        return "it takes any number of dims; pass an example that reaches it, to show which BatchNorm it was"
    return f"it is called with inputs of {' and '.join(map(str, dims))} dims, which no single BatchNorm takes"
