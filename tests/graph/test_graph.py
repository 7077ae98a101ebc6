"""The questions a graph answers, and the ways it shows itself."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from tests.graph.nets import GPT, Calls, tokens, x
from torch import nn
from torch.nn import functional as F

from musigma.graph import UNKNOWN, Buffer, Edge, Graph, Input, Parameter, TensorSpec, record


@pytest.fixture
def diamond() -> Graph:
    def branch(net: Calls, t: torch.Tensor) -> torch.Tensor:
        left, right = t.chunk(2, -1)
        return left.relu() + right.tanh().sin()

    return record(Calls(branch), x())


def test_producer_and_consumers_are_each_others_inverse(diamond: Graph) -> None:
    for node in diamond:
        for source in node.inputs:
            if isinstance(source, Edge):
                assert diamond.producer(source) is diamond.nodes[source]
            assert node in diamond.consumers(source)
    for source in (Input("x"), Parameter("lin.weight"), UNKNOWN):
        assert diamond.producer(source) is None


def test_consumers_of_one_output_and_of_all(diamond: Graph) -> None:
    chunk = next(node for node in diamond if node.op == "chunk")
    assert [n.op for n in diamond.consumers(chunk)] == ["relu", "tanh"]
    assert [n.op for n in diamond.consumers(chunk.index)] == ["relu", "tanh"]
    assert [n.op for n in diamond.consumers(Edge(chunk.index, 1))] == ["tanh"]
    assert diamond.consumers(Edge(chunk.index, 7)) == ()


def test_consumers_by_name() -> None:
    graph = record(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(8, 8)), x())
    assert [n.op for n in graph.consumers("input")] == ["batch_norm"]
    assert [n.op for n in graph.consumers("1.weight")] == ["linear"]
    assert [n.op for n in graph.consumers("0.num_batches_tracked")] == ["add"]
    assert graph.consumers(Buffer("0.running_mean")) == graph.consumers("0.running_mean")
    with pytest.raises(ValueError, match="'nothing'"):
        graph.consumers("nothing")


def test_producer_of_a_nodes_first_input(diamond: Graph) -> None:
    assert diamond.producer(diamond.nodes[1]) is diamond.nodes[0]
    assert diamond.producer(diamond.nodes[0]) is None


def test_ancestors_descendants_and_depth(diamond: Graph) -> None:
    linear, chunk, relu, tanh, sin, add = diamond.nodes
    assert diamond.ancestors(sin) == {0, 1, tanh.index, sin.index}
    assert diamond.descendants(linear) == {1, 2, 3, 4, 5}
    assert diamond.descendants("x") == {0, 1, 2, 3, 4, 5}
    assert diamond.ancestors(Input("x")) == frozenset()
    assert [diamond.depth(node) for node in diamond] == [1, 2, 3, 3, 4, 5]
    assert diamond.depth(add.index) == 5
    assert (chunk.index, relu.index) == (1, 2)


def test_expressions_of_parameters_are_not_live() -> None:
    graph = record(Calls(lambda net, t: F.linear(t, net.up.weight.mT * 2)), x())
    assert [graph.is_live(node) for node in graph] == [True, False, False, True]
    assert [graph.depth(node) for node in graph] == [1, 0, 0, 2]
    assert graph.weight_layers() == (graph.nodes[0], graph.nodes[3])
    assert not graph.is_live(Parameter("up.weight"))
    assert graph.is_live(UNKNOWN)


def test_weight_layers_in_execution_order() -> None:
    graph = record(GPT(layers=1), tokens())
    assert [graph.weights(node)[0] for node in graph.weight_layers()] == [
        "wte.weight",
        "wpe.weight",
        "h.0.c_attn.weight",
        "h.0.c_proj.weight",
        "h.0.c_fc.weight",
        "h.0.c_out.weight",
        "wte.weight",
    ]


def test_products_of_signals_have_no_weights_and_sums_no_bias() -> None:
    graph = record(Calls(lambda net, t: torch.addmm(net.up.bias, (t @ t.mT @ t)[0], net.up.weight)), x())
    assert [graph.weights(node) for node in graph if node.op == "matmul"] == [(), ()]
    assert graph.weights(graph.nodes[-1]) == ("up.weight",)


def test_it_looks_like_its_program() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(36, 2))
    graph = record(model, x(2, 3, 8, 8))
    assert str(graph).splitlines() == [
        "%0 = conv2d(input, weight=0.weight, bias=0.bias, stride=(2, 2)) -> float32[2, 4, 3, 3]  [0: Conv2d]",
        "%1 = leaky_relu(%0, negative_slope=0.2) -> float32[2, 4, 3, 3]  [1: LeakyReLU]",
        "%2 = flatten(%1) -> float32[2, 36]  [2: Flatten]",
        "%3 = linear(%2, weight=3.weight, bias=3.bias) -> float32[2, 2]  [3: Linear]",
        "return %3",
    ]
    assert repr(graph) == "Graph(4 nodes, inputs=(input), 4 parameters, 1 outputs)"
    assert repr(graph.nodes[2]) == "<Node %2 = flatten(%1) -> float32[2, 36]  [2: Flatten]>"


def test_it_is_a_sequence_of_its_nodes(diamond: Graph) -> None:
    assert len(diamond) == 6
    assert list(diamond) == list(diamond.nodes)
    assert diamond[diamond.output[0]] is diamond.nodes[-1]  # type: ignore[index]


def test_it_survives_pickle_and_copies(diamond: Graph) -> None:
    diamond.residual_branches()
    diamond.following_activation("lin.weight")
    for twin in (pickle.loads(pickle.dumps(diamond)), copy.deepcopy(diamond)):
        assert twin == diamond
        assert str(twin) == str(diamond)
        (tanh,) = [node for node in twin if node.op == "tanh"]
        assert tanh.inputs[0].key == (1, 1)
        assert twin.residual_branches() == diamond.residual_branches()
        found, ours = twin.following_activation("lin.weight"), diamond.following_activation("lin.weight")
        assert found is not None
        assert ours is not None
        assert found.name == ours.name == "relu"


def test_it_holds_no_tensor_and_no_module(diamond: Graph) -> None:
    import gc

    model = GPT()
    graph = record(model, tokens())
    seen: set[int] = set()
    pending: list[object] = [graph]
    while pending:
        item = pending.pop()
        if id(item) in seen or isinstance(item, type):
            continue
        seen.add(id(item))
        assert not isinstance(item, torch.Tensor | nn.Module)
        if not callable(item):
            pending += gc.get_referents(item)


def test_nodes_can_not_be_changed(diamond: Graph) -> None:
    with pytest.raises(AttributeError):
        diamond.nodes[0].op = "other"  # type: ignore[misc]
    with pytest.raises(TypeError):
        diamond.nodes[0].arguments["input"] = ()  # type: ignore[index]
    assert len({*diamond.nodes}) == 6


def test_specs_tell_shape_dtype_and_device() -> None:
    graph = record(nn.Linear(8, 3), x())
    assert graph.nodes[0].outputs == (TensorSpec((2, 4, 3), torch.float32, torch.device("cpu")),)
    assert str(graph.specs["weight"]) == "float32[3, 8]"


def test_listener_hears_live_tensors_in_order() -> None:
    heard: list[tuple[int, str]] = []
    net = Calls(lambda net, t: t.chunk(2, -1)[0].relu_())

    def listen(node: object, args: object, kwargs: object, outputs: tuple[torch.Tensor, ...]) -> None:
        assert len(outputs) == len(node.outputs)  # type: ignore[attr-defined]
        assert all(TensorSpec.of(t) == spec for t, spec in zip(outputs, node.outputs, strict=True))  # type: ignore[attr-defined]
        heard.append((node.index, node.op))  # type: ignore[attr-defined]
        torch.relu(outputs[0].detach())  # what a listener computes is not part of the model

    with torch.no_grad():
        graph = record(net, x(), listen=listen)
    assert heard == [(node.index, node.op) for node in graph]


def test_listener_hears_what_was_written_and_not_returned() -> None:
    heard: list[tuple[torch.Tensor, ...]] = []

    def write(net: Calls, t: torch.Tensor) -> torch.Tensor:
        z = torch.zeros(2, 4, 8)
        z[:] = 3.0
        return z

    record(Calls(write), x(), listen=lambda node, args, kwargs, outputs: heard.append(outputs))
    assert torch.equal(heard[-1][0], torch.full((2, 4, 8), 3.0))


def test_recording_inside_a_recording() -> None:
    inner: list[Graph] = []
    outer = record(Calls(lambda net, t: inner.append(record(net.up, t)) or net.up(t)), x())
    assert [node.op for node in inner[0]] == ["linear"]
    assert [node.module for node in outer if node.op == "linear"][-1] == "up"


def test_default_device_context_is_respected() -> None:
    with torch.device("meta"):
        graph = record(Calls(lambda net, t: t + torch.ones(8)).to("meta"), torch.empty(2, 4, 8))
    assert graph.nodes[-1].outputs[0].device.type == "meta"


def test_autocast_is_the_callers() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        graph = record(nn.Linear(8, 8), x())
    assert graph.nodes[0].outputs[0].dtype == torch.bfloat16
    assert str(graph.nodes[0]).startswith("%0 = linear(input")


def test_a_node_tells_the_shapes_and_dtypes_of_its_outputs() -> None:
    node = next(n for n in record(Calls(lambda _, t: t.max(0)), x()) if n.op == "max")
    assert node.shapes == tuple(spec.shape for spec in node.outputs)
    assert node.dtypes == (torch.float32, torch.int64)
