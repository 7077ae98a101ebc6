"""Calling a model the way its user does: inputs in three forms, outputs in many, one loss."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from musigma.graph import call, forked_rng
from musigma.graph import tensors as tensors_in

__all__ = [
    "batch_size",
    "call",
    "clone_inputs",
    "floating_outputs",
    "forked_rng",
    "loss_of",
    "rows_of",
    "tensors_in",
]


def clone_inputs(inputs: Any) -> Any:
    """The inputs with every tensor cloned, so that a model that writes into its input changes a copy."""
    return pytree.tree_map(lambda v: v.detach().clone() if isinstance(v, Tensor) else v, inputs)


def batch_size(inputs: Any) -> int | None:
    """The length of the first axis of the first tensor that has one."""
    return next((t.shape[0] for t in tensors_in(inputs) if t.ndim), None)


def rows_of(inputs: Any, index: Iterable[int]) -> Any:
    """The inputs with some of their examples: every tensor with the batch axis in front is indexed."""
    rows, chosen = batch_size(inputs), list(index)

    def pick(value: Any) -> Any:
        led = isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == rows
        return value[torch.tensor(chosen, device=value.device)] if led else value

    return pytree.tree_map(pick, inputs)


def floating_outputs(output: Any) -> list[Tensor]:
    """The floating tensors of an output of any shape; complex ones as pairs of real numbers."""
    found = [torch.view_as_real(t) if t.is_complex() else t for t in tensors_in(output)]
    return [t for t in found if t.is_floating_point() and t.numel()]


def _own_loss(output: Any) -> Tensor | None:
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return own if isinstance(own, Tensor) and own.is_floating_point() and own.numel() == 1 else None


def projection(output: Any) -> Tensor | None:
    """A fixed random projection of the outputs, mean-reduced: a loss where nobody gave one.

    The gradient of a sum (or of a sum of squares) is exactly zero behind a centred normalization, whose
    output sums to a constant; for BatchNorm weights per feature aren't enough either. So every element of
    every output gets its own standard normal coefficient, the same in every run.
    """
    outputs = floating_outputs(output)
    if not outputs:
        return None
    generator = torch.Generator().manual_seed(0)
    total = None
    for out in outputs:
        weight = torch.randn(out.shape, generator=generator, dtype=torch.float32).to(out.device)
        term = (out.to(torch.promote_types(out.dtype, torch.float32)) * weight).mean()
        total = term if total is None else total + term.to(total.device)
    return total


def loss_of(output: Any, targets: Any, loss: Callable[..., Any] | None) -> tuple[Tensor | None, str]:
    """The number to differentiate, and where it came from: "given", "own", "projection" or "none".

    Raises:
        ValueError: the given loss returned more than one number.
        TypeError: it returned no floating tensor.
    """
    if loss is None:
        own = _own_loss(output)
        if own is not None:
            return own.reshape(()), "own"
        projected = projection(output)
        return projected, "none" if projected is None else "projection"
    value = loss(output) if targets is None else loss(output, targets)
    if not isinstance(value, Tensor) or not value.is_floating_point():
        raise TypeError(f"loss must return one floating tensor; got {type(value).__name__}")
    if value.numel() != 1:
        raise ValueError(
            f"loss must return one number; got shape {tuple(value.shape)}: reduce it with .mean()"
        )
    return value.reshape(()), "given"
