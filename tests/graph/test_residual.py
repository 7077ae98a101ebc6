"""Where a signal is added to what was made from it, and where a sum is something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.graph.nets import GPT, Calls, Llama, PreActBlock, UNet, resnet, tokens, x
from torch import Tensor, nn
from torch.nn import functional as F

import musigma.functional
from musigma.graph import Branch, Edge, Input, record

Then = Callable[[Any, Tensor], Any]


def branches(then: Then, **attributes: Any) -> tuple[Branch, ...]:
    return record(Calls(then, **attributes), x()).residual_branches()


def only(found: tuple[Branch, ...]) -> Branch:
    (branch,) = found
    return branch


def test_basic_block_with_identity_and_with_projection() -> None:
    identity, projected = record(resnet(), x(2, 3, 8, 8)).residual_branches()
    assert identity.skip == ()
    assert identity.last_parameter == "4.conv2.weight"
    assert [node.op for node in identity.nodes] == ["conv2d", "batch_norm", "relu", "conv2d", "batch_norm"]
    assert identity.end is identity.nodes[-1]
    assert identity.add.inplace
    assert [node.op for node in projected.skip] == ["conv2d", "batch_norm"]
    assert projected.last_parameter == "5.conv2.weight"
    assert projected.start == identity.add.index + 1  # the relu after the sum
    assert [node.module for node in projected.norms] == ["5.bn1", "5.bn2"]


def test_pre_activation_blocks_follow_each_other() -> None:
    first, second = record(nn.Sequential(PreActBlock(3), PreActBlock(3)), x(2, 3, 4, 4)).residual_branches()
    assert first.start == Input("input")
    assert second.start == first.add.index
    assert [branch.last_parameter for branch in (first, second)] == ["0.conv2.weight", "1.conv2.weight"]


@pytest.mark.parametrize(
    ("model", "last"),
    [
        (GPT, ["h.0.c_proj.weight", "h.0.c_out.weight", "h.1.c_proj.weight", "h.1.c_out.weight"]),
        (
            Llama,
            ["layers.0.o.weight", "layers.0.down.weight", "layers.1.o.weight", "layers.1.down.weight"],
        ),
    ],
)
def test_transformers(model: type[nn.Module], last: list[str]) -> None:
    # Neither token + position embeddings nor rotary halves are residual sums.
    found = record(model(), tokens()).residual_branches()
    assert [branch.last_parameter for branch in found] == last
    assert all(len(branch.norms) == 1 for branch in found)
    assert all(branch.skip == () for branch in found)


def test_embeddings_of_one_input_are_no_branches_of_each_other() -> None:
    class Embeddings(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.word, self.position = nn.Embedding(11, 8), nn.Embedding(11, 8)
            self.out = nn.Linear(8, 8)

        def forward(self, ids: Tensor) -> Tensor:
            position = (ids != 0).cumsum(1)
            return self.word(ids) + self.out(self.position(position)) + ids.unsqueeze(-1) * 0.1

    assert record(Embeddings(), tokens()).residual_branches() == ()


def test_post_norm_blocks() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    first, second = record(layer, x()).residual_branches()
    assert first.norms == second.norms == ()
    assert second.start == first.add.index + 1


@pytest.mark.parametrize(
    "then",
    [
        lambda net, t: t + net.up(t),
        lambda net, t: net.up(t) + t,
        lambda net, t: t.add_(net.up(t.clone())),
        lambda net, t: torch.add(net.up(t), t, alpha=0.5),
        lambda net, t: F.dropout(net.up(F.dropout(t, training=False)), training=False) + t,
        lambda net, t: t.contiguous() + net.up(t.contiguous()),
        lambda net, t: sum([t, net.up(t)]),
        lambda net, t: t * 0.9 + net.up(t),
        lambda net, t: t + net.up(t) * 0.1,
        lambda net, t: t.mT + net.up(t).mT,
        lambda net, t: t + net.up(t) / 0.9 * torch.floor(0.9 + torch.rand(2, 1, 1)),
        lambda net, t: t + torch.sigmoid(t.mean(1, keepdim=True)) * net.up(F.layer_norm(t, (8,))),
        lambda net, t: net.up(t) + net.lin.bias + t,
    ],
)
def test_spellings_of_a_residual_sum(then: Then) -> None:
    branch = only(branches(then))
    assert branch.last_parameter == "up.weight"
    assert branch.start == 0
    assert any(node.op == "linear" for node in branch.nodes)


def test_scaled_branches() -> None:
    scaled = only(branches(lambda net, t: t + net.alpha * net.up(2 * t), alpha=nn.Parameter(torch.zeros(()))))
    assert [node.op for node in scaled.scalings] == ["mul"]
    assert scaled.scalings[0].parameters == ("alpha",)
    assert only(branches(lambda net, t: t + net.up(2 * t))).scalings == ()


def test_sums_inside_fused_norms() -> None:
    def post_norm(net: Calls, t: Tensor) -> Tensor:
        for _ in range(2):
            y, t = musigma.functional.add_layer_norm(net.up(t), t, (8,))
        return y

    first, second = branches(post_norm)
    assert first.start == 0
    assert isinstance(second.start, Edge)
    assert second.start.key == (first.add.index, 1)
    assert first.norms == ()

    def block(net: Calls, t: Tensor) -> Tensor:
        return musigma.functional.batch_norm(net.up(t), None, None, training=True, add=t, activation="relu")

    branch = only(branches(block))
    assert branch.last_parameter == "up.weight"
    assert branch.norms == (branch.add,)
    found = record(Calls(block), x()).following_activation("up.weight")
    assert found is not None
    assert found.name == "relu"


def test_parallel_branches_of_one_stream() -> None:
    # GPT-J: x + attention(norm(x)) + mlp(norm(x))
    def parallel(net: Calls, t: Tensor) -> Tensor:
        h = F.layer_norm(t, (8,))
        return t + net.up(h) + net.other(h).relu()

    first, second = branches(parallel, other=nn.Linear(8, 8))
    assert first.start == second.start == 0
    assert [first.last_parameter, second.last_parameter] == ["up.weight", "other.weight"]
    assert [node.op for node in second.nodes] == ["layer_norm", "linear", "relu"]


def test_nested_branches() -> None:
    def nested(net: Calls, t: Tensor) -> Tensor:
        inner = t + net.up(t)
        return t + net.other(inner)

    inner, outer = branches(nested, other=nn.Linear(8, 8))
    assert inner.start == outer.start == 0
    assert [node.op for node in outer.nodes] == ["linear", "add", "linear"]


def test_branch_without_a_weight() -> None:
    pooled = only(branches(lambda net, t: t + F.avg_pool1d(F.layer_norm(t, (8,)), 3, 1, 1)))
    assert pooled.last_parameter is None
    assert [node.op for node in pooled.norms] == ["layer_norm"]


def test_subsampled_and_padded_skip() -> None:
    def shortcut(net: Calls, t: Tensor) -> Tensor:
        return F.pad(t[:, ::2], (0, 8)) + net.wide(t[:, ::2])

    branch = only(branches(shortcut, wide=nn.Linear(8, 16)))
    assert branch.start == 0
    assert [node.op for node in branch.skip] == ["getitem", "pad"]


@pytest.mark.parametrize(
    "then",
    [
        lambda net, t: t + t,
        lambda net, t: t + 1,
        lambda net, t: t + net.up.bias,
        lambda net, t: net.up(t) + net.other(t),
        lambda net, t: t + x(),
        lambda net, t: torch.sigmoid(net.up(t)) * t + (1 - torch.sigmoid(net.up(t))) * net.other(t).tanh(),
        lambda net, t: t * 0.5 + (torch.cat([-t[..., 4:], t[..., :4]], -1)) * 0.5,
        lambda net, t: torch.cat([t, net.up(t)], -1),
        lambda net, t: t * (1 + torch.tanh(0.8 * (t + 0.04 * t.pow(3)))),
        lambda net, t: net.up(t) + t[:, :1].sum(),
        lambda net, t: t * net.alpha + F.pad(t[:, :-1], (0, 0, 1, 0)) * (1 - net.alpha),
        lambda net, t: (z := torch.sigmoid(net.up(t))) * t + (1 - z) * net.other(t),
        lambda net, t: (q := net.up(t)) @ net.other(t).mT + q @ net.lin.weight[:4].mT,
        lambda net, t: t.relu() + 0.1 * torch.expm1(t.clamp(max=0)),
    ],
    ids=[
        "doubled", "constant", "bias", "parallel projections", "another input", "gates", "rotary", "cat",
        "gelu", "sum of a slice", "token shift", "convex gate", "relative position", "elu",
    ],
)  # fmt: skip
def test_sums_that_are_no_residual(then: Then) -> None:
    assert branches(then, other=nn.Linear(8, 8), alpha=nn.Parameter(torch.ones(8))) == ()


def test_recurrence_by_hand_is_no_residual() -> None:
    class Recurrent(nn.Module):
        def __init__(self, projected: bool) -> None:
            super().__init__()
            self.w = nn.Linear(8, 8) if projected else nn.Identity()
            self.u = nn.Linear(8, 8)

        def forward(self, t: Tensor) -> Tensor:
            h = torch.zeros(2, 8)
            for step in range(t.shape[1]):
                h = torch.tanh(self.w(t[:, step]) + self.u(h))
            return h

    assert record(Recurrent(True), x()).residual_branches() == ()
    assert record(Recurrent(False), x()).residual_branches() == ()


def test_lstm_cell_by_hand_is_no_residual() -> None:
    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.u = nn.Linear(8, 32), nn.Linear(8, 32)

        def forward(self, t: Tensor) -> Tensor:
            h = c = torch.zeros(2, 8)
            for column in t.unbind(1):
                i, f, g, o = (self.w(column) + self.u(h)).chunk(4, -1)
                c = f.sigmoid() * c + i.sigmoid() * g.tanh()
                h = o.sigmoid() * c.tanh()
            return h

    assert record(Cell(), x()).residual_branches() == ()


def test_concatenating_u_net_has_none() -> None:
    assert record(UNet(), x(2, 3, 8, 8)).residual_branches() == ()


def test_additive_skip_over_a_deeper_path() -> None:
    class Link(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enc, self.deep = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, 2, 1)
            self.dec = nn.ConvTranspose2d(4, 4, 2, 2)

        def forward(self, t: Tensor) -> Tensor:
            t = F.relu(self.enc(t))
            return t + self.dec(F.relu(self.deep(t)))

    branch = only(record(Link(), x(2, 3, 8, 8)).residual_branches())
    assert branch.last_parameter == "dec.weight"
    assert isinstance(branch.start, Edge)
