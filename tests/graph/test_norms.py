"""Which norm a layer feeds, and which norms are written out in arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.graph.nets import Calls, Llama, tokens, x
from torch import Tensor, nn
from torch.nn import functional as F

from musigma.graph import Input, record

Then = Callable[[Any, Tensor], Any]


@pytest.mark.parametrize(
    "then",
    [
        lambda net, t: F.layer_norm(t, (8,)),
        lambda net, t: F.layer_norm(t.view(8, 8), (8,)),
        lambda net, t: F.batch_norm(F.dropout(t.transpose(1, 2), training=False), None, None, training=True),
        lambda net, t: F.rms_norm(t.double(), (8,)),
        lambda net, t: F.group_norm(F.dropout(t, p=0.0), 2),
    ],
)
def test_norm_through_what_keeps_values(then: Then) -> None:
    graph = record(Calls(then), x())
    for name in ("lin.weight", "lin.bias"):
        norm, path = graph.norm_after(name), graph.norm_path(name)
        assert norm is graph.nodes[-1]
        assert path is not None
        assert path.only
        assert len(path.between) == len(graph) - 2


@pytest.mark.parametrize(
    "then",
    [
        lambda net, t: F.layer_norm(t.relu(), (8,)),
        lambda net, t: F.layer_norm(F.dropout(t, 0.5, training=True), (8,)),
        lambda net, t: F.layer_norm(t + x(), (8,)),
        lambda net, t: F.layer_norm(F.avg_pool1d(t, 2), (4,)),
        lambda net, t: F.layer_norm(x(), (8,), t[0, 0]),
        lambda net, t: t,
    ],
    ids=["activation", "dropout", "sum", "pool", "as the weight", "none"],
)
def test_no_norm(then: Then) -> None:
    graph = record(Calls(then), x())
    assert graph.norm_after("lin.bias") is None
    assert graph.norm_after("lin.bias", only=False) is None


@pytest.mark.parametrize(
    "then",
    [
        lambda net, t: (F.layer_norm(t, (8,)), t),
        lambda net, t: F.layer_norm(t, (8,)) + t.relu(),
        lambda net, t: (F.layer_norm(t, (8,)), t.sum().item())[0],
        lambda net, t: F.layer_norm(t, (8,)) + F.layer_norm(t, (8,)),
        lambda net, t: (F.layer_norm(t, (8,)), t.view(8, 8).detach()),
        lambda net, t: F.layer_norm(t, (8,), t[0, 0]),
    ],
    ids=["returned", "another reader", "escapes", "two norms", "returned view", "also the weight"],
)
def test_norm_that_is_not_the_only_reader(then: Then) -> None:
    with torch.no_grad():
        graph = record(Calls(then), x())
    assert graph.norm_after("lin.bias") is None
    found = graph.norm_after("lin.bias", only=False)
    assert found is not None
    assert found.op == "layer_norm"


def test_layer_used_twice_must_feed_a_norm_each_time() -> None:
    lin = nn.Linear(8, 8)
    twice = nn.Sequential(lin, nn.LayerNorm(8), lin, nn.LayerNorm(8))
    once = nn.Sequential(lin, nn.LayerNorm(8), lin)
    norm = record(twice, x()).norm_after("0.bias")
    assert norm is not None
    assert norm.module == "1"
    assert record(once, x()).norm_after("0.bias") is None
    assert record(once, x()).norm_after("0.bias", only=False) is not None


def test_bias_added_by_hand_is_followed_from_the_sum() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.ones(8, 8)), nn.Parameter(torch.ones(8))

        def forward(self, t: Tensor) -> Tensor:
            return F.layer_norm(t @ self.weight + self.bias, (8,))

    graph = record(Net(), x())
    assert graph.norm_after("bias") is graph.nodes[-1]
    assert graph.norm_after("weight") is None


def mean(t: Tensor) -> Tensor:
    return t.mean(-1, keepdim=True)


WRITTEN: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "rms": (lambda t: t * torch.rsqrt(mean(t.pow(2)) + 1e-6), False),
    "rms in float": (lambda t: t.float() * torch.rsqrt(mean(t.float() ** 2) + 1e-6), False),
    "rms by power": (lambda t: t * (mean(t * t) + 1e-6) ** -0.5, False),
    "rms by division": (lambda t: t / torch.sqrt(mean(t.square()) + 1e-6), False),
    "layer": (lambda t: (t - mean(t)) / torch.sqrt(t.var(-1, keepdim=True, unbiased=False) + 1e-5), True),
    "layer by std": (lambda t: 2 * (t - mean(t)) / (t.std(-1, keepdim=True) + 1e-6), True),
    "layer by centered squares": (lambda t: (d := t - mean(t)) / torch.sqrt(mean(d.pow(2)) + 1e-6), True),
    "layer by var_mean": (
        lambda t: (t - (vm := torch.var_mean(t, -1, keepdim=True))[1]) * torch.rsqrt(vm[0] + 1e-5),
        True,
    ),
    "length": (lambda t: t / t.norm(dim=-1, keepdim=True).clamp_min(1e-6), False),
    "normalize": (lambda t: F.normalize(t, dim=-1), False),
}


class By(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, t: Tensor) -> Tensor:
        return self.function(t) * 3 + 1


@pytest.mark.parametrize("name", WRITTEN)
def test_written_out_norm_is_recognized(name: str) -> None:
    function, centered = WRITTEN[name]
    values: dict[int, Tensor] = {}
    graph = record(
        By(function), x(), listen=lambda node, args, kwargs, out: values.update({node.index: out[0]})
    )
    (norm,) = graph.norms()
    assert norm.centered == centered
    assert graph.producer(graph.output[0]) not in norm.nodes
    result = values[norm.node.index]
    # Its values are normalized: whatever the scale, each row has the same length.
    lengths = (result / result.norm()).norm(dim=-1)
    assert torch.allclose(lengths, lengths.mean().expand_as(lengths), rtol=1e-4)
    assert norm.source == Input("t") or graph.nodes[norm.source].op == "to"  # type: ignore[index]


@pytest.mark.parametrize(
    "function",
    [
        lambda t: t.exp() / t.exp().sum(-1, keepdim=True),
        lambda t: t * torch.sigmoid(mean(t)),
        lambda t: (t - mean(t)) * mean(t),
        lambda t: t / mean(t.abs()),
        lambda t: t[:1] * torch.rsqrt(mean(t.sin().pow(2))),
        lambda t: torch.softmax(t @ t.mT, -1) @ t,
    ],
    ids=["softmax", "squeeze-excite", "centering", "mean length", "another's spread", "attention"],
)
def test_arithmetic_that_is_no_norm(function: Callable[[Tensor], Tensor]) -> None:
    assert record(By(function), x()).norms() == ()


def test_called_and_written_out_norms_together() -> None:
    graph = record(nn.Sequential(nn.BatchNorm1d(4), nn.RMSNorm(8), By(WRITTEN["rms"][0])), x())
    assert [norm.centered for norm in graph.norms()] == [True, False, False]
    assert [len(norm.nodes) for norm in graph.norms()] == [1, 1, 5]
    assert len(record(Llama(), tokens()).norms()) == 5
