"""Values that leave torch, or reach it from elsewhere: numbers, NumPy's arrays, raw pointers."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.graph.nets import Calls, graph_of, ops
from torch import Tensor

from musigma.graph import UNKNOWN


@pytest.mark.parametrize(
    ("ask", "op"),
    [
        (lambda t: bool(t.sum() > 0), "bool"),
        (lambda t: t.sum().item(), "item"),
        (lambda t: t.tolist(), "tolist"),
        (lambda t: t.numpy(), "numpy"),
        (lambda t: np.asarray(t), "numpy"),
        (lambda t: float(t.sum()), "float"),
        (lambda t: int(t.sum()), "int"),
        (lambda t: [0, 1][(t.sum() > 0).long()], "int"),
        (lambda t: 1.0 in t, "contains"),
        (lambda t: torch.equal(t, t), "equal"),
        (lambda t: torch.allclose(t, t), "allclose"),
        (lambda t: torch.is_nonzero(t.sum()), "is_nonzero"),
    ],
)
def test_values_that_leave_torch_leave_a_node(ask: Callable[[Tensor], Any], op: str) -> None:
    graph = graph_of(lambda net, t: (ask(t.detach()), None)[1])
    assert graph.nodes[-1].op == op
    assert graph.nodes[-1].outputs == ()
    assert graph.nodes[-1].inputs


def test_numpy_result_is_unknown() -> None:
    graph = graph_of(lambda net, t: torch.from_numpy(t.detach().numpy() * 2) + 1)
    assert graph.nodes[-1].inputs == (UNKNOWN,)
    assert graph.is_live(graph.nodes[-1])
    assert graph.descendants(UNKNOWN) == {len(graph) - 1}


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_silent_write_through_numpy_is_unknown(after: bool) -> None:
    def write(net: Calls, t: Tensor) -> Tensor:
        t = t.detach()
        array = t.numpy()
        if after:
            t.mul_(2)
        array += 1
        return t * 2

    assert graph_of(write).nodes[-1].inputs == (UNKNOWN,)


def test_torch_writing_what_numpy_has_is_no_silent_write() -> None:
    def write(net: Calls, t: Tensor) -> Tensor:
        t = t.detach()
        t.numpy()
        t.mul_(2)
        return t * 2

    graph = graph_of(write)
    assert ops(graph)[-2:] == ["mul", "mul"]
    assert graph.nodes[-1].inputs == (len(graph) - 2,)


def test_view_made_after_a_silent_write_is_read_from_the_view() -> None:
    def write(net: Calls, t: Tensor) -> Tensor:
        t = t.detach()
        array = t.numpy()
        array += 1
        view = t.view(8, 8)
        return view * 2

    graph = graph_of(write)
    assert ops(graph)[-2:] == ["view", "mul"]
    assert graph.nodes[-2].inputs == (UNKNOWN,)
    assert graph.nodes[-1].inputs == (len(graph) - 2,)


def test_reading_through_numpy_changes_no_edge() -> None:
    graph = graph_of(lambda net, t: (t.detach().numpy().sum(), t * 2)[1])
    assert graph.nodes[-1].inputs == (0,)


@pytest.mark.parametrize("launched", [False, True])
def test_kernel_on_raw_pointers_is_unknown(launched: bool) -> None:
    def launch(net: Calls, t: Tensor) -> Tensor:
        out = torch.empty(2, 4, 8)
        pointer = out.data_ptr()
        if launched:
            ctypes.memset(pointer, 1, 32)
        return out * 2

    graph = graph_of(launch)
    assert graph.nodes[-1].inputs == ((UNKNOWN,) if launched else (1,))


def test_tensor_from_outside_is_unknown() -> None:
    graph = graph_of(lambda net, t: t * net.scale[0], scale=[torch.ones(8)])
    assert graph.nodes[-1].inputs == (0, UNKNOWN)
