"""The statistics of the whole data set in every BatchNorm, instead of a running average's."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from musigma.graph import call, forked_rng
from musigma.statistics import Moments, moments
from musigma.surgery._certificate import Certificate

Mode = Literal["one_pass", "layerwise"]
NOTHING = "recalibration needs at least one batch; got none"


def recalibrate(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    mode: Mode = "one_pass",
    max_batches: int | None = None,
) -> tuple[nn.Module, Certificate]:
    """Give every BatchNorm the mean and the unbiased variance of its inputs over all batches.

    The moments of the batches are merged (an average of per-batch variances would miss the spread between
    batches). `"one_pass"` reads the data once, every layer normalizing by its batch meanwhile, as in
    training. `"layerwise"` reads it once a layer, in execution order: each layer's statistics are taken of
    what the layers before it, already recalibrated, now give at test time. The second is exact for test time,
    the first costs one pass. Dropout is off in both.

    Frozen layers and layers without running statistics are left alone; `momentum` plays no part, and
    num_batches_tracked becomes the number of batches read. The modes, the random state and the model itself
    stay as they were.

    Args:
        model: any module; left as it is.
        batches: what the model is called with, batch by batch: tensors, tuples of arguments or dicts of
            keywords. `"layerwise"` reads it several times, so it must not be an iterator.
        mode: "one_pass" or "layerwise".
        max_batches: read only so many.

    Returns:
        a copy with new statistics, and a certificate that names them. It compares no outputs: they are meant
        to change.

    Raises:
        ValueError: no batches, an unknown mode, or an iterator with "layerwise".

    Example:
        >>> import torch, musigma as ms
        >>> data = [torch.tensor([[1.0], [3.0]]), torch.tensor([[5.0], [9.0]])]
        >>> net, certificate = ms.surgery.recalibrate(torch.nn.BatchNorm1d(1), data)
        >>> net.running_mean.item(), round(net.running_var.item(), 4)
        (4.5, 11.6667)

    References:
        Ioffe & Szegedy 2015, algorithm 2, steps 7-12; Wu & Johnson 2021, "Rethinking 'Batch' in BatchNorm".
    """
    if mode not in ("one_pass", "layerwise"):
        raise ValueError(f"mode must be 'one_pass' or 'layerwise'; got {mode!r}")
    if mode == "layerwise" and isinstance(batches, Iterator):
        raise ValueError(
            "mode 'layerwise' reads the data once a layer; pass a list or a loader, not an iterator"
        )
    twin = copy.deepcopy(model)
    layers = {name: m for name, m in twin.named_modules() if _keeps_statistics(m)}
    modes = {m: m.training for m in twin.modules()}
    groups = [layers] if mode == "one_pass" else [{n: m} for n, m in layers.items()]
    changed: list[str] = []
    order: list[str] = []
    try:
        if mode == "layerwise":
            order = _execution_order(twin, layers, batches)
            groups = [{name: layers[name]} for name in order]
        for group in groups:
            found = _measure(twin, group, batches, mode, max_batches)
            for name, (total, calls) in found.items():
                changed.append(_write(name, layers[name], total, calls))
    finally:
        for module, training in modes.items():
            module.training = training
    untouched = [n for n in layers if not any(c.startswith(f"{n or 'the model'}: ") for c in changed)]
    refused = tuple(f"{n or 'the model'}: no batch reached it" for n in untouched)
    return twin, Certificate("recalibrate", tuple(changed), refused)


def _keeps_statistics(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm) and module.running_mean is not None


def _measure(
    model: nn.Module, layers: dict[str, _BatchNorm], batches: Iterable[Any], mode: Mode, limit: int | None
) -> dict[str, tuple[Moments, int]]:
    """The merged moments of what reaches each layer, and how often anything did."""
    totals: dict[str, tuple[Moments, int]] = {}
    saved = {name: copy.deepcopy(dict(layer.named_buffers())) for name, layer in layers.items()}

    def listen(name: str, x: Tensor) -> None:
        seen = moments(x.detach(), [0, *range(2, x.dim())])
        total, batches_seen = totals.get(name, (None, 0))
        totals[name] = (seen if total is None else total + seen, batches_seen + 1)

    model.eval()
    if mode == "one_pass":
        for layer in layers.values():
            layer.train()
    with ExitStack() as stack, torch.no_grad(), forked_rng(model):
        for name, layer in layers.items():
            hook = layer.register_forward_pre_hook(lambda _m, args, name=name: listen(name, args[0]))
            stack.callback(hook.remove)
        count = 0
        for batch in islice(batches, limit):
            call(model, batch)
            count += 1
    if count == 0:
        raise ValueError(NOTHING)
    for name, layer in layers.items():  # a training forward has moved them
        for key, value in saved[name].items():
            layer.get_buffer(key).copy_(value)
    return totals


def _execution_order(model: nn.Module, layers: dict[str, _BatchNorm], batches: Iterable[Any]) -> list[str]:
    order: list[str] = []
    model.eval()
    with ExitStack() as stack, torch.no_grad(), forked_rng(model):
        for name, layer in layers.items():
            hook = layer.register_forward_pre_hook(lambda _m, _a, name=name: order.append(name))
            stack.callback(hook.remove)
        for batch in batches:
            call(model, batch)
            break
        else:
            raise ValueError(NOTHING)
    return list(dict.fromkeys(order))


def _write(name: str, layer: _BatchNorm, total: Moments, calls: int) -> str:
    assert layer.running_mean is not None
    assert layer.running_var is not None
    mean, var = total.mean, total.var(correction=1)
    spread = total.std().clamp(min=torch.finfo(torch.float64).tiny)
    shift = float(((layer.running_mean.to(mean.dtype) - mean) / spread).abs().max())
    layer.running_mean.copy_(mean)
    layer.running_var.copy_(torch.where(var.isnan(), layer.running_var.to(var.dtype), var))
    if layer.num_batches_tracked is not None:
        # What momentum=None goes on averaging from.
        layer.num_batches_tracked.fill_(calls)
    return (
        f"{name or 'the model'}: statistics of {int(total.count)} values a channel, "
        f"means moved by up to {shift:.3g} sd"
    )
