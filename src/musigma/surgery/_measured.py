"""The moments of what reaches a model's layers, over many batches and all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from musigma.functional._variances import impossible_variances_pass
from musigma.graph import call, tensors
from musigma.graph._state import Untouched
from musigma.nn._statistics import KeepsStatistics
from musigma.statistics import Moments, moments
from musigma.surgery._batches import Pick, as_batches, as_example, picked
from musigma.surgery._certificate import own_copy

NOTHING = "recalibration needs at least one batch; got none"
_ALONE = (
    "In mode 'one-pass' every BatchNorm normalizes by its batch, as in training, which takes more than one "
    "value a channel: leave out a last batch of one (drop_last=True), or take mode='layerwise'."
)


@dataclass(frozen=True)
class Batch:
    """One batch: what the model is called with, what each position counts, and how many examples that is."""

    example: Any
    counts: Tensor | None
    examples: float


@dataclass(frozen=True)
class Reading:
    """What is read, how much of it, what counts in it, who else reads, and whether it is shown.

    Args:
        data: an example, a list of them, or a loader.
        max_batches: read only so many.
        mask: where in a batch the mask is.
        weights: where in a batch the weights of its examples are.
        group: the ranks that read parts of the same data.
        progress: show a bar on standard error.
    """

    data: Any
    max_batches: int | None = None
    mask: Pick = None
    weights: Pick = None
    group: dist.ProcessGroup | None = None
    progress: bool = False

    def batches(self, model: nn.Module) -> Iterator[Batch]:
        """What is read, batch by batch."""
        for batch in islice(as_batches(self.data), self.max_batches):
            mask, weights = picked(batch, self.mask), picked(batch, self.weights)
            example = own_copy(as_example(model, batch))
            first = next(iter(tensors(example)), None)
            size = 0 if first is None or not first.dim() else first.shape[0]
            examples = float(size if weights is None else weights.sum())
            if mask is not None and weights is not None:
                mask = mask * weights.reshape(-1, *[1] * (mask.dim() - 1))
            yield Batch(example, weights if mask is None else mask, examples)

    def __len__(self) -> int:
        try:
            known = len(as_batches(self.data))  # type: ignore[arg-type]  # loaders of iterable sets have none
        except TypeError:
            return self.max_batches or 0
        return known if self.max_batches is None else min(known, self.max_batches)


@dataclass(frozen=True)
class Seen:
    """What reached a layer.

    Args:
        moments: of its input, a channel at a time.
        calls: how often it was called.
        examples: how many examples were read.
        unfit: why some of it could not be counted, or nothing.
    """

    moments: Moments
    calls: int
    examples: float = 0.0
    unfit: str = ""

    def __add__(self, other: Seen) -> Seen:
        return Seen(self.moments + other.moments, self.calls + other.calls, unfit=self.unfit or other.unfit)


def measure(
    model: nn.Module,
    layers: Mapping[str, _BatchNorm],
    reading: Reading,
    *,
    training: bool,
    advance: Callable[[], None],
) -> dict[str, Seen]:
    """What reaches each layer, over all batches of all ranks; the model stays as it is.

    Args:
        model: run in evaluation.
        layers: its layers that are listened to.
        reading: what to read.
        training: whether these layers normalize by their batch meanwhile.
        advance: called after each batch.

    Raises:
        ValueError: no rank has a batch.
    """
    seen: dict[str, Seen] = {}
    counts: Tensor | None = None
    examples = 0.0

    def listen(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else kwargs["input"]
        if x.dim() < 2 or x.shape[1] != layers[name].num_features:
            return  # which the layer itself refuses
        new = _seen(layers[name], x, kwargs.get("mask"), counts)
        seen[name] = seen[name] + new if name in seen else new

    read = 0
    with Untouched(model), torch.no_grad(), impossible_variances_pass():
        model.eval()
        for name, layer in layers.items():
            layer.train(training)
            layer.register_forward_pre_hook(
                lambda _m, args, kwargs, name=name: listen(name, args, kwargs), with_kwargs=True
            )
        for batch in reading.batches(model):
            counts = batch.counts
            with _explained(training):
                call(model, batch.example)
            read, examples = read + 1, examples + batch.examples
            advance()
    return _merged(seen, read, examples, layers, reading.group)


def execution_order(model: nn.Module, layers: Mapping[str, nn.Module], reading: Reading) -> list[str]:
    """The layers in the order in which the first batch reaches them; the same on all ranks."""
    order: dict[str, None] = {}
    with Untouched(model), torch.no_grad(), impossible_variances_pass():
        model.eval()
        for name, layer in layers.items():
            layer.register_forward_pre_hook(lambda _m, _a, name=name: order.setdefault(name))
        for batch in reading.batches(model):
            call(model, batch.example)
            break
    return next(filter(None, _everyones(list(order), reading.group)), [])


def _seen(layer: _BatchNorm, x: Tensor, own_mask: Tensor | None, counts: Tensor | None) -> Seen:
    # What a stranger's layer means by a mask is unknown; ours keeps padding out of the statistics.
    mask = own_mask if isinstance(layer, KeepsStatistics) else None
    unfit = ""
    if mask is None and counts is not None:
        mask = _aligned(counts.to(x.device), x)
        if mask is None:
            unfit = f"a mask of shape {tuple(counts.shape)} does not fit its input of shape {tuple(x.shape)}"
    return Seen(moments(x.detach(), [0, *range(2, x.dim())], mask=mask), 1, unfit=unfit)


def _aligned(counts: Tensor, x: Tensor) -> Tensor | None:
    """What each position of (n, c, *positions) counts: of (n,), (n, *positions) or, for (n·l, c), (n, l)."""
    n, _, *positions = x.shape
    if counts.shape == (n,):
        return counts.reshape(n, *[1] * (x.dim() - 1))
    if counts.shape == (n, *positions):
        return counts.unsqueeze(1)
    if counts.shape == (n, 1, *positions) or counts.shape == x.shape:
        return counts
    return counts.reshape(n, 1) if x.dim() == 2 and counts.numel() == n else None


def _merged(
    seen: dict[str, Seen],
    read: int,
    examples: float,
    layers: Mapping[str, _BatchNorm],
    group: dist.ProcessGroup | None,
) -> dict[str, Seen]:
    """What reached the layers of all ranks together."""
    told = {name: (s.calls, s.unfit) for name, s in seen.items()}
    everyone = _everyones((read, examples, told), group)
    if sum(batches for batches, _, _ in everyone) == 0:
        raise ValueError(NOTHING)
    total = sum(n for _, n, _ in everyone)
    merged: dict[str, Seen] = {}
    for name, layer in layers.items():
        parts = [found[name] for _, _, found in everyone if name in found]
        if parts:
            mine = seen[name].moments if name in seen else _empty(layer)
            unfit = next((why for _, why in parts if why), "")
            calls = sum(calls for calls, _ in parts)
            merged[name] = Seen(mine.all_reduce(group), calls, total, unfit)
    return merged


def _empty(layer: _BatchNorm) -> Moments:
    zero = torch.zeros(layer.num_features, dtype=torch.float64)
    return Moments(zero, zero, zero)


def _everyones(mine: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """What each rank has, by rank."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) == 1:
        return [mine]
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    return everyone


@contextmanager
def _explained(training: bool) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        if training and "more than 1 value per channel" in str(error):
            error.add_note(_ALONE)
        raise


@contextmanager
def shown(progress: bool, what: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar on standard error, if asked for; what to call after each step."""
    if not progress:
        yield lambda: None
        return
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError as error:
        raise ImportError("progress=True draws its bar with rich: pip install rich") from error
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=total or None)
        yield lambda: bar.advance(task)
