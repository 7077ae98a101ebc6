"""Elementwise ops, kept so that they can be run again on other numbers."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from musigma.graph._nodes import Edge, Node, Recipe, Slot, Source


@dataclass(frozen=True)
class Function:
    """A function of one tensor, made of recorded elementwise ops: what a model applied by hand.

    Args:
        nodes: the ops in execution order; the last one gives the result.
        start: the value that the tensor stands for.
    """

    nodes: tuple[Node, ...]
    start: Source

    def __call__(self, x: Tensor) -> Tensor:
        values: dict[object, Tensor] = {_token(self.start): x}
        for node in self.nodes:
            assert node.recipe is not None
            values[(node.index, 0)] = rerun(node.recipe, values)
        return values[(self.nodes[-1].index, 0)]


def can_rerun(node: Node, known: Container[object]) -> bool:
    """Whether a node's recipe needs nothing but constants and the known values."""
    recipe = node.recipe
    return recipe is not None and all(
        isinstance(operand, float) or _token(operand) in known for operand in recipe.operands
    )


def rerun(recipe: Recipe, values: Mapping[object, Tensor]) -> Tensor:
    """Run one op again.

    Args:
        recipe: the op.
        values: tensors by edge key or source; all of one dtype, which constants take on.
    """
    like = next(iter(values.values()))
    # Clones, because the recorded op may work in place; constants broadcast, but for a target of that.
    operands = [
        values[_token(operand)].clone()
        if not isinstance(operand, float)
        else torch.full_like(like, operand)
        if place == 0
        else like.new_full((), operand)
        for place, operand in enumerate(recipe.operands)
    ]
    args = [_filled(value, operands) for value in recipe.args]
    kwargs = {name: _filled(value, operands) for name, value in recipe.kwargs.items()}
    return _resolve(recipe.target)(*args, **kwargs)


def _token(source: Source) -> object:
    return source.key if isinstance(source, Edge) else source


def _filled(value: Any, operands: Sequence[Tensor]) -> Any:
    if isinstance(value, Slot):
        return operands[value.position]
    if isinstance(value, tuple):
        return tuple(_filled(item, operands) for item in value)
    return value


def _resolve(target: str) -> Callable[..., Tensor]:
    found: Any = torch
    for name in target.split(".")[1:]:
        found = getattr(found, name)
    return found
