"""Where values come from when memory is written, shared, handed out, or not torch's own."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.graph.nets import Calls, x
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from musigma.graph import UNKNOWN, Buffer, Edge, Graph, Input, Parameter, record


def graph_of(then: Callable[[Any, Tensor], Any], **attributes: Any) -> Graph:
    return record(Calls(then, **attributes), x())


def ops(graph: Graph) -> list[str]:
    return [node.op for node in graph]


def test_assignment_into_a_slice() -> None:
    def assign(net: Calls, t: Tensor) -> Tensor:
        z = torch.zeros(2, 4, 8)
        z[:, 0] = t[:, 0]
        return z * 1

    graph = graph_of(assign)
    assert ops(graph) == ["linear", "zeros", "getitem", "setitem", "mul"]
    assert graph.nodes[3].inputs == (1, 2)
    assert dict(graph.nodes[3].arguments) == {"input": (1,), "value": (2,)}
    assert graph.nodes[4].inputs == (3,)


def test_write_through_a_view_is_seen_by_the_whole() -> None:
    def write(net: Calls, t: Tensor) -> Tensor:
        t[:, 0].relu_()
        return t * 2

    graph = graph_of(write)
    assert ops(graph) == ["linear", "getitem", "relu", "mul"]
    assert graph.nodes[3].inputs == (2,)


def test_two_halves_written_one_after_the_other_both_reach_the_whole() -> None:
    def write(net: Calls, t: Tensor) -> Tensor:
        z = torch.empty(2, 4, 8)
        left, right = z[..., :4], z[..., 4:]
        left.copy_(t[..., :4].detach())
        right.copy_(t[..., 4:].detach() * 3)
        return z * 1

    graph = graph_of(write)
    writes = [node.index for node in graph if node.op == "copy"]
    assert graph.nodes[-1].inputs == (writes[1],)
    assert set(writes) <= graph.ancestors(graph.nodes[-1])


def test_write_to_one_half_leaves_the_other_half_alone() -> None:
    # Halves along the last dimension interleave in memory.
    def write(net: Calls, t: Tensor) -> tuple[Tensor, Tensor]:
        left, right = t.detach().chunk(2, -1)
        left.mul_(2)
        return right * 3, t * 2

    graph = graph_of(write)
    chunk = next(node for node in graph if node.op == "chunk")
    apart, whole = graph.nodes[-2:]
    assert isinstance(apart.inputs[0], Edge)
    assert apart.inputs[0].key == (chunk.index, 1)
    assert whole.inputs == (chunk.index + 1,)


def test_argument_that_shares_the_version_counter_is_not_written() -> None:
    def write(net: Calls, t: Tensor) -> tuple[Tensor, Tensor]:
        left, right = t.detach().chunk(2, -1)
        left.add_(right)
        return left * 3, right * 3

    graph = graph_of(write)
    add = next(node for node in graph if node.op == "add")
    assert add.writes == ("input",)
    assert [source.key for node in graph.nodes[-2:] for source in node.inputs] == [
        (add.index, 0),
        (add.index - 1, 1),
    ]


def test_identity_of_a_freed_view_is_not_inherited() -> None:
    # CPython hands the id of a freed object to the next one of its size.
    def churn(net: Calls, t: Tensor) -> list[Tensor]:
        t, found = t.detach(), []
        for _ in range(50):
            view = t[0]
            del view
            found.append(torch.from_numpy(np.ones((4, 8), dtype=np.float32)) * 2)
        return found

    graph = graph_of(churn)
    assert all(node.inputs == (UNKNOWN,) for node in graph if node.op == "mul")


def test_stale_view_reads_what_was_written_later() -> None:
    def write(net: Calls, t: Tensor) -> Tensor:
        view = t.view(8, 8)
        t += 1
        return view * 2

    graph = graph_of(write)
    assert ops(graph) == ["linear", "view", "add", "mul"]
    assert graph.nodes[3].inputs == (2,)


def test_out_argument() -> None:
    def add(net: Calls, t: Tensor) -> Tensor:
        z = torch.empty(2, 4, 8)
        torch.add(t.detach(), 1, out=z)
        return z * 2

    graph = graph_of(add)
    assert ops(graph) == ["linear", "empty", "detach", "add", "mul"]
    assert graph.nodes[3].inputs == (2,)
    assert graph.nodes[3].writes == ("out",)
    assert not graph.nodes[3].inplace
    assert graph.nodes[4].inputs == (3,)


def test_overwriting_everything_cuts_the_past() -> None:
    def fill(net: Calls, t: Tensor) -> Tensor:
        z = t.detach()
        z.zero_()
        z[:] = 1.0
        z.copy_(net.up.weight[0])
        return z * 2

    graph = graph_of(fill)
    assert 0 not in graph.ancestors(graph.nodes[-1])


def test_data_has_a_version_counter_of_its_own() -> None:
    def write(net: Calls, t: Tensor) -> Tensor:
        t.data.mul_(2)
        return t + 1

    graph = graph_of(write)
    assert ops(graph) == ["linear", "data", "mul", "add"]
    assert graph.nodes[3].inputs == (2,)


def test_data_replaced() -> None:
    def replace(net: Calls, t: Tensor) -> Tensor:
        t.data = torch.ones(2, 4, 8)
        return t * 2

    graph = graph_of(replace)
    assert graph.nodes[-1].inputs == (next(node.index for node in graph if node.op == "ones"),)


def test_each_output_has_its_edge() -> None:
    def split(net: Calls, t: Tensor) -> Tensor:
        q, k, v = t[..., :6].chunk(3, -1)
        values, _ = (q @ k.mT).max(-1)
        return values[..., None] * v

    graph = graph_of(split)
    chunk = next(node for node in graph if node.op == "chunk")
    assert [spec.shape for spec in chunk.outputs] == [(2, 4, 2)] * 3
    edges = {source.key for node in graph for source in node.inputs if source == chunk.index}
    assert sorted(edges) == [(chunk.index, 0), (chunk.index, 1), (chunk.index, 2)]
    maximum = next(node for node in graph if node.op == "max")
    assert [spec.dtype for spec in maximum.outputs] == [torch.float32, torch.int64]


def test_attributes_that_give_tensors_are_nodes_and_questions_are_not() -> None:
    graph = graph_of(
        lambda net, t: (t[0].T, t.mT, t.data, t.shape, t.ndim, t.dtype, t.size(0), t.is_cuda, len(t))
    )
    assert ops(graph) == ["linear", "getitem", "transpose", "transpose", "data"]
    assert all(node.view for node in graph.nodes[1:])


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


def test_buffer_and_parameter_views_keep_their_names() -> None:
    net = Calls(lambda net, t: F.linear(t, net.lin.weight[:4], net.lin.bias[:4]) + net.table[:4])
    net.register_buffer("table", torch.ones(8))
    graph = record(net, x())
    linear = [node for node in graph if node.op == "linear"][1]
    assert linear.parameters == ("lin.weight", "lin.bias")
    assert graph.nodes[-1].buffers == ("table",)
    assert graph.weights(linear) == ("lin.weight",)
    assert [node.index for node in graph.uses("lin.weight")] == [0, linear.index]


def test_shape_readers_pass_no_values_on() -> None:
    graph = graph_of(lambda net, t: torch.zeros_like(t) + t.new_ones(8))
    assert all(node.inputs == () for node in graph.nodes[1:3])
    assert not graph.is_live(graph.nodes[-1])


def test_freed_memory_is_not_mistaken_for_new() -> None:
    # Without keeping tensors alive the allocator hands the same address out again and again.
    def churn(net: Calls, t: Tensor) -> Tensor:
        total = t * 0
        for step in range(20):
            scratch = t * step
            total = total + scratch.sum()
            del scratch
        return total

    graph = graph_of(churn)
    assert ops(graph) == ["linear", "mul", *["mul", "sum", "add"] * 20]
    assert all(node.inputs[0] == node.index - 1 for node in graph if node.op == "sum")


def test_empty_sparse_expanded_and_meta_tensors() -> None:
    def odd(net: Calls, t: Tensor) -> Tensor:
        empty = torch.cat([t[:0], t])
        sparse = torch.sparse.mm(torch.eye(2).to_sparse(), empty.flatten(1).detach())
        return sparse + t[:1].expand(2, 4, 8).flatten(1)

    graph = graph_of(odd)
    assert UNKNOWN not in {source for node in graph for source in node.inputs}
    assert {0} <= graph.ancestors(graph.nodes[-1])
    meta = record(Calls(lambda net, t: t.relu_() + 1).to("meta"), x().to("meta"))
    assert [node.inputs for node in meta.nodes[1:]] == [(0,), (1,)]


def test_write_to_an_expanded_tensor_region() -> None:
    def write(net: Calls, t: Tensor) -> tuple[Tensor, Tensor]:
        base = torch.zeros(4, 8)
        first, rest = base[:1], base[1:]
        wide = first.expand(3, 8)
        rest += t[0, :3].detach()
        return wide * 2, base * 2

    graph = graph_of(write)
    wide, whole = graph.nodes[-2:]
    assert 0 not in graph.ancestors(wide)
    assert 0 in graph.ancestors(whole)


def test_inference_tensors_count_no_versions() -> None:
    def infer(net: Calls, t: Tensor) -> Tensor:
        with torch.inference_mode():
            y = t * 2
            y[0] = 1.0
            y += t
            return y * 2

    graph = graph_of(infer)
    assert ops(graph) == ["linear", "mul", "setitem", "add", "mul"]
    assert [node.inputs[0] for node in graph.nodes[1:]] == [0, 1, 2, 3]


def test_vmap_ops_and_result_keep_their_edges() -> None:
    graph = graph_of(lambda net, t: torch.vmap(lambda row: row.relu() * 2)(t) + t)
    assert ops(graph) == ["linear", "relu", "mul", "add"]
    assert [node.inputs for node in graph.nodes[1:]] == [(0,), (1,), (2, 0)]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_ops_appear_once(reentrant: bool) -> None:
    graph = record(
        Calls(lambda net, t: checkpoint(lambda u: net.up(u).relu(), t, use_reentrant=reentrant)), x()
    )
    assert ops(graph) == ["linear", "linear", "relu"]
    assert graph.output == (2,)


class Halve(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor) -> Tensor:
        return t / 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad / 2


def test_custom_autograd_function_shows_its_inside() -> None:
    graph = graph_of(lambda net, t: Halve.apply(t) + 1)
    assert ops(graph) == ["linear", "div", "add"]
    assert graph.nodes[2].inputs == (1,)


def test_result_that_is_the_argument_is_a_view() -> None:
    graph = graph_of(lambda net, t: F.dropout(t.contiguous(), training=False) * 2)
    assert ops(graph) == ["linear", "contiguous", "dropout", "mul"]
    assert [node.view for node in graph] == [False, True, True, False]
    assert [node.inputs[0] for node in graph.nodes[1:]] == [0, 1, 2]


def test_sources_are_typed() -> None:
    net = Calls(lambda net, t: t)
    node = record(net, x()).nodes[0]
    assert node.inputs == (Input("x"), Parameter("lin.weight"), Parameter("lin.bias"))
    norm = next(n for n in record(nn.BatchNorm1d(4).eval(), x()) if n.op == "batch_norm")
    assert norm.arguments["running_mean"] == (Buffer("running_mean"),)


def test_a_wrapper_subclass_is_one_call() -> None:
    class Wrapped(torch.Tensor):
        pass

    graph = graph_of(lambda net, t: (t.as_subclass(Wrapped) + 1).relu())
    assert ops(graph) == ["linear", "add", "relu"]
    assert [node.inputs[0] for node in graph.nodes[1:]] == [0, 1]


def test_threads_other_than_the_recorded_one_are_unknown() -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        graph = graph_of(lambda net, t: pool.submit(lambda: t.detach() * 2).result() + 1)
    assert graph.nodes[-1].inputs == (UNKNOWN,)
