"""Packed weights: projections and gates are initialized one by one, biases that add up only once."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from musigma import nn as ms_nn
from musigma.init import (
    Fans,
    apply,
    blocks,
    fans,
    gru_update_bias_,
    identity_,
    lstm_forget_bias_,
    orthogonal_,
    per_block,
    xavier_normal_,
    xavier_uniform_,
)
from musigma.statistics import moments


@pytest.mark.parametrize("scheme", [xavier_normal_, xavier_uniform_])
@pytest.mark.parametrize("width", [64, 256])
def test_packed_projections_are_as_large_as_separate_ones(width: int, scheme: object) -> None:
    """C81: a packed (3E, E) weight got fan_out = 3E, and √2 too little."""
    packed, separate = nn.MultiheadAttention(width, 4), nn.MultiheadAttention(width, 4, vdim=width + 1)
    expected = math.sqrt(1 / width)
    g = torch.Generator().manual_seed(0)
    scheme(packed.in_proj_weight, fans=fans(packed, "in_proj_weight"), generator=g)  # type: ignore[operator]
    scheme(separate.q_proj_weight, fans=fans(separate, "q_proj_weight"), generator=g)  # type: ignore[operator]
    error = 5 * expected * math.sqrt(0.5 / width**2)
    for piece in (*blocks(packed, "in_proj_weight").values(), separate.q_proj_weight.detach()):
        assert moments(piece, None).std().item() == pytest.approx(expected, abs=error)


def test_rules_see_the_blocks_by_themselves() -> None:
    """C81 by name: attention, an encoder layer, an LSTM with projections."""
    model = nn.ModuleDict(
        {
            "attention": nn.MultiheadAttention(32, 4),
            "encoder": nn.TransformerEncoderLayer(32, 4, 64),
            "lstm": nn.LSTM(16, 32, proj_size=8),
        }
    )
    apply(model, {"*in_proj_weight": orthogonal_, "lstm.weight_*": orthogonal_})
    checked = 0
    for path, owner in model.named_modules():
        for name, p in owner.named_parameters(recurse=False):
            if "in_proj_weight" in name or ("_l0" in name and "weight" in name):
                for piece in blocks(owner, name).values():
                    gram = piece.T @ piece if piece.shape[0] > piece.shape[1] else piece @ piece.T
                    assert torch.allclose(gram, torch.eye(len(gram)), atol=1e-6), (path, name)
                    checked += 1
                assert p.requires_grad
    assert checked == 3 + 3 + 4 + 4 + 1


def test_blocks_are_views_and_name_the_gates() -> None:
    lstm = nn.LSTM(4, 3, bidirectional=True)
    gates = blocks(lstm, "weight_ih_l0_reverse")
    assert list(gates) == ["input", "forget", "cell", "output"]
    gates["cell"].fill_(5.0)
    assert bool((lstm.weight_ih_l0_reverse[6:9] == 5).all())
    assert bool((lstm.weight_ih_l0_reverse[:6] != 5).all())
    assert list(blocks(nn.GRUCell(4, 3), "bias_hh")) == ["reset", "update", "new"]
    assert list(blocks(nn.RNN(4, 3), "weight_ih_l0")) == ["weight_ih_l0"]
    assert list(blocks(nn.Linear(2, 2))) == ["weight"]
    assert list(blocks(nn.LSTM(4, 3, proj_size=2), "weight_hr_l0")) == ["weight_hr_l0"]
    assert [tuple(v.shape) for v in blocks(nn.Conv1d(4, 6, 3, groups=2)).values()] == [(3, 2, 3)] * 2
    with pytest.raises(ValueError, match="a parametrization computes it"):
        blocks(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)))
    with pytest.raises(AttributeError, match="must have a tensor named 'wieght'"):
        blocks(nn.Linear(2, 2), "wieght")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("proj_size", [0, 2])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("layers", [1, 3])
def test_forget_bias_is_set_once_everywhere(
    layers: int, bidirectional: bool, proj_size: int, bias: bool
) -> None:
    """C86: only on layer 0, only in one direction, or twice."""
    lstm = nn.LSTM(4, 3, num_layers=layers, bidirectional=bidirectional, proj_size=proj_size, bias=bias)
    before = {n: p.detach().clone() for n, p in lstm.named_parameters()}
    assert lstm_forget_bias_(lstm, value=1.5) is lstm
    directions = 0
    for name, p in lstm.named_parameters():
        if name.startswith("bias_ih"):
            effective = (p + getattr(lstm, name.replace("bias_ih", "bias_hh"))).detach()
            assert effective[3:6].tolist() == [1.5] * 3
            directions += 1
        keep = torch.ones(p.shape[0], dtype=torch.bool)
        if name.startswith("bias"):
            keep[3:6] = False
        assert torch.equal(p.detach()[keep], before[name][keep])
        assert p.requires_grad
    assert directions == (layers * (1 + bidirectional) if bias else 0)


def test_forget_bias_of_cells_of_models_and_of_nothing() -> None:
    cell = lstm_forget_bias_(nn.LSTMCell(4, 3))
    assert (cell.bias_ih + cell.bias_hh)[3:6].tolist() == [1.0] * 3
    model = nn.ModuleList([nn.Linear(2, 2), nn.LSTM(2, 2), nn.Sequential(nn.LSTMCell(2, 5))])
    lstm_forget_bias_(model, 2.0)
    assert (model[1].bias_ih_l0 + model[1].bias_hh_l0)[2:4].tolist() == [2.0] * 2
    assert (model[2][0].bias_ih + model[2][0].bias_hh)[5:10].tolist() == [2.0] * 5
    with pytest.raises(ValueError, match="Linear has none"):
        lstm_forget_bias_(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="LSTM has none"):
        gru_update_bias_(nn.LSTM(2, 2))


@pytest.mark.parametrize("bias", [True, False])
def test_recurrent_layers_with_norms_inside(bias: bool) -> None:
    """Their biases are their norms', their weights are stacked as torch's."""
    layers = {
        "layer": ms_nn.LayerNormLSTM(4, 3, num_layers=2, bidirectional=True, bias=bias),
        "batch": ms_nn.BatchNormLSTM(4, 3, max_steps=2, bias=bias),
        "gru": ms_nn.LayerNormGRU(4, 3, bias=bias),
    }
    for name, layer in layers.items():
        assert fans(layer, "weight_ih_l0") == (4, 3)
        assert len(blocks(layer, "weight_hh_l0")) == (3 if name == "gru" else 4)
        before = {n: p.detach().clone() for n, p in layer.named_parameters()}
        (gru_update_bias_ if name == "gru" else lstm_forget_bias_)(layer, 1.5)
        for n, p in layer.named_parameters():
            if n.startswith("norm_ih") and n.endswith("bias"):
                other = getattr(layer, n.split(".")[0].replace("ih", "hh")).bias
                effective = p if other is None else p + other
                assert effective[3:6].tolist() == [1.5] * 3
                keep = torch.arange(len(p)) // 3 != 1
                assert torch.equal(p[keep], before[n][keep])
            elif not n.startswith("norm_hh"):
                assert torch.equal(p, before[n])


def test_forget_bias_keeps_the_cell() -> None:
    lstm = nn.LSTM(4, 8)
    for p in lstm.parameters():
        nn.init.zeros_(p)
    lstm_forget_bias_(lstm, 3.0)
    _, (_, c) = lstm(torch.zeros(10, 1, 4), (torch.zeros(1, 1, 8), torch.ones(1, 1, 8)))
    # Input gate times candidate is σ(0)·tanh(0) = 0: only forgetting is left, ten times.
    assert torch.allclose(c, torch.full_like(c, (1 / (1 + math.exp(-3))) ** 10), rtol=1e-5)


def test_update_bias_keeps_the_state_of_a_gru() -> None:
    """The counterpart: torch's h' = (1 − z)·n + z·h keeps the state for a large z."""
    gru = nn.GRU(4, 8, num_layers=2, bidirectional=True)
    gru_update_bias_(gru, 2.0)
    for name in ("l0", "l0_reverse", "l1", "l1_reverse"):
        effective = getattr(gru, f"bias_ih_{name}") + getattr(gru, f"bias_hh_{name}")
        assert effective[8:16].tolist() == [2.0] * 8
    one = nn.GRU(4, 8)
    for p in one.parameters():
        nn.init.zeros_(p)
    gru_update_bias_(one, 3.0)
    _, h = one(torch.zeros(10, 1, 4), torch.ones(1, 1, 8))
    assert torch.allclose(h, torch.full_like(h, (1 / (1 + math.exp(-3))) ** 10), rtol=1e-5)


def test_projections_are_initialized_too() -> None:
    """C86: projection weights."""
    lstm = nn.LSTM(4, 32, num_layers=2, proj_size=16)
    report = apply(lstm, {"weight_*": "xavier_normal", "bias_*": "zeros"})
    assert report.untouched == ()
    assert report.written["weight_hr_l1"].fans == Fans(32, 16)
    std = moments(lstm.weight_hr_l1.detach(), None).std().item()
    assert std == pytest.approx(math.sqrt(2 / 48), rel=5 * math.sqrt(0.5 / 512))


@pytest.mark.parametrize("parts", [3, (8, 8, 8)])
def test_per_block_for_what_nobody_can_know_is_packed(parts: int | tuple[int, ...]) -> None:
    w = per_block(orthogonal_, parts)(torch.empty(24, 8))
    for piece in w.chunk(3):
        assert torch.allclose(piece @ piece.T, torch.eye(8), atol=1e-6)


def test_per_block_with_unequal_pieces_in_a_rule() -> None:
    """Grouped-query attention: 16 query rows, 4 key and 4 value rows."""
    model = nn.ModuleDict({"qkv": nn.Linear(16, 24), "out": nn.Linear(16, 16)})
    apply(model, {"qkv.weight": per_block(identity_, [16, 4, 4]), "out.weight": orthogonal_})
    assert torch.equal(model["qkv"].weight[16:20, :4], torch.eye(4))
    again = nn.ModuleDict({"out": nn.Linear(16, 16), "qkv": nn.Linear(16, 24)})
    apply(again, {"qkv.weight": per_block(orthogonal_, [16, 4, 4])}, seed=1)
    first = again["qkv"].weight.detach().clone()
    apply(again, {"qkv.weight": per_block(orthogonal_, [16, 4, 4])}, seed=1)
    assert torch.equal(first, again["qkv"].weight)


@pytest.mark.parametrize(
    ("parts", "words"), [(5, "divisible by parts"), ([8, 8], "add up"), (0, "at least 1")]
)
def test_pieces_that_do_not_fit_are_refused(parts: int | list[int], words: str) -> None:
    w = torch.full((24, 8), 7.0)
    with pytest.raises(ValueError, match=words):
        per_block(orthogonal_, parts)(w)
    assert bool((w == 7).all())
