"""Paths and names: shared, tied, wrapped, compiled, scripted and parametrized modules."""

from __future__ import annotations

import copy
import os
import socket
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from tests.graph.nets import GPT, Calls, tokens, x
from torch import Tensor, nn
from torch.nn import functional as F

from musigma.graph import Parameter, record, unwrap


def paths(model: nn.Module, example: object) -> list[tuple[str, str, int]]:
    return [(node.op, node.module, node.call) for node in record(model, example)]


def test_reused_module_appears_once_a_call() -> None:
    lin = nn.Linear(8, 8)
    assert paths(nn.Sequential(lin, nn.ReLU(), lin), x()) == [
        ("linear", "0", 0),
        ("relu", "1", 0),
        ("linear", "0", 1),
    ]


def test_shared_module_is_named_by_who_runs_it() -> None:
    class Tower(nn.Module):
        def __init__(self, body: nn.Module) -> None:
            super().__init__()
            self.body = body

        def forward(self, t: Tensor) -> Tensor:
            return self.body(t)

    body = nn.Linear(8, 8)
    model = nn.Sequential(Tower(body), Tower(body))
    graph = record(model, x())
    assert [(node.module, node.call) for node in graph] == [("0.body", 0), ("1.body", 1)]
    assert graph.nodes[1].parameters == ("0.body.weight", "1.body.weight", "0.body.bias", "1.body.bias")
    assert graph.uses("1.body.weight") == graph.uses("0.body.weight") == graph.nodes


def test_tied_weights_are_known_by_every_name() -> None:
    graph = record(GPT(), tokens())
    first, last = graph.nodes[0], graph.nodes[-1]
    assert first.parameters == last.parameters == ("wte.weight", "lm_head.weight")
    assert first.arguments["weight"] == last.arguments["weight"] == (Parameter("wte.weight"),)
    assert graph.uses("lm_head.weight") == (first, last)
    assert graph.consumers("lm_head.weight") == (first, last)


def test_root_and_containers() -> None:
    net = Calls(lambda net, t: t.relu())
    graph = record(nn.Sequential(nn.Sequential(net)), x())
    assert [(node.module, node.module_type) for node in graph] == [("0.0.lin", "Linear"), ("0.0", "Calls")]
    assert graph.node_of("0.0") == [graph.nodes[1]]
    assert graph.node_of("0") == []
    assert graph.node_of("") == []
    assert record(nn.Linear(8, 8), x()).node_of("")[0].op == "linear"


def test_unregistered_module_belongs_to_its_caller() -> None:
    hidden = nn.Linear(8, 8)
    graph = record(Calls(lambda net, t: hidden(t)), x())
    assert [(node.module, node.module_type) for node in graph] == [("lin", "Linear"), ("", "Calls")]
    assert graph.nodes[1].parameters == ()


def test_module_that_another_runs_in_its_place() -> None:
    graph = record(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), x())
    (attention,) = graph.node_of("self_attn.out_proj")
    assert attention.op == "multi_head_attention"
    assert attention.module == "self_attn"


@pytest.mark.parametrize("train", [True, False])
def test_attention_is_one_node_in_both_modes(train: bool) -> None:
    # In eval torch has a fused path of its own, which would hide every op of the layer.
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, enable_nested_tensor=False
    ).train(train)
    with torch.no_grad():
        graph = record(model, x())
    attentions = [node for node in graph if node.op == "multi_head_attention"]
    assert [node.module for node in attentions] == ["layers.0.self_attn", "layers.1.self_attn"]
    assert graph.weights(attentions[0]) == (
        "layers.0.self_attn.in_proj_weight",
        "layers.0.self_attn.out_proj.weight",
    )
    assert [b.last_parameter for b in graph.residual_branches()] == [
        "layers.0.self_attn.out_proj.weight",
        "layers.0.linear2.weight",
        "layers.1.self_attn.out_proj.weight",
        "layers.1.linear2.weight",
    ]


