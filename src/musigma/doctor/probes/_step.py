"""Optimizer steps on a copy, then everything measured again: what looks dead at step 0 is judged there."""

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from musigma.doctor.probes._pass import Pass
from musigma.doctor.probes._trace import Trace

__all__ = ["Step", "Stepper", "copied", "settle", "silent"]

# Zero heads over zero branches over zero gates need a step each; more than this many deep is no design.
_LIMIT = 6


@dataclass(frozen=True)
class Step:
    """A model after one optimizer step or a few. What is measured of it is measured when it is asked for.

    Args:
        model: the copy that was stepped.
        moved: parameter name -> largest absolute change in the last step.
        optimizer: what stepped: the class of the caller's optimizer, or "SGD(lr=0.1, clipped)".
        count: how many steps were taken.
        look: runs a model once forward and backward.
        record: the same, measuring every node.
    """

    model: nn.Module = field(repr=False)
    moved: Mapping[str, float]
    optimizer: str
    count: int
    look: Callable[[nn.Module], Pass] = field(repr=False)
    record: Callable[[nn.Module], Trace] = field(repr=False)

    @cached_property
    def after(self) -> Pass:
        """One forward and one backward after the step: loss, gradients, output."""
        return self.look(self.model)

    @cached_property
    def trace(self) -> Trace:
        """The same, with every node measured."""
        return self.record(self.model)


def silent(run: Pass, names: Iterable[str]) -> frozenset[str]:
    """The parameters among `names` whose gradient is missing or exactly zero."""
    return frozenset(n for n in names if (g := run.gradients.get(n)) is None or not bool(g.any()))


def settle(first: Step, stepper: "Stepper") -> Step:
    """Step on as long as every step wakes parameters that had no gradient before.

    A zero head hides everything behind it for one step, a zero last convolution in a residual branch the
    branch for one more: those wake one after the other. What sleeps when a step wakes nobody stays asleep.
    """
    trainable = [n for n, p in first.model.named_parameters() if p.requires_grad]
    step, asleep = first, silent(first.after, trainable)
    while asleep and step.count < _LIMIT:
        moved = stepper.step(step.after.gradients)
        step = replace(step, model=stepper.model, moved=moved, optimizer=stepper.said, count=step.count + 1)
        still = silent(step.after, trainable)
        if still == asleep:
            break
        asleep = still
    return step


class Stepper:
    """A copy of a model with an optimizer of its own.

    The caller's optimizer is tried first. Where there is none, where it fails (a closure it needs) or doesn't
    move at all (a warm-up that starts at rate 0), plain SGD steps instead, rate 0.1 with the gradient's norm
    clipped at 1: bounded whatever the scale of the loss, and exactly still where the gradient is exactly 0,
    which an adaptive optimizer would not be on rounding noise.
    """

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self._original = model
        self.said = "SGD(lr=0.1, clipped)"
        self.model, self._optimizer = model, None
        if optimizer is not None:
            self.model, self._optimizer = copied(model, optimizer)
            self.said = type(self._optimizer).__name__
        else:
            self._fall_back()

    def step(self, gradients: Mapping[str, Tensor | None]) -> dict[str, float]:
        """One step with these gradients; parameter name -> largest absolute change."""
        moved: dict[str, float] = {}
        if self._optimizer is not None:
            moved = _step(self.model, self._optimizer, gradients)
            if not any(moved.values()) and any(g is not None and bool(g.any()) for g in gradients.values()):
                self._fall_back()
        if self._optimizer is None:
            norm = sum(float(g.double().square().sum()) for g in gradients.values() if g is not None) ** 0.5
            scaled = {n: None if g is None else g / max(norm, 1.0) for n, g in gradients.items()}
            moved = _step(self.model, _Plain(self.model), scaled)
        return moved

    def _fall_back(self) -> None:
        self.model, self._optimizer = copy.deepcopy(self._original), None
        self.said = "SGD(lr=0.1, clipped)"


class _Plain:
    """Gradient descent at rate 0.1. (torch's SGD imports dynamo when it is made, which takes seconds.)"""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = list(model.parameters())

    def step(self) -> None:
        with torch.no_grad():
            for p in self._parameters:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=0.1)


def copied(model: nn.Module, optimizer: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A copy of the model and an optimizer of the same kind and state over the copy's parameters."""
    if isinstance(optimizer, torch.optim.Optimizer):
        # Copied together: the memo maps the optimizer's parameters onto the copy's.
        pair = copy.deepcopy((model, optimizer))
        return pair[0], pair[1]
    twin = copy.deepcopy(model)
    return twin, optimizer(twin.parameters())


def _step(
    model: nn.Module, optimizer: torch.optim.Optimizer | _Plain, gradients: Mapping[str, Tensor | None]
) -> dict[str, float]:
    named = dict(model.named_parameters())
    before = {n: p.detach().clone() for n, p in named.items()}
    for n, p in named.items():
        g = gradients.get(n)
        p.grad = None if g is None else g.clone()
    try:
        optimizer.step()
    except (TypeError, RuntimeError):
        return {}
    finally:
        for p in named.values():
            p.grad = None
    return {n: float((p.detach() - before[n]).abs().max()) if p.numel() else 0.0 for n, p in named.items()}
