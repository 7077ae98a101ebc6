"""Norms that keep channels apart and may remember them: what they see, against what they have stored."""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from musigma import graph as _graph
from musigma.doctor.probes import _calls
from musigma.graph import Node
from musigma.statistics import Moments, moments

__all__ = ["CHANNEL_NORMS", "ChannelMeasure", "Stored", "measure_channels", "training_twin"]

CHANNEL_NORMS = ("batch_norm", "instance_norm")
# Where the arguments stand in torch.nn.functional (and musigma.functional), and in torch itself.
_FUNCTIONAL = ("input", "running_mean", "running_var")
_NATIVE = ("input", "weight", "bias", "running_mean", "running_var")


@dataclass(frozen=True)
class Stored:
    """Running statistics, as they were before the run.

    Args:
        mean: (channels,).
        var: (channels,).
        names: the qualified names of the two buffers; empty where they are no buffers of the model.
        momentum: torch's (the weight of the new value), None for the plain average of all batches.
        tracked: how many batches they have taken in; None where nobody counts.
    """

    mean: Tensor
    var: Tensor
    names: tuple[str, ...]
    momentum: float | None
    tracked: int | None

    @property
    def initial(self) -> bool:
        """Whether they are what a fresh layer has: mean 0 and variance 1, exactly."""
        return bool((self.mean == 0).all()) and bool((self.var == 1).all())

    @property
    def updates(self) -> int | None:
        """How many updates they have seen; None where that isn't known.

        Statistics that were loaded or recalibrated may stand beside a counter of 0, which then says nothing.
        """
        return None if self.tracked == 0 and not self.initial else self.tracked

    @property
    def untouched(self) -> bool:
        """Whether no update has ever moved them, as in a model that has not been trained yet."""
        return self.initial and not self.tracked

    @property
    def initial_weight(self) -> float | None:
        """The part that the initial values still have in them, (1 − momentum)^updates; None if unknown."""
        if self.updates is None:
            return None
        if self.momentum is None:
            return 0.0 if self.updates else 1.0
        return (1 - self.momentum) ** self.updates

    @property
    def learning(self) -> bool:
        """Whether the initial values still show only because training has just begun.

        After 5/momentum updates e⁻⁵ < 1 % of them is left. A momentum below 0.01 would need more than 500
        steps for that: then the momentum is the trouble, and waiting is no cure.
        """
        if self.untouched:
            return True
        if self.momentum is None or self.updates is None:
            return False
        return self.momentum >= 0.01 and self.updates < 5 / self.momentum


@dataclass(frozen=True)
class ChannelMeasure:
    """One call of a BatchNorm or an InstanceNorm, module or function.

    Args:
        node: the graph node.
        kind: "batch_norm" or "instance_norm".
        path: qualified name of the module that called it.
        own: whether it normalized by its input's own statistics (False: by the stored ones).
        batch: (channels,) moments of its input over examples and positions.
        examples: (examples, channels) moments of its input over positions.
        stored: the running statistics; None where there are none.
        weight: (channels,), or None.
        eps: what is added to the variance.
    """

    node: Node
    kind: str
    path: str
    own: bool
    batch: Moments = field(repr=False)
    examples: Moments = field(repr=False)
    stored: Stored | None = field(repr=False)
    weight: Tensor | None = field(repr=False)
    eps: float

    @property
    def count(self) -> int:
        """How many examples there are."""
        return self.examples.mean.shape[0]

    @cached_property
    def mean(self) -> Tensor:
        """(channels,) what one update would take in as the mean."""
        return self.batch.mean if self.kind == "batch_norm" else moments(self.examples.mean, 0).mean

    @cached_property
    def var(self) -> Tensor:
        """(channels,) what one update would take in as the variance: the unbiased one."""
        if self.kind == "batch_norm":
            return self.batch.var(correction=1)
        return moments(self.examples.var(correction=1), 0).mean

    @cached_property
    def ratio(self) -> Tensor:
        """(channels,) variance of the examples' means over the variance of all values, between 0 and 1.

        The mean of an example's positions varies by s²; n such means give the channel's mean with the
        variance s²/n, however much the positions of one example resemble each other. So n examples are worth
        n/ratio independent values. Without positions the ratio is 1; with one example nothing shows how far
        examples differ, and it counts as 1.
        """
        if self.count < 2:
            return torch.ones_like(self.batch.mean)
        between = moments(self.examples.mean, 0).var(correction=1)
        within = moments(self.examples.var(), 0).mean
        total = between + within
        return torch.where(total > 0, between / total, torch.nan)

    @cached_property
    def effective(self) -> float:
        """How many independent values each statistic is worth, pooled over the channels that vary."""
        varying = self.ratio[~self.ratio.isnan()]
        if not varying.numel():
            return float("nan")
        pooled = float(moments(varying, None).mean)
        return self.count / pooled if pooled > 0 else float(self.batch.count.max())

    @cached_property
    def mean_error(self) -> Tensor:
        """(channels,) standard error of the mean, in standard deviations.

        The larger of the channel's own estimate and the pooled one, which fewer examples suffice for.
        """
        pooled = 1 / self.effective
        return (self.ratio / self.count).nan_to_num(pooled).clamp_min(pooled).sqrt()

    @cached_property
    def std_error(self) -> Tensor:
        """(channels,) standard error of the standard deviation, relative.

        The examples' mean squared deviations from the channel's mean are n independent draws, so the variance
        has their standard error and the standard deviation half of that. Never below √(2/4M), a normal
        feature's over M effective values.
        """
        normal = torch.full_like(self.batch.mean, (2 / (4 * self.effective)) ** 0.5)
        if self.count < 2:
            return normal
        squares = self.examples.var() + (self.examples.mean - self.batch.mean).square()
        error = (moments(squares, 0).var(correction=1) / self.count).sqrt() / (2 * self.batch.var())
        return torch.where(error > normal, error, normal)

    def gap(self) -> float:
        """How far this layer alone puts its outputs in training from those by its stored statistics.

            x̂ − x̂ᵣ = x̂·(1 − σ/σᵣ) + (μᵣ − μ)/σᵣ,    E[x̂] = 0, E[x̂²] = 1

        root mean square over the channels (of an InstanceNorm those of every example), in standard deviations
        of the normalized values.
        """
        assert self.stored is not None
        own = self.batch if self.kind == "batch_norm" else self.examples
        wide = (self.stored.var.double().clamp_min(0) + self.eps).sqrt()
        spread = 1 - (own.var() + self.eps).sqrt() / wide
        shift = (self.stored.mean.double() - own.mean) / wide
        return float(moments(spread.square() + shift.square(), None).mean) ** 0.5

    def gap_noise(self) -> float:
        """What sampling alone makes of `gap`: the errors of mean and standard deviation together."""
        return float(moments(self.mean_error.square() + self.std_error.square(), None).mean) ** 0.5