@pytest.mark.parametrize("kind", ["lstm", "gru", "rnn_tanh", "lstm_cell", "gru_cell", "rnn_tanh_cell"])
def test_recurrent_layers_are_one_node_with_all_their_weights(kind: str) -> None:
    modules = {
        "lstm": nn.LSTM(8, 3, 2, bidirectional=True),
        "gru": nn.GRU(8, 3, 2),
        "rnn_tanh": nn.RNN(8, 3),
        "lstm_cell": nn.LSTMCell(8, 3),
        "gru_cell": nn.GRUCell(8, 3),
        "rnn_tanh_cell": nn.RNNCell(8, 3),
    }
    model = modules[kind]
    graph = record(model, x(4, 8) if "cell" in kind else x())
    (node,) = [node for node in graph if node.op == kind]
    assert node.parameters == tuple(name for name, _ in model.named_parameters())
    assert graph.weights(node) == tuple(name for name, _ in model.named_parameters() if "weight" in name)


def test_data_parallel_is_unwrapped() -> None:
    inner = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    graph = record(nn.DataParallel(inner), x())
    assert [node.module for node in graph] == ["0", "1"]
    assert graph.nodes[0].parameters == ("0.weight", "0.bias")


@pytest.fixture
def one_process() -> Iterator[None]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_distributed_data_parallel_is_unwrapped(one_process: None) -> None:
    inner = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(4))
    graph = record(nn.parallel.DistributedDataParallel(inner), x())
    assert unwrap(nn.parallel.DistributedDataParallel(nn.DataParallel(inner))) is inner
    assert [node.module for node in graph] == ["0", "1", "1"]
    assert inner[1].num_batches_tracked == 0


@pytest.mark.compile
def test_compiled_models_and_parts_run_eagerly() -> None:
    plain = Calls(lambda net, t: t.relu())
    expected = paths(plain, x())
    assert paths(torch.compile(plain), x()) == expected
    part = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    part.compile()
    assert [op for op, _, _ in paths(nn.Sequential(part, torch.compile(nn.Tanh())), x())] == [
        "linear",
        "relu",
        "tanh",
    ]
    graph = record(nn.Sequential(torch.compile(nn.Linear(8, 8))), x())
    assert graph.nodes[0].parameters == ("0._orig_mod.weight", "0._orig_mod.bias")
    function = torch.compile(lambda t: t.sin() * 2)
    assert [op for op, _, _ in paths(Calls(lambda net, t: function(t)), x())] == ["linear", "sin", "mul"]


@pytest.mark.filterwarnings("ignore")  # of tracing, about the batch size check of BatchNorm, and of its age
@pytest.mark.parametrize("how", ["script", "trace"])
def test_script_modules_are_one_node(how: str) -> None:
    inner = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(4), nn.ReLU())
    made = torch.jit.script(inner) if how == "script" else torch.jit.trace(inner, x())
    heard: list[str] = []
    model = Calls(lambda net, t: net.part(t) * 2, part=made)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    graph = record(model, x(), listen=lambda node, args, kwargs, outputs: heard.append(node.op))
    assert [node.op for node in graph] == ["linear", "script", "mul"] == heard
    script = graph.nodes[1]
    assert script.module == "part"
    assert script.inputs[0] == 0
    assert script.parameters == ("part.0.weight", "part.0.bias", "part.1.weight", "part.1.bias")
    assert graph.nodes[2].inputs == (1,)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_script_module_as_the_whole_model() -> None:
    graph = record(torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.ReLU())), x())
    assert [node.op for node in graph] == ["script"]
    assert graph.output == (0,)


@pytest.mark.parametrize("kind", ["weight_norm", "spectral_norm", "orthogonal"])
def test_parametrized_weights_lead_to_the_layer(kind: str) -> None:
    parametrize = getattr(nn.utils.parametrizations, kind)
    model = nn.Sequential(parametrize(nn.Linear(8, 8)), nn.ReLU())
    name = next(n for n, _ in model.named_parameters() if "original" in n)
    graph = record(model, x())
    (layer,) = graph.uses(name)
    assert layer.op == "linear"
    assert name in graph.weights(layer)
    assert graph.weight_layers() == (layer,)
    found = graph.following_activation(name)
    assert found is not None
    assert found.name == "relu"


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_old_weight_norm_computes_in_a_hook() -> None:
    model = nn.utils.weight_norm(nn.Linear(8, 8))
    weight = model.weight
    graph = record(model, x())
    assert [node.op for node in graph] == ["weight_norm", "linear"]
    assert graph.weights(graph.nodes[1]) == ("weight_v", "weight_g")
    assert model.weight is weight


