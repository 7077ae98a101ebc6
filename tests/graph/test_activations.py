"""Which activation follows a layer, through what may lie between, and however it is written."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.graph.nets import GPT, Calls, Llama, PreActBlock, UNet, resnet, tokens, x
from torch import Tensor, nn
from torch.nn import functional as F

import musigma.functional
from musigma.graph import Activation, Graph, record

Then = Callable[[Any, Tensor], Any]


def after(then: Then, parameter: str = "lin.weight", **attributes: Any) -> Activation | None:
    return record(Calls(then, **attributes), x()).following_activation(parameter)


GRID = torch.linspace(-4, 4, 65, dtype=torch.float64)

# How people write activations, and what they compute.
SPELLINGS: dict[str, tuple[Then, Callable[[Tensor], Tensor]]] = {
    "gelu": (lambda net, t: t * 0.5 * (1.0 + torch.erf(t / math.sqrt(2.0))), F.gelu),
    "gelu_tanh": (
        lambda net, t: (
            0.5 * t * (1 + torch.tanh(math.sqrt(2 / math.pi) * (t + 0.044715 * torch.pow(t, 3.0))))
        ),
        lambda t: F.gelu(t, approximate="tanh"),
    ),
    "quick_gelu": (lambda net, t: t * torch.sigmoid(1.702 * t), lambda t: t * torch.sigmoid(1.702 * t)),
    "silu": (lambda net, t: t * torch.sigmoid(t), F.silu),
    "mish": (lambda net, t: t * torch.tanh(torch.log1p(torch.exp(t))), F.mish),
    "squared_relu": (lambda net, t: torch.relu(t).square(), lambda t: F.relu(t) ** 2),
    "relu": (lambda net, t: torch.maximum(t, torch.zeros_like(t)), F.relu),
    "leaky_relu": (lambda net, t: torch.where(t > 0, t, 0.1 * t), lambda t: F.leaky_relu(t, 0.1)),
    "hardswish": (lambda net, t: t * F.relu6(t + 3) / 6, F.hardswish),
    "softplus": (lambda net, t: torch.log(1 + torch.exp(t)), F.softplus),
    "elu": (lambda net, t: torch.where(t > 0, t, torch.expm1(t)), F.elu),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_written_out_activation_is_recognized(name: str) -> None:
    then, reference = SPELLINGS[name]
    found = after(then)
    assert found is not None
    assert found.name == name
    assert found.only
    assert found.fn is not None
    # The same arithmetic in float64: a few roundings, and the five digits of GELU's constants.
    assert torch.allclose(found.fn(GRID), reference(GRID), rtol=1e-12, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "then", "reference"),
    [
        ("relu", lambda net, t: t.clamp_(min=0), F.relu),
        ("silu", lambda net, t: t.mul_(torch.sigmoid(t)), F.silu),
        ("relu", lambda net, t: F.relu(t, inplace=True) * 1.7139588, lambda t: F.relu(t) * 1.7139588),
        ("tanh", lambda net, t: torch.tanh(t) * net.scale, lambda t: torch.tanh(t) * 2),
        ("prelu", lambda net, t: net.prelu(t), lambda t: F.leaky_relu(t, 0.25)),
        ("rrelu", lambda net, t: F.rrelu(t, 0.1, 0.3, training=True), lambda t: F.leaky_relu(t, 0.2)),
        ("sin", lambda net, t: torch.sin(30 * t), torch.sin),
        ("square", lambda net, t: t * t, torch.square),
        ("exp", lambda net, t: torch.exp(t), torch.exp),
        ("gelu_tanh", lambda net, t: F.gelu(t, approximate="tanh"), lambda t: F.gelu(t, approximate="tanh")),
        ("gelu", lambda net, t: F.gelu(t), F.gelu),
    ],
)
def test_function_of_the_activation(name: str, then: Then, reference: Callable[[Tensor], Tensor]) -> None:
    found = after(then, scale=torch.tensor(2.0), prelu=nn.PReLU())
    assert found is not None
    assert found.name == name
    assert found.fn is not None
    points = GRID.clone()
    assert torch.allclose(found.fn(points), reference(GRID), rtol=1e-12, atol=1e-12)
    assert torch.equal(points, GRID)


def test_numbers_of_the_activation() -> None:
    found = after(lambda net, t: F.leaky_relu(t, 0.2))
    assert found is not None
    assert dict(found.kwargs) == {"negative_slope": 0.2}
    assert found.node.index == 1
    assert found.use.index == 0
    assert found.between == ()
    found = after(lambda net, t: F.elu(t, alpha=0.5, inplace=True))
    assert found is not None
    assert dict(found.kwargs) == {"alpha": 0.5}
    found = after(lambda net, t: torch.max(t, 0.3 * t))
    assert found is not None
    assert dict(found.kwargs) == {"negative_slope": 0.3}


@pytest.mark.parametrize(
    ("then", "between"),
    [
        (lambda net, t: t.relu(), []),
        (lambda net, t: F.dropout(t.view(8, 8), 0.5).relu(), ["view", "dropout"]),
        (lambda net, t: F.max_pool1d(t, 2).relu(), ["max_pool1d"]),
        (lambda net, t: F.layer_norm(t, (8,)).mT.relu(), ["layer_norm", "transpose"]),
        (lambda net, t: (t + net.up.bias).relu(), ["add"]),
        (lambda net, t: (t * 0.5).relu(), ["mul"]),
        (lambda net, t: (1 - t.double()).relu(), ["to", "sub"]),
        (lambda net, t: F.pad(t, (1, 1)).relu(), ["pad"]),
        (lambda net, t: F.interpolate(t, scale_factor=2).relu(), ["interpolate"]),
        (lambda net, t: torch.relu(t + net.up(t)), ["add"]),
        (lambda net, t: t.chunk(2, -1)[1].relu(), ["chunk"]),
    ],
)
def test_what_may_lie_between(then: Then, between: list[str]) -> None:
    found = after(then)
    assert found is not None
    assert found.name == "relu"
    assert [node.op for node in found.between] == between


@pytest.mark.parametrize(
    "then",
    [
        lambda net, t: t,
        lambda net, t: net.up(t).relu(),
        lambda net, t: F.silu(net.up(t)) * t,
        lambda net, t: t.softmax(-1).relu(),
        lambda net, t: (t @ t.mT).relu(),
        lambda net, t: t.sum(-1).relu(),
        lambda net, t: F.scaled_dot_product_attention(t, t, t).relu(),
        lambda net, t: t * torch.rsqrt(t.pow(2).mean(-1, keepdim=True)),
        lambda net, t: (t > 0).float(),
        lambda net, t: t * 2 + 1,
        lambda net, t: net.up(h := t + net.up(t)) + h.relu(),
    ],
)
def test_what_ends_the_way(then: Then) -> None:
    assert after(then) is None


def test_gated_product_has_its_activation_on_one_side_only() -> None:
    net = Calls(lambda net, t: F.silu(net.gate(t)) * net.up(t), gate=nn.Linear(8, 8))
    graph = record(net, x())
    gate, up = graph.following_activation("gate.weight"), graph.following_activation("up.weight")
    assert gate is not None
    assert gate.name == "silu"
    assert up is None
    packed = after(lambda net, t: t.chunk(2, -1)[0] * F.gelu(t.chunk(2, -1)[1]))
    assert packed is not None
    assert packed.name == "gelu"


def test_activation_inside_a_fused_norm() -> None:
    def fused(net: Calls, t: Tensor) -> Tensor:
        return musigma.functional.batch_norm(t, None, None, net.weight, training=True, activation="silu")

    net = Calls(fused, weight=nn.Parameter(torch.ones(4)))
    graph = record(net, x())
    for name in ("lin.weight", "weight"):
        found = graph.following_activation(name)
        assert found is not None
        assert (found.name, found.node, found.between, found.only) == ("silu", graph.nodes[1], (), True)
        assert found.fn is not None
        assert torch.equal(found.fn(GRID), F.silu(GRID))


def test_glu_is_no_function_of_one_number() -> None:
    found = after(lambda net, t: F.glu(t))
    assert found is not None
    assert (found.name, found.fn) == ("glu", None)


def test_sigmoid_of_a_gate_is_not_taken_for_silu() -> None:
    found = after(lambda net, t: torch.sigmoid(t) * net.up(x()))
    assert found is not None
    assert found.name == "sigmoid"


def test_several_readers() -> None:
    found = after(lambda net, t: (net.up(t), t.tanh()))
    assert found is not None
    assert found.name == "tanh"
    assert not found.only
    returned = after(lambda net, t: (t, t.tanh()))
    assert returned is not None
    assert not returned.only
    alone = after(lambda net, t: net.up(t.tanh()))
    assert alone is not None
    assert alone.only


def test_written_out_activation_beside_another_reader() -> None:
    found = after(lambda net, t: (net.up(t), t * torch.sigmoid(t)))
    assert found is not None
    assert (found.name, found.only) == ("silu", False)
    found = after(lambda net, t: (net.up(t), torch.sigmoid(t) * 2))
    assert found is not None
    assert (found.name, found.only) == ("sigmoid", False)


def test_residual_stream_is_no_way_to_an_activation() -> None:
    def stack(net: Calls, t: Tensor) -> Tensor:
        for _ in range(3):
            t = t + net.up(F.layer_norm(t, (8,)))
        return t.relu()

    assert after(stack) is None


def following(graph: Graph, name: str) -> str | None:
    found = graph.following_activation(name)
    return None if found is None else found.name


def test_architectures() -> None:
    graph = record(resnet(), x(2, 3, 8, 8))
    assert {
        n: following(graph, n) for n in ("0.weight", "4.conv2.weight", "5.downsample.0.weight", "8.weight")
    } == {
        "0.weight": "relu",
        "4.conv2.weight": "relu",
        "5.downsample.0.weight": "relu",
        "8.weight": None,
    }
    graph = record(nn.Sequential(PreActBlock(3), PreActBlock(3)), x(2, 3, 4, 4))
    assert following(graph, "0.conv1.weight") == "relu"
    assert following(graph, "0.conv2.weight") is None
    graph = record(GPT(), tokens())
    assert following(graph, "h.0.c_fc.weight") == "gelu_tanh"
    assert following(graph, "h.0.c_attn.weight") is None
    assert following(graph, "wte.weight") is None
    graph = record(Llama(), tokens())
    assert following(graph, "layers.1.gate.weight") == "silu"
    assert following(graph, "layers.1.up.weight") is None
    graph = record(UNet(), x(2, 3, 8, 8))
    assert following(graph, "down.bias") == "relu"
    assert following(graph, "up.weight") is None


def test_parameter_that_does_not_exist_names_the_nearest() -> None:
    graph = record(nn.Sequential(nn.Linear(8, 8)), x())
    with pytest.raises(ValueError, match=r"got '0\.wieght'; did you mean '0\.weight'"):
        graph.following_activation("0.wieght")


def test_parameter_that_was_not_used_is_followed_by_nothing() -> None:
    graph = record(Calls(lambda net, t: t.relu()), x())
    assert graph.following_activation("up.weight") is None
    assert graph.norm_after("up.weight") is None
    assert graph.uses("up.weight") == ()