def training_twin(model: nn.Module, modes: Mapping[str, bool]) -> nn.Module:
    """The model in the mode in which it trains: itself where it is in it, else a copy in train mode.

    Args:
        model: in whatever mode.
        modes: the flags its user gave it. A part in eval mode of a model in train mode was frozen on purpose.
    """
    return model if modes[""] or model.training else copy.deepcopy(model).train()


def measure_channels(model: nn.Module, inputs: Any, *, seed: int = 0) -> tuple[ChannelMeasure, ...]:
    """Run the model once, as it is, and measure every call of a BatchNorm or an InstanceNorm.

    Args:
        model: left as it was, running statistics included.
        inputs: as the model takes them.
        seed: what the model's own randomness starts from.

    Raises:
        Exception: whatever the model raises.
    """
    found: list[ChannelMeasure] = []
    before = {n: b.detach().clone() for n, b in model.named_buffers(remove_duplicate=False)}

    def listen(node: Node, args: Any, kwargs: Any, _outputs: Any) -> None:
        if node.op in CHANNEL_NORMS:
            found.extend(_measure(model, before, node, args, kwargs))

    with torch.no_grad(), _calls.forked_rng(model, seed):
        _graph.record(model, _calls.clone_inputs(inputs), listen=listen)
    return tuple(found)


def _measure(
    model: nn.Module, before: Mapping[str, Tensor], node: Node, args: Any, kwargs: Any
) -> Iterator[ChannelMeasure]:
    # `torch.batch_norm` has another order than `torch.nn.functional.batch_norm`.
    native = node.target.startswith("torch.") and node.target.count(".") == 1
    bound = {**dict(zip(_NATIVE if native else _FUNCTIONAL, args, strict=False)), **kwargs}
    x = bound["input"].detach()
    if x.ndim < 2 or not x.numel():
        return
    mask = bound.get("mask")
    positions = list(range(2, x.ndim))
    own = node.options.get("training" if node.op == "batch_norm" else "use_input_stats", True)
    weight = bound.get("weight")
    yield ChannelMeasure(
        node=node,
        kind=node.op,
        path=node.module,
        own=bool(own),
        batch=moments(x, [0, *positions], mask=mask),
        examples=_filled(moments(x, positions, mask=mask)),
        stored=_stored(model, before, node, bound),
        weight=None if weight is None else weight.detach().clone(),
        eps=_number(node.options.get("eps"), 1e-5),
    )


def _filled(m: Moments) -> Moments:
    """Without the examples that a mask excludes altogether."""
    if not m.count.ndim:
        return m
    real = (m.count > 0).all(1)
    return Moments(m.count[real], m.mean[real], m.m2[real])


def _stored(
    model: nn.Module, before: Mapping[str, Tensor], node: Node, bound: Mapping[str, Any]
) -> Stored | None:
    pair = [t for n in ("running_mean", "running_var") if isinstance(t := bound.get(n), Tensor)]
    if len(pair) != 2:
        return None
    held = {id(b): n for n, b in model.named_buffers(remove_duplicate=False)}
    names = tuple(held[id(t)] for t in pair if id(t) in held)
    # This is asked after the call, which may have updated them in place.
    mean, var = (before[held[id(t)]] if id(t) in held else t.detach().clone() for t in pair)
    owner = model.get_submodule(names[0].rpartition(".")[0]) if names else None
    momentum, tracked = node.options.get("momentum", 0.1), None
    if isinstance(owner, nn.modules.batchnorm._NormBase):
        # What it hands to the function is 0 in eval mode and 1/tracked for a plain average.
        momentum, tracked = (
            owner.momentum,
            before.get(names[0].replace("running_mean", "num_batches_tracked")),
        )
    return Stored(
        mean,
        var,
        names,
        None if momentum is None else _number(momentum, 0.1),
        None if tracked is None else int(tracked),
    )


def _number(value: Any, default: float) -> float:
    return float(value) if isinstance(value, int | float) else default
