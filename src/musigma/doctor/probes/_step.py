"""One optimizer step on a copy, then everything measured again: what looks dead at step 0 is judged here."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from musigma.doctor.probes._trace import Trace

__all__ = ["Step", "take_step"]


@dataclass(frozen=True)
class Step:
    """A model after one optimizer step.

    Args:
        model: the copy that was stepped.
        trace: its forward and backward after the step.
        moved: parameter name -> largest absolute change.
        optimizer: what stepped: the class of the caller's optimizer, or "SGD(lr=0.1, clipped)".
    """

    model: nn.Module = field(repr=False)
    trace: Trace = field(repr=False)
    moved: Mapping[str, float]
    optimizer: str


def take_step(
    model: nn.Module,
    optimizer: Any,
    gradients: Mapping[str, Tensor | None],
    measure: Callable[[nn.Module], Trace],
) -> Step:
    """Step a copy of the model with the gradients that were measured, and measure the copy.

    The caller's optimizer is tried first. Where there is none, where it fails (a closure it needs) or doesn't
    move at all (a warm-up that starts at rate 0), plain SGD steps instead, rate 0.1 with the gradient's norm
    clipped at 1: bounded whatever the scale of the loss, and exactly still where the gradient is exactly 0,
    which an adaptive optimizer would not be on rounding noise.
    """
    said = ""
    moved: dict[str, float] = {}
    stepped = model
    if optimizer is not None:
        stepped, own = copied(model, optimizer)
        said, moved = type(own).__name__, _step(stepped, own, gradients)
    if not any(moved.values()):
        stepped = copy.deepcopy(model)
        norm = sum(float(g.double().square().sum()) for g in gradients.values() if g is not None) ** 0.5
        scaled = {n: None if g is None else g / max(norm, 1.0) for n, g in gradients.items()}
        said = "SGD(lr=0.1, clipped)"
        moved = _step(stepped, torch.optim.SGD(stepped.parameters(), lr=0.1), scaled)
    return Step(stepped, measure(stepped), moved, said)


def copied(model: nn.Module, optimizer: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A copy of the model and an optimizer of the same kind and state over the copy's parameters."""
    if isinstance(optimizer, torch.optim.Optimizer):
        # Copied together: the memo maps the optimizer's parameters onto the copy's.
        pair = copy.deepcopy((model, optimizer))
        return pair[0], pair[1]
    twin = copy.deepcopy(model)
    return twin, optimizer(twin.parameters())


def _step(
    model: nn.Module, optimizer: torch.optim.Optimizer, gradients: Mapping[str, Tensor | None]
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
