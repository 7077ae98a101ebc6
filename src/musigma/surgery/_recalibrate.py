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

from musigma.functional._variances import impossible_variances_pass
from musigma.graph import call, forked_rng
from musigma.nn._statistics import KeepsStatistics
from musigma.statistics import Moments, moments
from musigma.surgery._batches import as_batches, as_example
from musigma.surgery._certificate import Certificate, own_copy

Mode = Literal["one_pass", "layerwise"]
NOTHING = "recalibration needs at least one batch; got none"


def recalibrate(
    model: nn.Module,
    data: Any,
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

    Frozen layers and layers without running statistics are left alone, and so are channels that an inf or NaN
    reached, which the certificate names. What a mask drops is left out; `momentum` plays no part, and
    num_batches_tracked becomes the number of batches read. The modes, the random state and the model itself
    stay as they were.

    Args:
        model: any module; left as it is.
        data: what the model is called with: one example (a tensor, a tuple of arguments or a dict of
            keywords), a list of them, or a loader. Of the (inputs, targets) that a loader yields the targets
            are left out. `"layerwise"` reads it several times, so it must not be an iterator.
        mode: "one_pass" or "layerwise".
        max_batches: read only so many.

    Returns:
        a copy with new statistics, and a certificate that names them. It compares no outputs: they are meant
        to change.

    Raises:
        ValueError: no batches, an unknown mode, or an iterator with "layerwise".
        TypeError: data is neither an example nor something that yields examples.

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
    if mode == "layerwise" and isinstance(data, Iterator):
        raise ValueError(
            "mode 'layerwise' reads the data once a layer; pass a list or a loader, not an iterator"
        )
    batches = as_batches(data)
    twin = copy.deepcopy(model)
    layers = {name: m for name, m in twin.named_modules() if _keeps_statistics(m)}
    modes = {m: m.training for m in twin.modules()}
    groups = [layers] if mode == "one_pass" else [{n: m} for n, m in layers.items()]
    changed: list[str] = []
    refused: list[str] = []
    order: list[str] = []
    try:
        if mode == "layerwise":
            order = _execution_order(twin, layers, batches)
            groups = [{name: layers[name]} for name in order]
        for group in groups:
            found = _measure(twin, group, batches, mode, max_batches)
            for name, (total, calls) in found.items():
                changed.append(_write(name, layers[name], total, calls))
                refused.extend(_kept(name, total))
    finally:
        for module, training in modes.items():
            module.training = training
    untouched = [n for n in layers if not any(c.startswith(f"{n or 'the model'}: ") for c in changed)]
    refused += [f"{n or 'the model'}: no batch reached it" for n in untouched]
    return twin, Certificate("recalibrate", tuple(changed), tuple(refused))


def _keeps_statistics(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm) and module.running_mean is not None


def _measure(
    model: nn.Module, layers: dict[str, _BatchNorm], batches: Iterable[Any], mode: Mode, limit: int | None
) -> dict[str, tuple[Moments, int]]:
    """The merged moments of what reaches each layer, and how often anything did."""
    totals: dict[str, tuple[Moments, int]] = {}
    saved = {name: copy.deepcopy(dict(layer.named_buffers())) for name, layer in layers.items()}

    def listen(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else kwargs["input"]
        # What a stranger's layer means by a mask is unknown; ours keeps padding out of the statistics.
        mask = kwargs.get("mask") if isinstance(layers[name], KeepsStatistics) else None
        seen = moments(x.detach(), [0, *range(2, x.dim())], mask=mask)
        total, batches_seen = totals.get(name, (None, 0))
        totals[name] = (seen if total is None else total + seen, batches_seen + 1)

    model.eval()
    if mode == "one_pass":
        for layer in layers.values():
            layer.train()
    with ExitStack() as stack, torch.no_grad(), forked_rng(model), impossible_variances_pass():
        for name, layer in layers.items():
            hook = layer.register_forward_pre_hook(
                lambda _m, args, kwargs, name=name: listen(name, args, kwargs), with_kwargs=True
            )
            stack.callback(hook.remove)
        count = 0
        for batch in islice(batches, limit):
            call(model, own_copy(as_example(model, batch)))
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
    with ExitStack() as stack, torch.no_grad(), forked_rng(model), impossible_variances_pass():
        for name, layer in layers.items():
            hook = layer.register_forward_pre_hook(lambda _m, _a, name=name: order.append(name))
            stack.callback(hook.remove)
        for batch in batches:
            call(model, own_copy(as_example(model, batch)))
            break
        else:
            raise ValueError(NOTHING)
    return list(dict.fromkeys(order))


def _write(name: str, layer: _BatchNorm, total: Moments, calls: int) -> str:
    assert layer.running_mean is not None
    assert layer.running_var is not None
    mean, var = total.mean, total.var(correction=1)
    spread = total.std().clamp(min=torch.finfo(torch.float64).tiny)
    usable = _usable(total)
    shift = ((layer.running_mean.to(mean.dtype) - mean) / spread).abs()[usable]
    for running, found in ((layer.running_mean, mean), (layer.running_var, var)):
        # One value has a mean, but no unbiased variance.
        running.copy_(torch.where(usable & ~found.isnan(), found, running.to(found.dtype)))
    if layer.num_batches_tracked is not None:
        # What momentum=None goes on averaging from.
        layer.num_batches_tracked.fill_(calls)
    return (
        f"{name or 'the model'}: statistics of {int(total.count.max())} values a channel, "
        f"means moved by up to {float(shift.max()) if shift.numel() else 0.0:.3g} sd"
    )


def _usable(total: Moments) -> Tensor:
    return total.mean.isfinite() & total.m2.isfinite() & (total.count > 0)


def _kept(name: str, total: Moments) -> list[str]:
    """What is said of channels whose data have no mean and variance: they keep what they had."""
    kept = (~_usable(total)).nonzero().flatten().tolist()
    if not kept:
        return []
    shown = ", ".join(map(str, kept[:8])) + (", …" if len(kept) > 8 else "")
    return [
        f"{name or 'the model'}: channels {shown} keep their statistics, for their values in these batches "
        "are not finite, or none"
    ]
