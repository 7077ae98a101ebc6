"""Rules over names: every tensor once, by its own numbers, and nothing half-done."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch import Tensor, nn

from musigma.init import (
    Fans,
    apply,
    fans,
    he_normal_,
    normal_,
    orthogonal_,
    torch_default_bias_,
    xavier_normal_,
    zeros_,
)
from musigma.statistics import moments

RULES = {"*.weight": he_normal_, "*.bias": zeros_}


def mlp(order: tuple[int, ...] = (0, 1, 2)) -> nn.ModuleDict:
    layers = {f"l{i}": nn.Linear(40 - 10 * i, 30 - 10 * i) for i in range(3)}
    return nn.ModuleDict({f"l{i}": layers[f"l{i}"] for i in order})


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_loaded_tensors_survive_and_missing_ones_are_written() -> None:
    """C87: an init run after loading overwrote the loaded weights; missing keys stayed uninitialised."""
    net = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 2))
    loaded = {k: torch.full_like(v, 0.5) for k, v in net.state_dict().items() if not k.startswith("2.")}
    missing = net.load_state_dict(loaded, strict=False).missing_keys
    with torch.no_grad():
        for name in missing:
            net.get_parameter(name).fill_(math.nan)
    report = apply(net, RULES, skip=loaded)
    for name, value in loaded.items():
        assert torch.equal(net.get_parameter(name), value)
    assert sorted(report.written) == sorted(missing) == ["2.bias", "2.weight"]
    assert report.skipped == dict.fromkeys(loaded, "in skip")
    assert report.untouched == ()
    assert not any(p.isnan().any() for p in net.parameters())


def test_skip_takes_patterns_buffers_and_one_string() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    before = values(net)
    report = apply(net, {"*": normal_}, skip=["1.*", "1.running_mean", "1.num_batches_tracked", "2.bias"])
    assert sorted(report.written) == ["0.bias", "0.weight", "2.weight"]
    assert all(torch.equal(before[n], net.get_parameter(n)) for n in ("1.weight", "1.bias", "2.bias"))
    assert sorted(apply(net, {"2.*": normal_}, skip="2.bias").written) == ["2.weight"]


def test_a_skip_entry_that_protects_nothing_is_a_mistake() -> None:
    net = mlp()
    before = values(net)
    with pytest.raises(
        ValueError, match=r"skip entry 'l0.wieght' matches no parameter; nearest names: l0.weight"
    ):
        apply(net, RULES, skip=["l0.wieght"])
    assert equal(values(net), before)


def test_patterns_that_match_nothing_or_twice_are_reported_together() -> None:
    """Residual scaling that matched no parameter name never applied in two well-known ports."""
    net = mlp()
    before = values(net)
    with pytest.raises(ValueError) as caught:
        apply(net, {"*.c_proj.weight": normal_, "l1.wieght": zeros_, **RULES, "l2.*": zeros_})
    text = str(caught.value)
    assert "'*.c_proj.weight' matches no parameter" in text
    assert "'l1.wieght' matches no parameter; nearest names: l1.weight" in text
    assert "l2.weight is written by '*.weight' and 'l2.*'" in text
    assert "l2.bias is written by '*.bias' and 'l2.*'" in text
    assert equal(values(net), before)


def test_a_refusing_scheme_names_the_tensor_and_changes_nothing() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    before = values(net)
    state = torch.get_rng_state()
    with pytest.raises(
        ValueError, match=r"he_normal \(pattern '\*.weight'\) can't fill 1.weight of shape \(3,\)"
    ):
        apply(net, RULES)
    with pytest.raises(ValueError, match=r"unset"):
        apply(net, {"0.weight": normal_, "0.bias": lambda w: torch.zeros_like(w)})
    with pytest.raises(ValueError, match=r"can't fill 0.bias .*boom"):
        apply(net, {"0.weight": normal_, "0.bias": _boom})
    with pytest.raises(ValueError, match="did you mean 'he_normal'"):
        apply(net, {"0.weight": "he_norml"})
    with pytest.raises(TypeError):
        apply(net, {"0.weight": 0.02})  # type: ignore[dict-item]
    assert equal(values(net), before)
    assert torch.equal(torch.get_rng_state(), state)


def _boom(w: Tensor) -> Tensor:
    raise RuntimeError("boom")


def test_partials_names_and_functions_are_one_and_the_same() -> None:
    models = [mlp() for _ in range(4)]
    spellings = ["he_normal", "he_normal_", he_normal_, functools.partial(he_normal_, nonlinearity="relu")]
    for model, scheme in zip(models, spellings, strict=True):
        apply(model, {"*.weight": scheme, "*.bias": "zeros"})
    assert all(equal(values(models[0]), values(m)) for m in models[1:])


def test_schemes_are_told_the_fans_of_the_layer_that_owns_the_weight() -> None:
    net = nn.ModuleDict(
        {
            "depthwise": nn.Conv2d(32, 32, 5, groups=32),
            "up": nn.ConvTranspose2d(64, 16, 4, stride=2),
            "attention": nn.MultiheadAttention(64, 4),
            "table": nn.Embedding(500, 8),
            "lstm": nn.LSTM(32, 48),
        }
    )
    rules = {
        "depthwise.weight": functools.partial(he_normal_, mode="fan_out"),
        "up.weight": he_normal_,
        "attention.in_proj_weight": xavier_normal_,
        "table.weight": "lecun_normal",
        "lstm.weight_*": "xavier_uniform",
        "depthwise.bias": torch_default_bias_,
        "lstm.bias_*": torch_default_bias_,
    }
    report = apply(net, rules)
    expected = {
        "depthwise.weight": (Fans(25, 25), 2 / 25),
        "up.weight": (Fans(256, 256), 2 / 256),
        "attention.in_proj_weight": (Fans(64, 64), 1 / 64),
        "table.weight": (Fans(1, 8), 1.0),
        "lstm.weight_ih_l0": (Fans(32, 48), 2 / 80),
        "lstm.weight_hh_l0": (Fans(48, 48), 2 / 96),
        "depthwise.bias": (Fans(25, 25), 1 / 75),
        "lstm.bias_hh_l0": (Fans(48, 48), 1 / 144),
    }
    for name, (counted, var) in expected.items():
        entry = report.written[name]
        assert entry.fans == counted, name
        assert entry.std == pytest.approx(math.sqrt(var)), name
        p = net.get_parameter(name).detach()
        # Normal entries at worst: relative error of a variance √(2/n).
        assert moments(p, None).var().item() == pytest.approx(var, rel=5 * math.sqrt(2 / p.numel())), name


def test_grouped_convolutions_get_a_matrix_a_group() -> None:
    net = nn.Sequential(nn.Conv2d(12, 18, 3, groups=3), nn.Conv1d(8, 8, 3, groups=8))
    apply(net, {"0.weight": orthogonal_, "1.weight": "dirac"})
    for group in net[0].weight.detach().chunk(3):
        m = group.flatten(1)
        assert torch.allclose(m @ m.T, torch.eye(6), atol=1e-6)
    assert bool((net[1].weight[:, 0, 1] == 1).all())


def test_tied_tensors_are_written_once_by_the_head_that_multiplies() -> None:
    """Embedding N(0, 1) by default and tied to the output head: logits √d too large."""
    net = nn.ModuleDict({"embed": nn.Embedding(50, 64), "head": nn.Linear(64, 50, bias=False)})
    net["head"].weight = net["embed"].weight
    report = apply(net, {"*.weight": "lecun_normal"})
    assert list(report.written) == ["embed.weight"]
    entry = report.written["embed.weight"]
    assert entry.tied == ("head.weight",)
    assert entry.fans == Fans(64, 50)
    assert net["head"].weight is net["embed"].weight
    first = net["embed"].weight.detach().clone()

    swapped = nn.ModuleDict({"head": nn.Linear(64, 50, bias=False), "embed": nn.Embedding(50, 64)})
    swapped["embed"].weight = swapped["head"].weight
    apply(swapped, {"*.weight": "lecun_normal"})
    assert torch.equal(swapped["head"].weight, first)

    with pytest.raises(
        ValueError, match=r"embed.weight = head.weight is written by 'embed.\*' and 'head.\*'"
    ):
        apply(net, {"embed.*": normal_, "head.*": normal_})
    assert apply(net, {"*.weight": normal_}, skip=["head.weight"]).written == {}
    # Named by one of its names, it is listed by that one.
    assert list(apply(net, {"head.weight": normal_}).written) == ["head.weight"]


def test_two_parameters_around_one_memory_are_tied() -> None:
    net = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    net["b"].weight = nn.Parameter(net["a"].weight.detach())
    report = apply(net, {"*.weight": normal_})
    assert report.written["a.weight"].tied == ("b.weight",)


def test_a_reused_module_is_written_once() -> None:
    shared = nn.Linear(4, 4)
    net = nn.Sequential(shared, nn.ReLU(), shared)
    report = apply(net, RULES)
    assert sorted(report.written) == ["0.bias", "0.weight"]
    assert report.written["0.weight"].tied == ("2.weight",)


def test_frozen_and_integer_parameters_are_skipped_and_listed() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    net[0].weight.requires_grad_(False)
    net.register_parameter("codes", nn.Parameter(torch.arange(3), requires_grad=False))
    before = values(net)
    report = apply(net, {"*weight": normal_, "codes": normal_})
    assert report.skipped == {
        "0.weight": "frozen (requires_grad is False)",
        "codes": "not floating-point (torch.int64)",
    }
    assert torch.equal(net[0].weight, before["0.weight"])
    assert torch.equal(net.codes, before["codes"])
    assert report.untouched == ("0.bias", "1.bias")


def test_hollow_parameters_are_refused() -> None:
    for net, words in (
        (nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, device="meta")), r"1.weight is on the meta device"),
        (nn.Sequential(nn.Linear(3, 3), nn.LazyLinear(3)), r"1.weight has no shape yet"),
    ):
        before = net[0].weight.detach().clone()
        with pytest.raises(ValueError, match=words):
            apply(net, {"*.weight": normal_})
        assert torch.equal(net[0].weight, before)
    # Filled after to_empty, a meta model holds what any other holds.
    born, plain = mlp(), mlp()
    hollow = born.to("meta").to_empty(device="cpu")
    apply(hollow, RULES)
    apply(plain, RULES)
    assert equal(values(hollow), values(plain))


def test_expanded_parameters_are_refused_before_anything_is_written() -> None:
    net = mlp()
    net["l1"].weight = nn.Parameter(torch.zeros(20, 1).expand(20, 30))
    before = values(net)
    with pytest.raises(ValueError, match=r"l1.weight is expanded"):
        apply(net, RULES)
    assert equal(values(net), before)


def test_wrappers_do_not_change_names() -> None:
    plain, wrapped = mlp(), mlp()
    apply(plain, RULES)
    compiled = nn.Module()
    compiled.add_module("_orig_mod", wrapped)
    report = apply(nn.DataParallel(compiled), RULES)
    assert "l0.weight" in report.written
    assert equal(values(plain), values(wrapped))


def test_names_as_a_wrapped_models_checkpoint_spells_them() -> None:
    net = nn.DataParallel(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)))
    loaded = {k: v for k, v in net.state_dict().items() if not k.startswith("module.2.")}
    assert "module.1.running_mean" in loaded
    report = apply(net, {"module.*.weight": he_normal_, "*.bias": zeros_}, skip=loaded)
    assert sorted(report.written) == ["2.bias", "2.weight"]
    assert apply(net.module, {"_orig_mod.2.weight": he_normal_}).written.keys() == {"2.weight"}


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_padding_rows_stay_zero(kind: type[nn.Module]) -> None:
    net = nn.ModuleDict({"table": kind(7, 4, padding_idx=2)})
    apply(net, {"table.weight": normal_})
    assert bool((net["table"].weight[2] == 0).all())
    assert bool((net["table"].weight[[0, 1, 3, 4, 5, 6]] != 0).all())
    assert net["table"].weight.requires_grad


def test_parametrized_weights_are_reached_with_their_layers_fans() -> None:
    net = nn.utils.parametrizations.weight_norm(nn.Conv2d(8, 8, 3, groups=8))
    report = apply(net, {"*.original1": he_normal_})
    assert report.written["parametrizations.weight.original1"].fans == Fans(9, 9)


def test_zero_element_parameters_pass() -> None:
    net = nn.ModuleDict({"bag": nn.Embedding(0, 5), "out": nn.Linear(5, 3)})
    assert sorted(apply(net, RULES).written) == ["bag.weight", "out.bias", "out.weight"]


def test_gradients_and_modes_are_left_as_they_were() -> None:
    net = mlp().eval()
    net["l2"](torch.ones(1, 20)).sum().backward()
    grad = net["l2"].weight.grad.clone()
    apply(net, RULES)
    assert torch.equal(net["l2"].weight.grad, grad)
    assert net["l2"].weight.requires_grad
    assert net["l2"].weight.is_leaf
    assert not net.training


def test_the_report_reads_as_a_table() -> None:
    net = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2), nn.Linear(2, 2))
    rules = {"?.weight": functools.partial(he_normal_, nonlinearity="gelu"), "1.bias": nn.init.zeros_}
    assert str(apply(net, rules, skip=["2.*"])) == (
        "3 written, 2 skipped, 1 untouched\n"
        "written    0.weight  he_normal(nonlinearity='gelu') by '?.weight', "
        "shape (4, 8), fans 8 → 4, std 0.5422\n"
        "written    1.weight  he_normal(nonlinearity='gelu') by '?.weight', "
        "shape (2, 4), fans 4 → 2, std 0.7668\n"
        "written    1.bias    zeros_ by '1.bias', shape (2,)\n"
        "skipped    2.weight  in skip\n"
        "skipped    2.bias    in skip\n"
        "untouched  0.bias"
    )


def test_empty_rules_touch_nothing_and_bad_rules_are_refused() -> None:
    net = mlp()
    before = values(net)
    assert len(apply(net, {}).untouched) == 6
    assert equal(values(net), before)
    assert apply(nn.ReLU(), {}).untouched == ()


def test_attention_biases_borrow_the_projections_fans() -> None:
    net = nn.MultiheadAttention(16, 2)
    report = apply(net, {"in_proj_bias": torch_default_bias_})
    assert report.written["in_proj_bias"].fans == fans(net, "in_proj_weight")
