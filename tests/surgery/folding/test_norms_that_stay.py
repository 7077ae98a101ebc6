"""Weight, bias and mean of norms that stay: moved into the layers that read or write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.surgery.folding.nets import Net, settled
from torch import Tensor, nn

import musigma as ms
from musigma.surgery import fold


class Written(nn.Module):
    """Llama's RMSNorm, or Gemma's, whose weight is kept as 1 + w."""

    def __init__(self, size: int, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        weight = self.offset + self.weight if self.offset else self.weight
        return weight * y.to(x.dtype)


def close(folded: nn.Module, net: nn.Module, x: Tensor) -> None:
    want = net(x)
    # sums of up to 64 products, each rounded once more than before
    assert (folded(x) - want).abs().max() <= 64 * torch.finfo(torch.float32).eps * want.abs().max()


@pytest.mark.parametrize(
    ("norm", "left"),
    [
        (nn.LayerNorm(6), None),
        (nn.RMSNorm(6), None),
        (ms.nn.LayerNorm(6), None),
        (ms.nn.RMSNorm(6), None),
        (nn.LayerNorm(6, bias=False), None),
        (Written(6), 1.0),
        (Written(6, offset=1.0), 0.0),
    ],
)
def test_into_every_layer_that_reads_it(norm: nn.Module, left: float | None) -> None:
    net = Net(_two, norm=norm, a=nn.Linear(6, 5), b=nn.Linear(6, 5, bias=False))
    x = torch.randn(3, 4, 6)
    folded, certificate = fold(settled(net), x)
    assert [line.split(":")[0] for line in certificate.changed] == ["norm"]
    assert folded.norm.weight is None if left is None else bool((folded.norm.weight == left).all())
    close(folded, net, x)


def _two(m: nn.Module, x: Tensor) -> Tensor:
    y = m.norm(x)
    return m.a(y) + m.b(F.dropout(y, 0.5, m.training))


@pytest.mark.parametrize(
    ("norm", "layers", "shape"),
    [
        (nn.GroupNorm(2, 4), [nn.Conv2d(4, 3, 3, padding=1)], (2, 4, 5, 5)),
        (nn.LayerNorm([4, 5]), [nn.Flatten(), nn.Linear(20, 3)], (2, 4, 5)),
        (nn.InstanceNorm1d(4, affine=True), [nn.Conv1d(4, 3, 3, padding="same")], (2, 4, 5)),
        (ms.nn.LayerNorm2d(4), [nn.Conv2d(4, 6, 1, groups=2)], (2, 4, 5, 5)),
        (nn.BatchNorm1d(4, track_running_stats=False), [nn.Linear(4, 3)], (5, 4)),
    ],
)
def test_norms_of_every_kind(norm: nn.Module, layers: list[nn.Module], shape: tuple[int, ...]) -> None:
    net = settled(nn.Sequential(norm, *layers))
    folded, certificate = fold(net, torch.randn(*shape))
    assert len(certificate.changed) == 1, certificate
    close(folded, net, torch.randn(*shape))


class Attends(nn.Module):
    """A pre-norm block of torchvision's ViT: attention with packed projections."""

    def __init__(self, d: int = 8) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attention = nn.MultiheadAttention(d, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(d, 16), nn.GELU(), nn.Linear(16, d), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.ln1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.ln2(x))


class ViT(nn.Module):
    def __init__(self, d: int = 8) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, d, 4, 4)
        self.cls = nn.Parameter(torch.randn(1, 1, d))
        self.positions = nn.Parameter(torch.randn(1, 6, d))
        self.blocks = nn.Sequential(Attends(d), Attends(d))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, 5)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.cls.expand(len(x), -1, -1), tokens], 1)
        tokens = self.blocks(tokens + self.positions[:, : tokens.shape[1]])
        return self.head(self.norm(tokens)[:, 0])


def test_a_vision_transformer_loses_every_mean_weight_and_bias() -> None:
    net, x = settled(ViT()), torch.randn(2, 3, 8, 8)
    folded, certificate = fold(net, x)
    assert not certificate.refused, certificate
    norms = [m for m in folded.modules() if isinstance(m, nn.LayerNorm | nn.RMSNorm)]
    assert [type(m) for m in norms] == [nn.RMSNorm] * 5
    assert all(m.weight is None for m in norms)
    close(folded, net, x)
    close(folded, net, torch.randn(3, 3, 8, 8))


