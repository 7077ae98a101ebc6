"""Calling a model the way its user does, with whatever it draws kept apart."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from musigma.graph._example import Example, arguments, input_names


def call(model: nn.Module, example: Example) -> Any:
    """The model on an example: a tensor, a tuple of arguments or a mapping of keyword arguments.

    Raises:
        TypeError: the example is none of these.
    """
    args, kwargs = arguments(example)
    return model(*args, **kwargs)


def named_inputs(model: nn.Module, example: Example) -> dict[str, Tensor]:
    """The example's tensors under the names that the graph of a recording gives them.

    Raises:
        TypeError: the example is no tensor, tuple of arguments or mapping of keyword arguments.

    Example:
        >>> list(named_inputs(nn.Linear(2, 2), torch.zeros(1, 2)))
        ['input']
    """
    args, kwargs = arguments(example)
    return dict(input_names(model, args, kwargs))


@contextmanager
def forked_rng(model: nn.Module, seed: int | None = None) -> Iterator[None]:
    """Leave torch's global generators as they were, whatever is drawn inside; seeded where a seed is given.

    Args:
        model: its devices are the ones whose generators are kept, the CPU's always.
        seed: what the generators start from inside.
    """
    devices = {t.device for t in (*model.parameters(), *model.buffers()) if t.device.type == "cuda"}
    with torch.random.fork_rng(devices=sorted(devices, key=str)):
        if seed is not None:
            torch.manual_seed(seed)
        yield
