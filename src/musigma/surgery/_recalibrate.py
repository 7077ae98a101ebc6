"""The statistics of the whole data set in every BatchNorm, instead of a running average's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from musigma.statistics import Moments
from musigma.surgery._batches import Pick
from musigma.surgery._certificate import Certificate
from musigma.surgery._measured import Reading, Seen, execution_order, measure, shown

Mode = Literal["one-pass", "one_pass", "layerwise"]

Target = Callable[[_BatchNorm, Moments, float], tuple[Tensor, Tensor]]
"""The mean and the unbiased variance that a layer gets, of the moments of so many examples."""


def recalibrate(
    model: nn.Module,
    data: Any,
    *,
    mode: Mode = "one-pass",
    max_batches: int | None = None,
    mask: Pick = None,
    weights: Pick = None,
    group: dist.ProcessGroup | None = None,
    progress: bool = False,
) -> tuple[nn.Module, Certificate]:
    """Give every BatchNorm the mean and the unbiased variance of its inputs over all batches.

    The moments of the batches are merged (an average of per-batch variances would miss the spread between
    batches). `"one-pass"` reads the data once, every layer normalizing by its batch meanwhile, as in
    training. `"layerwise"` reads it once a layer, in execution order: each layer's statistics are taken of
    what the layers before it, already recalibrated, now give at test time. The second is exact for test time,
    whatever the sizes of the batches; the first costs one pass. Dropout is off in both.

    Frozen layers and layers without running statistics are left alone, and so are channels that an inf or NaN
    reached, which the certificate names. `momentum` plays no part, and num_batches_tracked becomes the number
    of batches read. `.training` everywhere, the states of torch's, NumPy's and Python's generators and the
    model itself stay as they were.

    In a distributed job each rank reads its part, and all get the statistics of the whole; every rank has to
    make the call. A rank may have no data.

    Args:
        model: any module; left as it is.
        data: what the model is called with: one example (a tensor, a tuple of arguments or a dict of
            keywords), a list of them, or a loader. Of the (inputs, targets) that a loader yields the targets
            are left out, and so are keys of a dict that the model does not take. `"layerwise"` reads it
            several times, so it must not be an iterator.
        mode: "one-pass" or "layerwise".
        max_batches: read only so many, on each rank.
        mask: where in a batch its mask is, a key or an index, or a function of the batch: (n,) or (n,
            *positions), True counts. What a layer of musigma is given as its own mask comes first. Layers
            whose inputs have other positions keep their statistics, and are named.
        weights: the same for the weights of the examples, (n,), not negative; 2 counts an example twice.
        group: the ranks that read parts of the same data; all of them if None.
        progress: show a bar on standard error (needs rich).

    Returns:
        a copy with new statistics, and a certificate that names them. It compares no outputs: they are meant
        to change.

    Raises:
        ValueError: no batches, an unknown mode, an iterator with "layerwise", a negative weight, or a batch
            of one value a channel with "one-pass".
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
    reading = Reading(data, max_batches, mask, weights, group, progress)
    return with_statistics("recalibrate", model, reading, mode, _whole)


def _whole(layer: _BatchNorm, total: Moments, examples: float) -> tuple[Tensor, Tensor]:
    return total.mean, total.var(correction=1)


def with_statistics(
    operation: str, model: nn.Module, reading: Reading, mode: Mode, target: Target
) -> tuple[nn.Module, Certificate]:
    """A copy whose BatchNorms have the statistics that `target` makes of what reaches them."""
    layerwise = mode == "layerwise"
    if mode not in ("one-pass", "one_pass", "layerwise"):
        raise ValueError(f"mode must be 'one-pass' or 'layerwise'; got {mode!r}")
    if layerwise and isinstance(reading.data, Iterator):
        raise ValueError(
            "mode 'layerwise' reads the data once a layer; pass a list or a loader, not an iterator"
        )
    twin = copy.deepcopy(model)
    layers = {name: m for name, m in twin.named_modules() if _keeps_statistics(m)}
    order = execution_order(twin, layers, reading) if layerwise else []
    groups = [{name: layers[name]} for name in order] if order else [layers]
    changed: list[str] = []
    refused: list[str] = []
    reached: set[str] = set()
    with shown(reading.progress, operation, len(reading) * len(groups)) as advance:
        for group in groups:
            found = measure(twin, group, reading, training=not layerwise, advance=advance)
            for name, seen in found.items():
                reached.add(name)
                if seen.unfit:
                    refused.append(f"{name or 'the model'}: {seen.unfit}")
                    continue
                changed.append(_write(name, layers[name], seen, target))
                refused += _kept(name, seen.moments)
    refused += [f"{n or 'the model'}: no batch reached it" for n in layers if n not in reached]
    return twin, Certificate(operation, tuple(changed), tuple(refused))


def _keeps_statistics(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm) and module.running_mean is not None


def _write(name: str, layer: _BatchNorm, seen: Seen, target: Target) -> str:
    assert layer.running_mean is not None
    assert layer.running_var is not None
    total = seen.moments.to(layer.running_mean.device)
    mean, var = target(layer, total, seen.examples)
    spread = total.std().clamp(min=torch.finfo(torch.float64).tiny)
    usable = _usable(total)
    shift = ((layer.running_mean.to(mean.dtype) - mean) / spread).abs()[usable]
    for running, found in ((layer.running_mean, mean), (layer.running_var, var)):
        # One value has a mean, but no unbiased variance.
        running.copy_(torch.where(usable & ~found.isnan(), found, running.to(found.dtype)))
    if layer.num_batches_tracked is not None:
        # What momentum=None goes on averaging from.
        layer.num_batches_tracked.fill_(seen.calls)
    return (
        f"{name or 'the model'}: statistics of {float(total.count.max()):.15g} values a channel, "
        f"means moved by up to {float(shift.max()) if shift.numel() else 0.0:.3g} sd"
    )


def _usable(total: Moments) -> Tensor:
    return total.mean.isfinite() & total.m2.isfinite() & (total.count > 0)


def _kept(name: str, total: Moments) -> list[str]:
    """What is said of channels whose data have no mean and variance: they keep what they had."""
    kept = (~_usable(total)).nonzero().flatten().tolist()
    if not kept:
        return []
    some = ", ".join(map(str, kept[:8])) + (", …" if len(kept) > 8 else "")
    return [
        f"{name or 'the model'}: channels {some} keep their statistics, for their values in these batches "
        "are not finite, or none"
    ]
