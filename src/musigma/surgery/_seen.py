"""What a layer is called with when the model runs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from musigma.functional._variances import impossible_variances_pass
from musigma.graph import call, forked_rng
from musigma.surgery._certificate import own_copy

Listener = Callable[[str, Tensor, Any], object]
"""Hears a layer's name, its input and its output."""


def run_and_listen(model: nn.Module, layers: Mapping[str, nn.Module], example: Any, listen: Listener) -> None:
    """Run a model in evaluation on one example, and hear what each call of the layers was given and returned.

    The model's own modes, buffers and random state are as before.
    """
    twin = copy.deepcopy(model).eval()
    with ExitStack() as stack, torch.no_grad(), forked_rng(twin), impossible_variances_pass():
        for name in layers:
            hook = twin.get_submodule(name).register_forward_hook(
                lambda _m, args, kwargs, out, name=name: listen(
                    name, args[0] if args else next(iter(kwargs.values())), out
                ),
                with_kwargs=True,
            )
            stack.callback(hook.remove)
        call(twin, own_copy(example))


def dims_seen(model: nn.Module, layers: Mapping[str, nn.Module], example: Any) -> dict[str, tuple[int, ...]]:
    """The numbers of dims of what each layer is called with; nothing without an example."""
    if example is None or not layers:
        return {}
    seen: dict[str, set[int]] = {}
    run_and_listen(model, layers, example, lambda name, x, _: seen.setdefault(name, set()).add(x.dim()))
    return {name: tuple(sorted(dims)) for name, dims in seen.items()}


def shapes_seen(
    model: nn.Module, layers: Mapping[str, nn.Module], data: Iterable[Any]
) -> dict[str, list[tuple[int, ...]]]:
    """The shapes of what each layer is called with, layers in the order in which they are reached."""
    seen: dict[str, list[tuple[int, ...]]] = {}
    for example in data:
        run_and_listen(
            model, layers, example, lambda name, x, _: seen.setdefault(name, []).append(tuple(x.shape))
        )
    return seen
