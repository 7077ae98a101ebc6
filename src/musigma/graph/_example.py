"""How an example becomes the arguments of `forward`, and what its tensors are called."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from musigma.graph._nodes import TensorSpec
from musigma.graph._tensors import named_tensors

Example = Any
"""A tensor, a tuple of positional arguments or a mapping of keyword arguments."""


def arguments(example: Example) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and keyword arguments that an example stands for.

    Raises:
        TypeError: the example is none of tensor, tuple and mapping with string keys.
    """
    if isinstance(example, Tensor | PackedSequence):
        return (example,), {}
    if isinstance(example, tuple):
        return example, {}
    if isinstance(example, Mapping) and all(isinstance(key, str) for key in example):
        return (), dict(example)
    hint = ""
    if isinstance(example, list):
        hint = "; a list is one argument: pass (the_list,), or tuple(the_list) for several"
    elif isinstance(example, Mapping):
        hint = "; the keys of a mapping are argument names; pass (the_mapping,) for a single argument"
    raise TypeError(
        "example must be a tensor, a tuple of positional arguments or a dict of keyword arguments, "
        f"not {type(example).__name__}{hint}"
    )


def input_names(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Tensor]]:
    """The example's tensors under the names that the model's `forward` gives them."""
    try:
        bound: Mapping[str, Any] = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):  # a wrong call, which forward itself will refuse, or no signature
        bound = {**{str(index): value for index, value in enumerate(args)}, **kwargs}
    return [found for name, value in bound.items() for found in named_tensors(value, name)]


def describe_call(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The call that was made, with shapes for tensors, and the signature that received it."""
    given = [_describe(value) for value in args] + [
        f"{key}={_describe(value)}" for key, value in kwargs.items()
    ]
    try:
        signature = str(inspect.signature(model.forward))
    except (TypeError, ValueError):
        signature = "(...)"
    return f"{type(model).__name__}({', '.join(given)}), whose signature is forward{signature}"


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return str(TensorSpec.of(value))
    found = list(named_tensors(value))
    if found:
        inner = ", ".join(str(TensorSpec.of(tensor)) for _, tensor in found[:4])
        return f"{type(value).__name__} of {inner}{', ...' if len(found) > 4 else ''}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
