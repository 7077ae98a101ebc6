"""Each recipe gives the numbers of its paper, to the tensors that the graph says it means."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import musigma as ms
from musigma.init.recipes import RECIPES, deepnorm_constants


def tokens(width: int = 8, seed: int = 0) -> Tensor:
    return torch.randn(2, 5, width, generator=torch.Generator().manual_seed(seed))


def encoder(layers: int = 3, width: int = 8) -> nn.Module:
    layer = nn.TransformerEncoderLayer(width, 2, 4 * width, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


class Attend(nn.Module):
    """Attention written by hand, under names nobody would guess; keys and values of `memory` if given."""

    def __init__(self, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.m1, self.m2, self.m3, self.m4 = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        y = x if memory is None else memory
        split = lambda t: t.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # noqa: E731
        q, k, v = split(self.m1(x)), split(self.m2(y)), split(self.m3(y))
        scores = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1)
        return self.m4((scores @ v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, alpha: Any = 1.0, crossed: bool = False, width: int = 8, scale: Any = None) -> None:
        super().__init__()
        self.alpha, self.scale = alpha, scale
        self.mix, self.crossing = Attend(width), Attend(width) if crossed else None
        self.wide, self.back = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))

    def add(self, i: int, x: Tensor, f: Tensor) -> Tensor:
        f = f if self.scale is None else self.scale * f
        return self.norms[i](self.alpha * x + f)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        x = self.add(0, x, self.mix(x))
        if self.crossing is not None:
            x = self.add(1, x, self.crossing(x, memory))
        return self.add(2, x, self.back(torch.relu(self.wide(x))))


class Translator(nn.Module):
    def __init__(self, alphas: tuple[float, float] = (1.0, 1.0), n: int = 3, m: int = 2) -> None:
        super().__init__()
        self.one = nn.ModuleList(Layer(alphas[0]) for _ in range(n))
        self.two = nn.ModuleList(Layer(alphas[1], crossed=True) for _ in range(m))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.one:
            x = layer(x)
        for layer in self.two:
            y = layer(y, x)
        return y


class Residual(nn.Module):
    """x + f(x) with m layers, and optionally norms, a scale, and a projected skip path."""

    def __init__(self, m: int = 2, width: int = 6, norm: bool = False, scale: Tensor | None = None) -> None:
        super().__init__()
        self.steps = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(m))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) if norm else nn.Identity() for _ in range(m))
        self.scale = None if scale is None else nn.Parameter(scale.clone())

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for i, (step, norm) in enumerate(zip(self.steps, self.norms, strict=True)):
            y = norm(step(y if i == 0 else y.relu()))
        return x + (y if self.scale is None else self.scale * y)


def resnet(blocks: int = 4, **options: Any) -> nn.Sequential:
    body = [Residual(**options) for _ in range(blocks)]
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), *body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5)
    )


IMAGES = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def xavier(rows: int, columns: int) -> float:
    return math.sqrt(2 / (rows + columns))


def test_gpt2_scales_the_last_projection_of_every_branch() -> None:
    plan = ms.init.plan(encoder(3), tokens(), scheme="gpt2")
    ends = [e for e in plan if e.tensor.endswith(("out_proj.weight", "linear2.weight"))]
    assert [e.std for e in ends] == pytest.approx([0.02 / math.sqrt(6)] * 6)
    assert {e.std for e in plan if len(e.shape) > 1} - {e.std for e in ends} == {0.02}
    assert plan["layers.0.norm1.weight"].scheme == "ones"
    assert (
        ms.init.plan(encoder(2), tokens(), scheme=ms.init.Gpt2(std=0.1))["layers.0.linear2.weight"].std
        == 0.05
    )


def test_gpt2_is_told_by_the_graph_and_not_by_names() -> None:
    """Residual scaling that matched no parameter name never applied in two well-known ports."""
    plan = ms.init.plan(Layer(), tokens(), scheme="gpt2")
    scaled = {e.tensor for e in plan if len(e.shape) > 1 and e.std < 0.02}
    assert scaled == {"mix.m4.weight", "back.weight"}


@pytest.mark.parametrize("m", [1, 2, 3])
def test_fixup(m: int) -> None:
    net = resnet(4, m=m)
    plan = ms.init.plan(net, IMAGES, scheme="fixup")
    he = math.sqrt(2 / 54)
    for block in range(1, 5):
        for i in range(m - 1):
            assert plan[f"{block}.steps.{i}.weight"].std == pytest.approx(he * 4 ** (-1 / (2 * m - 2)))
        assert plan[f"{block}.steps.{m - 1}.weight"].scheme == "zeros"
    assert plan["7.weight"].scheme == "zeros"
    assert plan["0.weight"].std > 0
    assert not plan.notes
    ms.init.initialize(net, IMAGES, scheme="fixup", verify=False)
    assert bool((net(IMAGES) == 0).all())


def test_fixup_says_that_norms_are_in_its_way() -> None:
    plan = ms.init.plan(resnet(norm=True), IMAGES, scheme="fixup")
    assert any("but 8 norms ran" in note for note in plan.notes)


@pytest.mark.parametrize("name", ["rezero", "skipinit"])
@pytest.mark.parametrize("scale", [torch.ones(()), torch.ones(6, 1, 1)], ids=["scalar", "vector"])
def test_learned_scales_start_at_zero(name: str, scale: Tensor) -> None:
    net = resnet(3, scale=scale)
    plan = ms.init.initialize(net, IMAGES, scheme=name, verify=False)
    assert all(bool((net[i].scale == 0).all()) for i in (1, 2, 3))
    assert plan["2.steps.0.weight"].std == pytest.approx(math.sqrt(2 / 54))
    stem = net[0](IMAGES)
    assert torch.equal(net[3](net[2](net[1](stem))), stem)


def test_a_branch_without_a_scale_is_named() -> None:
    net = nn.Sequential(*resnet(1, scale=torch.ones(())), nn.Identity())
    net[2], net[3], net[4] = Residual(), nn.Flatten(), nn.Linear(6 * 64, 2)
    before = [p.clone() for p in net.parameters()]
    with pytest.raises(
        ValueError, match=r"1 of 2 have none \(in 2\); add self.alpha = nn.Parameter"
    ) as error:
        ms.init.initialize(net, IMAGES, scheme="rezero")
    assert "scheme='fixup'" in str(error.value)
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))


def test_zero_gamma_takes_the_last_norm_of_every_branch() -> None:
    plan = ms.init.plan(resnet(2, norm=True), IMAGES, scheme="zero_gamma")
    zeros = {e.tensor for e in plan if e.scheme == "zeros" and e.tensor.endswith("weight")}
    assert zeros == {"1.norms.1.weight", "2.norms.1.weight"}
    with pytest.raises(ValueError, match="no branch ends in one"):
        ms.init.plan(encoder(), tokens(), scheme="zero_gamma")


def test_deepnorm_constants_are_the_papers() -> None:
    # Figure 2 of the paper, at the depths of its table: 18 layers, and 100 + 100.
    assert deepnorm_constants(18) == pytest.approx((36**0.25, 144**-0.25))
    n = m = 100
    expected = (0.81 * (n**4 * m) ** (1 / 16), 0.87 * (n**4 * m) ** (-1 / 16))
    assert deepnorm_constants(n, m) == pytest.approx(expected)
    assert deepnorm_constants(n, m, part="decoder") == pytest.approx((300**0.25, 1200**-0.25))
    with pytest.raises(ValueError, match="at least one layer"):
        deepnorm_constants()


def test_deepnorm_scales_values_outputs_and_mlps_only() -> None:
    alpha, beta = deepnorm_constants(4)
    plan = ms.init.plan(nn.Sequential(*(Layer(alpha) for _ in range(4))), tokens(), scheme="deepnorm")
    for i in range(4):
        for name in ("m1", "m2"):
            assert plan[f"{i}.mix.{name}.weight"].std == pytest.approx(xavier(8, 8))
        for name in ("m3", "m4"):
            assert plan[f"{i}.mix.{name}.weight"].std == pytest.approx(beta * xavier(8, 8))
        for name in ("wide", "back"):
            assert plan[f"{i}.{name}.weight"].std == pytest.approx(beta * xavier(8, 32))


@pytest.mark.parametrize(
    ("alpha", "scale"),
    [
        (lambda a: a, None),
        (lambda a: nn.Parameter(torch.tensor(a), requires_grad=False), None),
        (lambda a: 1.0, lambda a: 1 / a),
    ],
    ids=["number", "frozen", "on the branch"],
)
def test_deepnorm_reads_the_factor_of_the_skip_path(alpha: Any, scale: Any) -> None:
    a, _ = deepnorm_constants(2)
    make = lambda: Layer(alpha(a), scale=None if scale is None else scale(a))  # noqa: E731
    plan = ms.init.plan(nn.Sequential(make(), make()), tokens(), scheme="deepnorm")
    assert not plan.notes


def test_a_factor_that_cannot_be_read_is_told() -> None:
    plan = ms.init.plan(Layer(nn.Parameter(torch.full((8,), 2.0))), tokens(), scheme="deepnorm")
    assert any("the factor of 2 skip paths can't be read" in note for note in plan.notes)


def test_deepnorm_without_alpha_is_refused() -> None:
    with pytest.raises(ValueError, match=r"needs α = 1.565 on the skip path .* \(added in layers.0\) has 1;"):
        ms.init.plan(encoder(3), tokens(), scheme="deepnorm")


def test_deepnorm_of_encoder_and_decoder() -> None:
    (a, beta), (b, delta) = deepnorm_constants(3, 2), deepnorm_constants(3, 2, part="decoder")
    plan = ms.init.plan(Translator((a, b)), (tokens(), tokens(seed=1)), scheme="deepnorm")
    assert plan["one.0.mix.m3.weight"].std == pytest.approx(beta * xavier(8, 8))
    assert plan["two.1.mix.m3.weight"].std == pytest.approx(delta * xavier(8, 8))
    # Values of the encoder's output belong to the decoder's branch; its keys stay as they are.
    assert plan["two.0.crossing.m3.weight"].std == pytest.approx(delta * xavier(8, 8))
    assert plan["two.0.crossing.m2.weight"].std == pytest.approx(xavier(8, 8))
    assert plan["two.0.back.weight"].std == pytest.approx(delta * xavier(8, 32))


def test_t_fixup() -> None:
    plan = ms.init.plan(Translator(), (tokens(), tokens(seed=1)), scheme="t_fixup")
    e, d = 0.67 * 3**-0.25, 18**-0.25
    assert plan["one.2.mix.m4.weight"].std == pytest.approx(e * xavier(8, 8))
    assert plan["one.2.mix.m1.weight"].std == pytest.approx(xavier(8, 8))
    assert plan["two.1.crossing.m4.weight"].std == pytest.approx(d * xavier(8, 8))
    assert any("take them out" in note for note in plan.notes)
    with pytest.raises(ValueError, match="scheme='fixup' is its relative"):
        ms.init.plan(resnet(), IMAGES, scheme="t_fixup")


def test_t_fixup_shrinks_embeddings() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.body = nn.Embedding(20, 8), encoder(2)

        def forward(self, x: Tensor) -> Tensor:
            return self.body(self.table(x))

    plan = ms.init.plan(Model(), torch.arange(5)[None], scheme="t_fixup")
    assert plan["table.weight"].std == pytest.approx(8**-0.5 * 18**-0.25)


@pytest.mark.parametrize("packing", ["thirds", "interleaved", "conv1d", "torch"])
def test_packed_values_are_scaled_and_queries_are_not(packing: str) -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Parameter(torch.zeros(8, 24)) if packing == "conv1d" else nn.Linear(8, 24)
            self.out = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            b, t, _ = x.shape
            if packing == "conv1d":
                q, k, v = (s.view(b, t, 2, 4).transpose(1, 2) for s in (x @ self.qkv).split(8, dim=-1))
            elif packing == "thirds":
                q, k, v = self.qkv(x).reshape(b, t, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
            else:
                q, k, v = self.qkv(x).view(b, t, 2, 12).transpose(1, 2).chunk(3, dim=-1)
            y = nn.functional.scaled_dot_product_attention(q, k, v)
            return x + self.out(y.transpose(1, 2).reshape(b, t, 8))

    net = encoder(1) if packing == "torch" else Packed()
    # One layer: gain 0.67.
    ms.init.initialize(net, tokens(), scheme="t_fixup", verify=False)
    name = (
        "layers.0.self_attn.in_proj_weight"
        if packing == "torch"
        else "qkv"
        if packing == "conv1d"
        else "qkv.weight"
    )
    w = net.get_parameter(name).detach()
    w = w.T if packing == "conv1d" else w
    rows = w.view(2, 3, 4, 8).transpose(0, 1).flatten(1, 2) if packing == "interleaved" else w.view(3, 8, 8)
    bound = math.sqrt(6 / 16)
    # 64 uniform entries come within a tenth of their bound with probability 1 − 0.9^64.
    for piece, gain in zip(rows, (1.0, 1.0, 0.67), strict=True):
        assert 0.9 * gain * bound < piece.abs().max() <= gain * bound


def test_ds_init_counts_layers_from_the_input() -> None:
    plan = ms.init.plan(Translator(), (tokens(), tokens(seed=1)), scheme="ds_init")
    for i, layer in enumerate(("one.0", "one.1", "one.2")):
        assert plan[f"{layer}.mix.m1.weight"].std == pytest.approx(xavier(8, 8) / math.sqrt(i + 1))
        assert plan[f"{layer}.back.weight"].std == pytest.approx(xavier(8, 32) / math.sqrt(i + 1))
    assert plan["two.1.crossing.m2.weight"].std == pytest.approx(xavier(8, 8) / math.sqrt(2))


@pytest.mark.parametrize("name", sorted(set(RECIPES) - {"lsuv", "delta_orthogonal", "mup"}))
def test_a_model_without_branches_is_refused(name: str) -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    with pytest.raises(ValueError, match="is about residual branches, but nothing"):
        ms.init.plan(net, tokens(), scheme=name)


def test_frozen_tensors_and_those_in_skip_stay_out() -> None:
    net = encoder(2)
    net.layers[0].linear2.weight.requires_grad_(False)
    plan = ms.init.plan(net, tokens(), scheme="gpt2", skip=["layers.1.linear2.weight"])
    assert {"layers.0.linear2.weight", "layers.1.linear2.weight"} <= plan.skipped.keys()
    assert "layers.0.linear2.weight" not in {entry.tensor for entry in plan}


@pytest.mark.parametrize(
    ("scheme", "error"),
    [("fixupp", "did you mean 'fixup'"), ("he_norml", "did you mean 'he_normal'"), ("zzz", "recipes: ")],
)
def test_unknown_names_get_the_nearest(scheme: str, error: str) -> None:
    net = nn.Linear(2, 2)
    before = net.weight.clone()
    with pytest.raises(ValueError, match=error):
        ms.init.initialize(net, torch.ones(1, 2), scheme=scheme)
    assert torch.equal(net.weight, before)


@pytest.mark.parametrize(
    ("scheme", "expected"),
    [
        ("xavier_uniform", xavier(8, 4)),
        ("he_normal", math.sqrt(2 / 8)),
        (ms.init.lecun_normal_, math.sqrt(1 / 8)),
        (functools.partial(ms.init.normal_, std=0.3), 0.3),
        ("orthogonal", math.sqrt(1 / 8)),
    ],
    ids=["xavier", "he", "function", "partial", "orthogonal"],
)
def test_one_scheme_for_all_weights(scheme: str | Callable[..., Tensor], expected: float) -> None:
    net = nn.Sequential(nn.Linear(8, 4), nn.LayerNorm(4), nn.ReLU(), nn.Linear(4, 2))
    plan = ms.init.initialize(net, torch.randn(4, 8), scheme=scheme, verify=False)
    assert plan["0.weight"].std == pytest.approx(expected)
    assert net[1].weight.tolist() == [1.0] * 4
    assert net[3].bias.tolist() == [0.0] * 2
    assert plan.scheme == plan["0.weight"].scheme


def test_he_is_told_what_follows() -> None:
    net = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 2))
    plan = ms.init.plan(net, torch.randn(4, 8), scheme="he_normal")
    assert plan["0.weight"].std == pytest.approx(ms.init.gain("tanh") / math.sqrt(8))
    assert plan["2.weight"].std == pytest.approx(1 / math.sqrt(4))


def test_a_scheme_that_lacks_an_option_says_which() -> None:
    with pytest.raises(ValueError, match=r"constant needs value=…; pass functools.partial"):
        ms.init.plan(nn.Linear(2, 2), torch.ones(1, 2), scheme="constant")