def test_a_layer_norm_in_front_of_an_activation_keeps_its_weight_as_an_rms_norm() -> None:
    net = settled(nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8, bias=False), nn.ReLU(), nn.Linear(8, 2)))
    folded, certificate = fold(net, torch.randn(4, 3))
    assert certificate.changed == ("1: becomes an RMSNorm: the mean is taken out of 0",)
    assert torch.equal(folded[1].weight, net[1].weight)
    close(folded, net, torch.randn(5, 3))


@pytest.mark.parametrize(
    ("reason", "forward"),
    [
        ("keeps its centering: x, which no layer made", lambda m, x: m.head(m.norm(x))),
        ("keeps its centering: x, which no layer made", lambda m, x: m.head(m.norm(x + m.f(x)))),
        ("relu in the model is part of its input", lambda m, x: m.head(m.norm(m.f(x).relu()))),
        ("f can't take it: it is called 2 times", lambda m, x: m.head(m.norm(m.f(m.f(x))))),
        ("sigmoid in the model also", lambda m, x: (lambda y: m.head(m.norm(y)) + y.sigmoid().sum())(m.f(x))),
        ("the model returns what it normalizes", lambda m, x: (lambda y: (m.head(m.norm(y)), y))(m.f(x))),
        ("add in the model is part of its input", lambda m, x: m.head(m.norm(m.f(x) + 1.0))),
        ("mixes its features", lambda m, x: m.head(m.norm(m.f(x).flip(-1)))),
    ],
)  # fmt: skip
def test_a_mean_that_matters_elsewhere_stays(
    reason: str, forward: Callable[[nn.Module, Tensor], Any]
) -> None:
    net = settled(Net(forward, f=nn.Linear(6, 6), norm=nn.LayerNorm(6), head=nn.Linear(6, 2)))
    x = torch.randn(4, 6)
    folded, certificate = fold(net, x, kinds=["centering"])
    assert not certificate.changed
    assert type(folded.norm) is nn.LayerNorm
    assert reason in certificate.refused[0], certificate


def test_a_norm_whose_output_also_feeds_the_residual_keeps_its_affine() -> None:
    block = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=False)
    net = settled(nn.TransformerEncoder(block, 2, enable_nested_tensor=False))
    _, certificate = fold(net, torch.randn(2, 3, 8))
    assert not certificate.changed
    assert [line.split(":")[0] for line in certificate.refused] == [
        "layers.1.norm2", "layers.1.norm1", "layers.0.norm2", "layers.0.norm1",
    ]  # fmt: skip
    assert "its output goes to add in layers.0" in certificate.refused[3]


@pytest.mark.parametrize("grad", [False, True])
def test_a_pre_norm_encoder_layer_still_takes_its_fast_path(grad: bool) -> None:
    block = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)
    net = settled(nn.TransformerEncoder(block, 2, enable_nested_tensor=False))
    x = torch.randn(2, 3, 8)
    folded, certificate = fold(net, x)
    assert len(certificate.changed) == 4
    with torch.set_grad_enabled(grad):
        close(folded, net, x)


class LanguageModel(nn.Module):
    """A head tied to the embedding behind a pre-norm block, as in GPT-2."""

    def __init__(self, size: int = 11, d: int = 8) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(size, d), nn.Embedding(5, d)
        self.norm, self.mlp = nn.LayerNorm(d), nn.Sequential(nn.Linear(d, 16), nn.ReLU(), nn.Linear(16, d))
        self.last, self.head = nn.LayerNorm(d), nn.Linear(d, size, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        return self.head(self.last(x + self.mlp(self.norm(x))))


@pytest.mark.parametrize("kinds", [["affine"], ["centering"], ["affine", "centering"]])
def test_a_tied_head_gets_a_weight_of_its_own(kinds: list[str]) -> None:
    net, ids = settled(LanguageModel()), torch.randint(11, (2, 5))
    with torch.no_grad():
        for norm in (net.norm, net.last):
            norm.bias.zero_() if kinds == ["centering"] else None
    folded, certificate = fold(net, ids, kinds=kinds)
    assert len(certificate.changed) == 2 * len(kinds), certificate
    assert folded.head.weight is not folded.tokens.weight
    assert net.head.weight is net.tokens.weight
    close(folded, net, ids)
    assert torch.equal(folded(ids).argmax(-1), net(ids).argmax(-1))
