"""What can't be recorded says why, and a failure that a model survives leaves the record right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.graph.nets import Calls, x
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from musigma.graph import record


def test_failure_keeps_its_own_traceback_and_says_what_was_called() -> None:
    failing = Calls(lambda net, t: t @ t)
    with pytest.raises(RuntimeError, match="Expected size") as caught:
        record(failing, x())
    assert any(entry.name == "<lambda>" for entry in caught.traceback)
    (note,) = caught.value.__notes__
    assert "Calls(float32[2, 4, 8])" in note
    assert "forward(x" in note
    assert "%0 = linear" in note


def test_wrong_number_of_arguments_is_told_with_the_signature() -> None:
    with pytest.raises(TypeError, match="positional argument") as caught:
        record(nn.Linear(8, 8), (x(), x()))
    assert "before its first op" in caught.value.__notes__[0]
    assert "forward(input" in caught.value.__notes__[0]


def test_failed_module_does_not_stay_on_the_stack() -> None:
    class Retry(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bad, self.good = nn.Linear(3, 3), nn.Linear(8, 8)

        def forward(self, t: Tensor) -> Tensor:
            try:
                return self.bad(t)
            except RuntimeError:
                return self.good(t) + 1

    graph = record(Retry(), x())
    assert [(node.op, node.module) for node in graph] == [("linear", "good"), ("add", "")]


def test_lazy_modules_are_refused_untouched() -> None:
    lazy = nn.Sequential(nn.LazyLinear(3), nn.ReLU())
    with pytest.raises(ValueError, match=r"0\.weight, 0\.bias are uninitialized.*call the model once"):
        record(lazy, x())
    assert isinstance(lazy[0], nn.LazyLinear)


@pytest.mark.parametrize("example", [[torch.ones(2)], {0: torch.ones(2)}, 3, None])
def test_example_of_another_type_is_refused(example: Any) -> None:
    with pytest.raises(TypeError, match="tensor, a tuple of positional arguments or a dict"):
        record(nn.Linear(2, 2), example)


def test_model_of_another_type_is_refused() -> None:
    with pytest.raises(TypeError):
        record(torch.relu, x())  # type: ignore[arg-type]


@pytest.mark.parametrize("everywhere", [False, True], ids=["own", "global"])
def test_failing_pre_hook_does_not_stay_on_the_stack(everywhere: bool) -> None:
    def refuse(module: nn.Module, *args: object) -> None:
        if getattr(module, "refused", False):
            raise LookupError

    class Retry(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bad, self.good = nn.Linear(8, 8), nn.Linear(8, 8)
            self.bad.refused = True
            if not everywhere:
                self.bad.register_forward_pre_hook(refuse)

        def forward(self, t: Tensor) -> Tensor:
            try:
                return self.bad(t)
            except LookupError:
                return self.good(t) + 1

    # A hook that stands before ours stops the call before we hear of it.
    hook = register_module_forward_pre_hook(refuse) if everywhere else None
    try:
        graph = record(nn.Sequential(Retry(), nn.ReLU()), x())
    finally:
        if hook is not None:
            hook.remove()
    assert [(node.op, node.module) for node in graph] == [("linear", "0.good"), ("add", "0"), ("relu", "1")]
