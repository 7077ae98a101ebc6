"""μP: which tensors scale how, and that activations then keep their size over widths."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import musigma as ms

X = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))
TOKENS = torch.randint(20, (8, 6), generator=torch.Generator().manual_seed(0))


def mlp(width: int) -> nn.Sequential:
    hidden = [nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), *hidden, nn.Linear(width, 1))


class Transformer(nn.Module):
    """Heads of 16 features, more of them where it is wider; names that say nothing."""

    def __init__(self, width: int, tied: bool = False) -> None:
        super().__init__()
        self.q1, self.q2 = nn.Embedding(20, width), nn.Parameter(torch.zeros(6, width))
        layer = lambda: nn.TransformerEncoderLayer(  # noqa: E731
            width, width // 16, 4 * width, batch_first=True, dropout=0.0, norm_first=True
        )
        self.q3, self.q4 = nn.ModuleList(layer() for _ in range(2)), nn.LayerNorm(width)
        self.q5 = nn.Linear(width, 20)
        if tied:
            self.q5.weight = self.q1.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.q1(x) + self.q2
        for layer in self.q3:
            y = layer(y)
        return self.q5(self.q4(y))


def test_laws_and_learning_rates_are_those_of_table_3() -> None:
    net, r = mlp(256), 4.0
    plan = ms.init.plan(net, X, scheme=ms.init.Mup(base_width=64))
    auto = ms.init.plan(net, X)
    assert plan["0.weight"].std == auto["0.weight"].std
    assert plan["2.weight"].std == auto["2.weight"].std
    assert plan["6.weight"].std == pytest.approx(auto["6.weight"].std / math.sqrt(r))
    names = ("0.weight", "0.bias", "2.weight", "2.bias", "6.weight", "6.bias")
    assert [plan.lr_scale["adam"][n] for n in names] == [1, 1, 1 / r, 1, 1 / r, 1]
    assert [plan.lr_scale["sgd"][n] for n in names] == [r, r, 1, r, 1 / r, 1]


def test_at_the_base_width_nothing_changes() -> None:
    plan, auto = (ms.init.plan(mlp(64), X, scheme=s) for s in (ms.init.Mup(base_width=64), "auto"))
    assert [e.std for e in plan] == pytest.approx([e.std for e in auto])
    assert set(plan.lr_scale["adam"].values()) | set(plan.lr_scale["sgd"].values()) == {1.0}


@pytest.mark.parametrize("make", [mlp, Transformer])
def test_a_base_model_says_the_same_as_a_base_width(make: Any) -> None:
    example = X if make is mlp else TOKENS
    with torch.device("meta"):
        base = make(32)
    by_model = ms.init.plan(make(64), example, scheme=ms.init.Mup(base=base))
    by_width = ms.init.plan(make(64), example, scheme=ms.init.Mup(base_width=32))
    assert by_model.lr_scale == by_width.lr_scale
    assert [e.std for e in by_model] == pytest.approx([e.std for e in by_width])


def test_roles_in_a_transformer() -> None:
    plan = ms.init.plan(Transformer(64), TOKENS, scheme=ms.init.Mup(base_width=32))
    scale = plan.lr_scale["adam"]
    hidden = {"self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.weight", "linear2.weight"}
    expected = {f"q3.{i}.{name}" for i in (0, 1) for name in hidden} | {"q5.weight"}
    assert {name for name, factor in scale.items() if factor == 0.5} == expected
    assert {factor for name, factor in scale.items() if name not in expected} == {1.0}
    assert any("attention has to divide its logits" in note for note in plan.notes)


def test_a_tied_output_layer_is_told_what_forward_lacks() -> None:
    plan = ms.init.plan(Transformer(64, tied=True), TOKENS, scheme=ms.init.Mup(base_width=32))
    assert any("q1.weight is embedding and output layer: μP wants its logits" in note for note in plan.notes)
    assert plan.lr_scale["adam"]["q1.weight"] == 1.0


def test_groups_for_an_optimizer() -> None:
    net = mlp(256)
    net[2].bias.requires_grad_(False)
    plan = ms.init.initialize(net, X, scheme=ms.init.Mup(base_width=64), verify=False)
    groups = ms.init.param_groups(net, plan, 0.1, weight_decay=0.01)
    assert {(g["lr"], g["weight_decay"]) for g in groups} == {(0.1, 0.01), (0.025, 0.04)}
    assert sum(len(g["params"]) for g in groups) == 7
    torch.optim.AdamW(groups)
    with pytest.raises(ValueError, match="optimizer must be one of"):
        ms.init.param_groups(net, plan, 0.1, optimizer="lion")
    auto = ms.init.plan(net, X)
    assert [g["lr"] for g in ms.init.param_groups(net, auto, 0.1)] == [0.1]


@pytest.mark.parametrize(
    ("recipe", "error"),
    [
        (lambda: "mup", "what the model is wider than"),
        (lambda: ms.init.Mup(base=nn.Linear(2, 2)), "is in one of them only"),
        (lambda: ms.init.Mup(base=nn.Linear(2, 2), base_width=3), "not both"),
        (lambda: ms.init.Mup(base_width=0), "at least 1"),
    ],
)
def test_what_mup_needs(recipe: Any, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        ms.init.plan(mlp(64), X, scheme=recipe())


@pytest.mark.parametrize(("optimizer", "lr"), [("adam", 0.01), ("sgd", 0.1)])
def test_coordinates_are_flat_in_mup_and_grow_in_standard_parametrization(optimizer: str, lr: float) -> None:
    options = {"optimizer": optimizer, "lr": lr}
    good = ms.init.coordinate_check(mlp, [64, 128, 256], X, scheme=ms.init.Mup(base_width=64), **options)
    bad = ms.init.coordinate_check(mlp, [64, 128, 256], X, scheme="he_normal", **options)
    assert good
    assert good.flat
    assert not bad.flat
    assert {row.layer for row in bad.rows if row.problem == "grows"} >= {"4", "6"}
    assert str(good).splitlines()[-1] == "flat"
    assert "grows" in str(bad)


@pytest.mark.slow
def test_coordinates_of_a_transformer() -> None:
    targets = torch.randint(20, (8, 6), generator=torch.Generator().manual_seed(1))
    widths, options = [32, 64, 128, 256], {"targets": targets, "lr": 0.01}
    assert ms.init.coordinate_check(
        Transformer, widths, TOKENS, scheme=ms.init.Mup(base_width=32), **options
    ).flat
    assert not ms.init.coordinate_check(Transformer, widths, TOKENS, **options).flat


def test_what_a_coordinate_check_needs() -> None:
    with pytest.raises(ValueError, match="at least two different ones"):
        ms.init.coordinate_check(mlp, [64], X)
    with pytest.raises(ValueError, match="steps must be at least 1"):
        ms.init.coordinate_check(mlp, [8, 16], X, steps=0)
    with pytest.raises(ValueError, match="the same layers at every width"):
        ms.init.coordinate_check(lambda n: mlp(n) if n < 16 else mlp(n)[:5], [8, 16], X)
