"""One op, one name, however it is spelled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.graph.nets import Calls, x
from torch import Tensor, nn
from torch.nn import functional as F

from musigma.graph import kinds, record

SPELLINGS: dict[str, list[Callable[[Tensor], Any]]] = {
    "relu": [
        F.relu,
        torch.relu,
        Tensor.relu,
        nn.ReLU(),
        nn.ReLU(inplace=True),
        torch.relu_,
        Tensor.relu_,
        F.relu_,
        torch.ops.aten.relu,
        torch.ops.aten.relu.default,
        lambda t: F.relu(t, inplace=True),
    ],
    "leaky_relu": [F.leaky_relu, nn.LeakyReLU(0.2, inplace=True), F.leaky_relu_],
    "add": [
        lambda t: t + t,
        lambda t: 1 + t,
        lambda t: t.__iadd__(1),
        lambda t: torch.add(t, t, alpha=2),
        lambda t: t.add(1),
        lambda t: t.add_(t),
        lambda t: torch.add(t, 1, out=torch.empty_like(t)),
    ],
    "sub": [lambda t: t - 1, lambda t: 1 - t, lambda t: torch.subtract(t, t), lambda t: t.sub_(1)],
    "mul": [lambda t: t * 2, lambda t: 2 * t, lambda t: torch.multiply(t, t), lambda t: t.__imul__(2)],
    "div": [lambda t: t / 2, lambda t: 2 / t, lambda t: torch.true_divide(t, 2), lambda t: t.__itruediv__(2)],
    "pow": [lambda t: t**2, lambda t: 2**t, lambda t: torch.pow(t, 2)],
    "neg": [lambda t: -t, torch.negative, Tensor.neg_],
    "matmul": [lambda t: t @ t.mT, lambda t: torch.matmul(t, t.mT), lambda t: t.__rmatmul__(t.mT)],
    "transpose": [lambda t: t.mT, lambda t: t.transpose(0, 1), lambda t: t.swapaxes(0, 1), lambda t: t[0].T],
    "to": [Tensor.double, Tensor.half, lambda t: t.to(torch.float64), lambda t: t.type_as(t.double())],
    "sigmoid": [torch.sigmoid, F.sigmoid, torch.special.expit, nn.Sigmoid(), Tensor.sigmoid_],
    "softmax": [lambda t: F.softmax(t, -1), lambda t: t.softmax(-1), nn.Softmax(-1)],
    "clamp": [lambda t: t.clamp(0), lambda t: torch.clip(t, 0), lambda t: t.clamp_min_(0)],
    "dropout": [F.dropout, nn.Dropout(), nn.Dropout(inplace=True), lambda t: torch.dropout(t, 0.5, True)],
    "cat": [lambda t: torch.cat([t, t]), lambda t: torch.concat([t, t]), lambda t: torch.concatenate([t, t])],
    "max_pool1d": [lambda t: F.max_pool1d(t, 2), nn.MaxPool1d(2), nn.MaxPool1d(2, return_indices=True)],
    "layer_norm": [
        nn.LayerNorm(8),
        lambda t: F.layer_norm(t, (8,)),
        lambda t: torch.layer_norm(t, (8,)),
        lambda t: torch.native_layer_norm(t, (8,), None, None, 1e-5),
    ],
    "group_norm": [nn.GroupNorm(2, 4), lambda t: torch.group_norm(t, 2)],
    "instance_norm": [nn.InstanceNorm1d(4), F.instance_norm],
    "batch_norm": [nn.BatchNorm1d(4), lambda t: F.batch_norm(t, None, None, training=True)],
    "rms_norm": [nn.RMSNorm(8), lambda t: F.rms_norm(t, (8,))],
    "conv1d": [nn.Conv1d(4, 2, 3), lambda t: torch.conv1d(t, torch.ones(2, 4, 3))],
    "conv_transpose1d": [nn.ConvTranspose1d(4, 2, 3)],
    "linear": [nn.Linear(8, 2), lambda t: F.linear(t, torch.ones(2, 8))],
    "gelu": [nn.GELU(), F.gelu, nn.GELU("tanh")],
    "getitem": [lambda t: t[0], lambda t: t[:, None], lambda t: t[..., torch.tensor([0, 1])]],
}  # fmt: skip


@pytest.mark.parametrize(("op", "spelling"), [(op, f) for op, all_of in SPELLINGS.items() for f in all_of])
def test_every_spelling_has_one_name(op: str, spelling: Callable[[Tensor], Any]) -> None:
    graph = record(Calls(lambda net, t: spelling(t.detach())), x())
    assert graph.nodes[-1].op == op


def test_casts_and_conversions_of_one_name_differ() -> None:
    graph = record(
        Calls(lambda net, t: (t.double(), float(t.detach().sum()), t.bool(), bool(t.sum() > 0))), x()
    )
    assert [n.op for n in graph if n.op in ("to", "float", "bool")] == ["to", "float", "to", "bool"]


def test_reflected_operands_stand_in_their_roles() -> None:
    graph = record(Calls(lambda net, t: 1 - t), x())
    (node,) = graph.consumers(0)
    assert dict(node.arguments) == {"other": (0,)}
    assert node.options["input"] == 1


@pytest.mark.parametrize(
    "call",
    [
        lambda t: F.relu(t, inplace=True),
        Tensor.relu_,
        lambda t: t.__iadd__(1),
        lambda t: t.__setitem__(0, 1.0),
        lambda t: t[0].mul_(2),
    ],
)
def test_inplace_is_told(call: Callable[[Tensor], Any]) -> None:
    graph = record(Calls(lambda net, t: call(t.detach())), x())
    assert graph.nodes[-1].inplace
    assert "_(" in str(graph.nodes[-1])
    assert not any(node.inplace for node in record(Calls(lambda net, t: F.relu(t + 1)), x()))


def test_batch_norm_writes_its_statistics_and_is_not_in_place() -> None:
    node = next(n for n in record(nn.BatchNorm1d(4), x()) if n.op == "batch_norm")
    assert not node.inplace
    assert node.buffers == ("running_mean", "running_var")


def test_sizes_given_as_numbers_are_one_tuple() -> None:
    graph = record(Calls(lambda net, t: t.permute(0, 2, 1).reshape(-1, 4).view(2, 8, 4).expand(2, 8, 4)), x())
    named = {n.op: dict(n.options) for n in graph}
    assert named["permute"] == {"dims": (0, 2, 1)}
    assert named["reshape"] == {"shape": (-1, 4)}
    assert named["view"] == {"size": (2, 8, 4)}


def test_options_hold_the_defaults_of_python_functions() -> None:
    graph = record(Calls(lambda net, t: F.batch_norm(F.leaky_relu(t), None, None, training=True)), x())
    assert graph.nodes[1].options["negative_slope"] == 0.01
    assert graph.nodes[2].options["training"] is True
    assert graph.nodes[2].options["eps"] == 1e-5


def test_recurrent_arguments_are_named_for_padded_and_packed_input() -> None:
    lstm = nn.LSTM(8, 3)
    packed = nn.utils.rnn.pack_padded_sequence(x(), [2, 2, 1, 1])
    for example in (x(), packed):
        node = next(n for n in record(lstm, (example,)) if n.op == "lstm")
        assert node.parameters == ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
        assert len(node.arguments["params"]) == 4
        assert len(node.arguments["hx"]) == 2
        assert len(node.outputs) == 3


def test_ops_of_a_custom_library_are_seen() -> None:
    with torch.library._scoped_library("musigma_graph_test", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda t: t * 2, "CompositeExplicitAutograd")
        graph = record(Calls(lambda net, t: torch.ops.musigma_graph_test.twice(t)), x())
    assert [n.op for n in graph] == ["linear", "twice"]
    assert graph.nodes[1].inputs == (0,)
    assert dict(graph.nodes[1].arguments) == {"input": (0,)}


def test_kinds_of_an_op() -> None:
    assert kinds.of("relu") == {"activations", "rectifiers", "elementwise"}
    assert {"norms", "layer_norms", "additions", "centering_norms"} <= kinds.of("add_layer_norm")
    assert kinds.of("no_such_op") == frozenset()


def test_every_torch_activation_module_is_an_activation() -> None:
    others = {"MultiheadAttention", "Softmax", "LogSoftmax", "Softmin", "Softmax2d"}
    for name in nn.modules.activation.__all__:
        if name in others:
            continue
        module = getattr(nn, name)
        made = module(-0.5, 0.5) if name == "Threshold" else module()
        op = record(made, x()).nodes[-1].op
        assert op in kinds.ACTIVATIONS, name


def test_every_torch_norm_pool_and_dropout_has_its_kind() -> None:
    volume = x(2, 4, 4, 4, 4)
    cases = {
        kinds.NORMS: [
            nn.BatchNorm3d(4),
            nn.InstanceNorm3d(4),
            nn.GroupNorm(2, 4),
            nn.LayerNorm(4),
            nn.RMSNorm(4),
        ],
        kinds.POOLINGS: [nn.MaxPool3d(2), nn.AvgPool3d(2), nn.AdaptiveAvgPool3d(1), nn.AdaptiveMaxPool3d(1)],
        kinds.DROPOUTS: [nn.Dropout(), nn.Dropout3d(), nn.AlphaDropout(), nn.FeatureAlphaDropout()],
        kinds.CONVOLUTIONS: [nn.Conv3d(4, 2, 1)],
        kinds.TRANSPOSED_CONVOLUTIONS: [nn.ConvTranspose3d(4, 2, 1)],
        kinds.UPSAMPLINGS: [nn.Upsample(scale_factor=2)],
    }
    for ops, modules in cases.items():
        for module in modules:
            assert record(module, volume).nodes[-1].op in ops, module
