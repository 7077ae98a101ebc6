"""A subclass or a mode sees one call of ours, not the kernels beneath it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.testing import assert_close

import musigma as ms

f = ms.functional
PATHS = ("auto", "reference")
CALLS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "layer_norm": lambda x, w: f.layer_norm(x, (6,), w, activation="relu"),
    "rms_norm": lambda x, w: f.rms_norm(x, (6,), w, activation="relu"),
    "group_norm": lambda x, w: f.group_norm(x, 2, w, activation="relu"),
    "instance_norm": lambda x, w: f.instance_norm(x, *RUNNING, w, activation="relu"),
    "batch_norm": lambda x, w: f.batch_norm(x, *RUNNING, w, None, True, add=x, activation="relu"),
    "add_layer_norm": lambda x, w: f.add_layer_norm(x, x, (6,), w)[0],
    "add_rms_norm": lambda x, w: f.add_rms_norm(x, x, (6,), w)[0],
}
RUNNING = torch.zeros(6), torch.ones(6)


class Calls(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.__name__ != "__get__":
            self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("path", PATHS)
def test_a_mode_sees_one_call(path: Any, name: str) -> None:
    x, weight = torch.randn(3, 6, 6), torch.ones(6)
    with Calls() as calls, ms.ops.use_kernels(path):
        CALLS[name](x, weight)
    assert calls.names == [name]


class Tagged(Tensor):
    """The plainest subclass: torch's default ``__torch_function__`` keeps the type."""


@pytest.mark.parametrize("name", CALLS)
def test_a_subclass_stays_what_it_is(name: str) -> None:
    x, weight = torch.randn(3, 6, 6), torch.ones(6)
    y = CALLS[name](x.as_subclass(Tagged), weight)
    assert type(y) is Tagged
    assert_close(y.as_subclass(Tensor), CALLS[name](x, weight))


def test_jagged_input() -> None:
    parts = [torch.randn(3, 6), torch.randn(5, 6)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged)
    for norm in (
        lambda t: f.layer_norm(t, (6,), torch.ones(6)),
        lambda t: f.rms_norm(t, (6,), torch.ones(6)),
    ):
        for got, part in zip(norm(nested).unbind(), parts, strict=True):
            assert_close(got, norm(part))