def test_functional_call_with_other_weights() -> None:
    graph = record(
        Calls(lambda net, t: torch.func.functional_call(net.up, {"weight": net.lin.weight * 2}, (t,))), x()
    )
    assert [(node.op, node.module) for node in graph] == [("linear", "lin"), ("mul", ""), ("linear", "up")]
    assert graph.weights(graph.nodes[2]) == ("lin.weight",)
    assert graph.nodes[2].parameters == ("up.bias",)


def test_low_rank_weight_is_one_layer() -> None:
    class LoRA(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(8, 8))
            self.a, self.b = nn.Parameter(torch.zeros(2, 8)), nn.Parameter(torch.zeros(8, 2))

        def forward(self, t: Tensor) -> Tensor:
            return F.linear(t, self.weight + self.b @ self.a)

    graph = record(LoRA(), x())
    (layer,) = graph.weight_layers()
    assert layer.op == "linear"
    assert set(graph.weights(layer)) == {"weight", "a", "b"}


def test_traced_by_fx() -> None:
    traced = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
    assert paths(traced, x()) == [("linear", "0", 0), ("relu", "1", 0)]


def test_deepcopy_and_subclass_of_a_container() -> None:
    class Net(nn.Sequential):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) + 1

    model = Net(nn.Linear(8, 8))
    assert paths(model, x()) == paths(copy.deepcopy(model), x()) == [("linear", "0", 0), ("add", "", 0)]


@pytest.mark.parametrize(
    "returned",
    [None, 3, "text", [], {}, object()],
    ids=["none", "int", "str", "list", "dict", "object"],
)
def test_models_may_return_no_tensor(returned: object) -> None:
    graph = record(Calls(lambda net, t: returned), x())
    assert graph.output == ()
    assert len(graph) == 1


def test_every_tensor_that_is_returned_has_its_name() -> None:
    from dataclasses import dataclass
    from typing import NamedTuple

    @dataclass
    class Output:
        logits: Tensor
        loss: Tensor | None

    class Pair(NamedTuple):
        left: Tensor
        right: Tensor

    graph = record(
        Calls(
            lambda net, t: {
                "a": Output(t, None),
                "b": [Pair(t.relu(), t)],
                "c": (y * i for i, y in enumerate([t])),
            }
        ),
        x(),
    )
    assert graph.output_names == ("a.logits", "b[0].left", "b[0].right")
    assert graph.output == (0, 1, 0)


def test_generator_models_are_run_to_their_end() -> None:
    graph = record(Calls(lambda net, t: (t * i for i in range(3))), x())
    assert [node.op for node in graph] == ["linear", "mul", "mul", "mul"]
    assert graph.output == (1, 2, 3)


@pytest.mark.parametrize(
    "example", [lambda: x(), lambda: (x(),), lambda: {"x": x()}], ids=["tensor", "tuple", "dict"]
)
def test_examples_of_every_form(example: object) -> None:
    graph = record(Calls(lambda net, t: t), example())  # type: ignore[operator]
    assert graph.inputs == ("x",)


def test_inputs_are_named_as_forward_names_them() -> None:
    class Net(nn.Module):
        def forward(
            self, image: Tensor, *more: Tensor, mask: Tensor | None = None, **extra: object
        ) -> Tensor:
            return image + sum(more)

    example = (x(), x(), {"deep": [x()]})
    graph = record(Calls(lambda net, t: t), x())
    assert graph.inputs == ("x",)

    class Nested(nn.Module):
        def forward(self, batch: dict[str, list[Tensor]], scale: float) -> Tensor:
            return batch["deep"][0] * scale

    graph = record(Nested(), (example[2], 2.0))
    assert graph.inputs == ("batch['deep'][0]",)
    assert graph.nodes[0].inputs[0].name == "batch['deep'][0]"  # type: ignore[union-attr]
    assert record(Net(), (x(), x(), x())).inputs == ("image", "more[0]", "more[1]")
    assert record(Net(), {"image": x(), "mask": x(), "other": x()}).inputs == (
        "image",
        "mask",
        "extra['other']",
    )
