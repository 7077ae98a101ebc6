"""Calling a model the way its user does: inputs in three forms, outputs in many, one loss."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

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


def tensors_in(tree: Any) -> list[Tensor]:
    """Every tensor in nested tuples, lists, mappings (ModelOutput is one) and dataclasses, in order."""
    if isinstance(tree, Mapping):
        return [t for v in tree.values() for t in tensors_in(v)]
    if isinstance(tree, list | tuple):
        return [t for v in tree for t in tensors_in(v)]
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return [t for f in dataclasses.fields(tree) for t in tensors_in(getattr(tree, f.name))]
    return [t for t in pytree.tree_leaves(tree) if isinstance(t, Tensor)]


def clone_inputs(inputs: Any) -> Any:
    """The inputs with every tensor cloned, so that a model that writes into its input changes a copy."""
    return pytree.tree_map(lambda v: v.detach().clone() if isinstance(v, Tensor) else v, inputs)


def call(model: nn.Module, inputs: Any) -> Any:
    """The model on inputs given as a tensor, a tuple of arguments or a mapping of keywords."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


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


@contextmanager
def forked_rng(model: nn.Module, seed: int | None = None) -> Iterator[None]:
    """What the model draws inside leaves the global generators as they were; seeded where a seed is given."""
    devices = {p.device for p in (*model.parameters(), *model.buffers()) if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=sorted(devices, key=str)):
        if seed is not None:
            torch.manual_seed(seed)
        yield


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
    """The number to differentiate, and where it came from: "given", "own" or "projection".

    Raises:
        ValueError: the given loss returned more than one number.
        TypeError: it returned no floating tensor.
    """
    if loss is None:
        own = _own_loss(output)
        return (own.reshape(()), "own") if own is not None else (projection(output), "projection")
    value = loss(output) if targets is None else loss(output, targets)
    if not isinstance(value, Tensor) or not value.is_floating_point():
        raise TypeError(f"loss must return one floating tensor; got {type(value).__name__}")
    if value.numel() != 1:
        raise ValueError(
            f"loss must return one number; got shape {tuple(value.shape)}: reduce it with .mean()"
        )
    return value.reshape(()), "given"
