"""Let BatchNorms take the statistics of parts of the batch."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

import musigma.nn as layers
from musigma.surgery._certificate import Certificate
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

_KINDS: tuple[tuple[type[nn.Module], type[nn.Module]], ...] = (
    (nn.BatchNorm1d, layers.SplitBatchNorm1d),
    (nn.BatchNorm2d, layers.SplitBatchNorm2d),
    (nn.BatchNorm3d, layers.SplitBatchNorm3d),
)
_SPLIT = tuple(kind for _, kind in _KINDS)


def split(
    model: nn.Module,
    example: Any = None,
    *,
    parts: int = 2,
    auxiliary: bool = False,
    where: Where = None,
) -> tuple[nn.Module, Certificate]:
    """Make every BatchNorm a `musigma.nn.SplitBatchNorm1d` (2d, 3d): statistics of parts of the batch.

    In training each part is normalized by itself. They share one norm (ghost batches), or, with `auxiliary`,
    each part after the first gets a norm of its own, which starts as a copy: the first part is normalized as
    in evaluation, the others may come from another distribution. Evaluation is what it was.

    Everything a layer has stays, as in `freeze`; auxiliary norms add their names below ``auxiliary.``.

    Args:
        model: any module; left as it is.
        example: what the model is called with; lazy layers see it, and outputs are compared on it. None
            compares nothing.
        parts: how many parts a batch has, in their order along the batch.
        auxiliary: whether parts after the first have norms of their own.
        where: names or patterns of layers, or a function of name and layer; all BatchNorms if None.

    Returns:
        a copy with split statistics, and the certificate: the outputs in evaluation are what they were.

    Raises:
        ValueError: fewer than two parts, or `where` names no BatchNorm.
        CertificateError: the outputs moved; nothing was changed.

    Example:
        >>> import torch, musigma as ms
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8))
        >>> ghosts, certificate = ms.surgery.split(net, torch.randn(4, 3, 8, 8), parts=2)
        >>> certificate.changed
        ('1: BatchNorm2d -> SplitBatchNorm2d of 2 parts',)

    References:
        Hoffer, Hubara & Soudry 2017, "Train longer, generalize better"; Xie et al. 2020, "Adversarial
        examples improve image recognition".
    """
    if parts < 2:
        raise ValueError(
            f"parts must be at least 2, got {parts}; a batch in one part is what BatchNorm takes"
        )
    model = materialized(model, example)
    norms = chosen(model, where, lambda m: isinstance(m, _BatchNorm) and not isinstance(m, _SPLIT))
    reasons = {name: _why_not(norm) for name, norm in norms.items()}
    meant = [name for name, reason in reasons.items() if reason is None]

    def change(twin: nn.Module) -> None:
        for name in meant:
            layer: Any = twin.get_submodule(name)
            become(layer, next(kind for known, kind in _KINDS if isinstance(layer, known)))
            for key, value in list(layer._buffers.items()):
                layer.register_buffer(key, value)  # ours keeps statistics in float32 or wider
            layer._split(parts, auxiliary)

    with_own = ", with norms of their own" if auxiliary else ""
    return changed_copy(
        "split",
        model,
        change,
        example,
        changed=[
            f"{paths_of(model, norms[n])}: {type(norms[n]).__name__} -> "
            f"{next(kind for known, kind in _KINDS if isinstance(norms[n], known)).__name__} of {parts} "
            f"parts{with_own}"
            for n in meant
        ],
        refused=[f"{paths_of(model, norms[n])}: {reason}" for n, reason in reasons.items() if reason],
        modes=(False,),
    )


def _why_not(norm: nn.Module) -> str | None:
    if is_lazy(norm):
        return LAZY
    if isinstance(norm, nn.SyncBatchNorm):
        return "its statistics are shared over ranks, the opposite; unsync it first"
    return own_behaviour(norm, KNOWN_BATCH_NORMS)
