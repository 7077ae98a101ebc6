"""AddNorm, PreNorm and NormAct: what stands where, and what they refuse."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

import musigma as ms


class Attention(nn.Module):
    """Returns a tensor, and takes an argument beside x."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(d, 2, batch_first=True)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.inner(x, x, x, attn_mask=mask, need_weights=False)[0]


class Feedforward(nn.Sequential):
    def __init__(self, d: int) -> None:
        super().__init__(nn.Linear(d, 16), nn.ReLU(), nn.Linear(16, d))


@pytest.mark.parametrize("norm_first", [False, True])
def test_two_blocks_are_torchs_transformer_layer(norm_first: bool) -> None:
    """The two placements against nn.TransformerEncoderLayer with its own weights, mask included."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=norm_first)
    place = ms.nn.PreNorm if norm_first else ms.nn.AddNorm
    block = nn.ModuleList(
        [place(Attention(8), ms.nn.LayerNorm(8)), place(Feedforward(8), ms.nn.LayerNorm(8))]
    )
    block[0].sublayer.inner.load_state_dict(layer.self_attn.state_dict())
    block[0].norm.load_state_dict(layer.norm1.state_dict())
    block[1].sublayer[0].load_state_dict(layer.linear1.state_dict())
    block[1].sublayer[2].load_state_dict(layer.linear2.state_dict())
    block[1].norm.load_state_dict(layer.norm2.state_dict())
    x = torch.randn(3, 5, 8)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    assert_close(block[1](block[0](x, mask=mask)), layer(x, src_mask=mask))


def test_the_residual_stream_is_normalized_after_or_not_at_all() -> None:
    x = torch.randn(4, 8) * 10 + 3
    silent = nn.Linear(8, 8)
    nn.init.zeros_(silent.weight)
    nn.init.zeros_(silent.bias)
    assert_close(ms.nn.AddNorm(silent, ms.nn.LayerNorm(8))(x), F.layer_norm(x, (8,)))
    assert torch.equal(ms.nn.PreNorm(silent, ms.nn.LayerNorm(8))(x), x)


@pytest.mark.parametrize("place", [ms.nn.AddNorm, ms.nn.PreNorm])
def test_dropout_is_on_the_branch_only(place: Any) -> None:
    block = place(nn.Identity(), nn.Identity(), dropout=1.0)
    x = torch.randn(4, 8)
    assert torch.equal(block(x), x)
    assert torch.equal(block.eval()(x), 2 * x)


@pytest.mark.parametrize("place", [ms.nn.AddNorm, ms.nn.PreNorm])
def test_a_sublayer_must_return_one_tensor_of_the_same_shape(place: Any) -> None:
    with pytest.raises(
        TypeError, match=f"{place.__name__}'s sublayer must return one tensor, got tuple from GRU"
    ):
        place(nn.GRU(8, 8), ms.nn.LayerNorm(8))(torch.randn(4, 2, 8))
    with pytest.raises(ValueError, match=r"Linear made \(4, 1\) of \(4, 8\)"):  # would broadcast
        place(nn.Linear(8, 1), ms.nn.LayerNorm(8))(torch.randn(4, 8))


NORMS = [
    ms.nn.BatchNorm1d(6),
    ms.nn.SyncBatchNorm(6),
    ms.nn.FrozenBatchNorm1d(6),
    ms.nn.GroupNorm(2, 6),
    ms.nn.InstanceNorm1d(6),
    ms.nn.LayerNorm(5),
    ms.nn.LayerNorm1d(6),
    ms.nn.RMSNorm(5),
    nn.BatchNorm1d(6),
]
ACTIVATIONS: dict[str, Any] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "gelu_tanh": lambda t: F.gelu(t, approximate="tanh"),
}


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("activation", [*ACTIVATIONS, "module", "function"])
@pytest.mark.parametrize("norm", NORMS, ids=lambda n: type(n).__name__)
def test_norm_and_activation_in_both_orders(norm: nn.Module, activation: str, norm_first: bool) -> None:
    given = {"module": nn.Tanh(), "function": torch.tanh}.get(activation, activation)
    plain = copy.deepcopy(norm)
    both = ms.nn.NormAct(copy.deepcopy(norm), given, norm_first=norm_first)
    x = torch.randn(4, 6, 5)
    act = ACTIVATIONS.get(activation, torch.tanh)
    assert_close(both(x), act(plain(x)) if norm_first else plain(act(x)))
    assert_close(both.norm.state_dict(), plain.state_dict())


def test_an_unknown_activation_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'gelu_tanh'; got 'swish'"):
        ms.nn.NormAct(ms.nn.LayerNorm(3), "swish")


def test_hooks_on_the_norm_still_run() -> None:
    both = ms.nn.NormAct(ms.nn.BatchNorm1d(3))
    seen: list[Tensor] = []
    both.norm.register_forward_hook(lambda m, a, y: seen.append(y))
    y = both(torch.randn(4, 3))
    assert len(seen) == 1
    assert torch.equal(seen[0], y)
