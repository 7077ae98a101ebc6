"""Weight decay goes by what a parameter is, never by its shape or its name."""

import pytest
import torch
from torch import Tensor, nn

import musigma as ms
from musigma.surgery import parameter_groups


def spared(model: nn.Module, *args: object, **kwargs: object) -> set[str]:
    """The names without weight decay; every parameter has to be in exactly one group."""
    groups = parameter_groups(model, *args, weight_decay=0.1, **kwargs)
    held = [id(p) for group in groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters())
    names = dict(model.named_parameters())
    assert all(names[n] is p for g in groups for n, p in zip(g["param_names"], g["params"], strict=True))
    assert [g["weight_decay"] for g in groups] == [0.1, 0.0]
    return set(groups[1]["param_names"])


class Scale(nn.Module):
    """An RMSNorm by another name, with its weight applied as the case may be."""

    def __init__(self, width: int, how: str, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.how = how
        self.strength = nn.Parameter(torch.ones(width).reshape(shape))

    def forward(self, x: Tensor) -> Tensor:
        rstd = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
        if self.how == "after a cast":
            return self.strength * (x.float() * rstd).to(x.dtype)
        if self.how == "plus one":
            return (x * rstd) * (1 + self.strength)
        return x * (rstd * self.strength)


@pytest.mark.parametrize("how", ["after a cast", "plus one", "on the rstd"])
@pytest.mark.parametrize("shape", [(6,), (1, 1, 6)], ids=["1d", "3d"])
@pytest.mark.parametrize("shown", [True, False], ids=["example", "alone"])
def test_the_weight_of_a_norm_written_out_by_hand(how: str, shape: tuple[int, ...], shown: bool) -> None:
    net = nn.Sequential(nn.Linear(6, 6), Scale(6, how, shape), nn.Linear(6, 2, bias=False))
    example = (torch.randn(2, 3, 6),) if shown else None
    assert spared(net, example) == {"0.bias", "1.strength"}


class Hand(nn.Module):
    """A vector that mixes features, a matrix-shaped bias, a scale that belongs to no norm."""

    def __init__(self) -> None:
        super().__init__()
        self.readout = nn.Parameter(torch.ones(6))
        self.offset = nn.Parameter(torch.zeros(1, 6))
        self.gate = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.gate + self.offset) @ self.readout


@pytest.mark.parametrize("shown", [True, False], ids=["example", "alone"])
def test_shapes_decide_nothing(shown: bool) -> None:
    assert spared(Hand(), (torch.randn(2, 6),) if shown else None) == {"offset"}


def test_every_norm_and_every_bias_of_torch_and_ours() -> None:
    net = nn.ModuleDict(
        {
            "conv": nn.ConvTranspose2d(4, 4, 3),
            "bn": nn.BatchNorm2d(4),
            "gn": nn.GroupNorm(2, 4),
            "in": nn.InstanceNorm1d(4, affine=True),
            "rms": nn.RMSNorm(4),
            "lstm": nn.LSTM(4, 4, 2, bidirectional=True),
            "cell": nn.GRUCell(4, 4),
            "mha": nn.MultiheadAttention(4, 2, add_bias_kv=True, kdim=6, vdim=6),
            "bilinear": nn.Bilinear(4, 4, 1),
            "prelu": nn.PReLU(),
            "ours": ms.nn.LayerNormLSTM(4, 4),
            "emb": nn.Embedding(5, 4),
        }
    )
    decayed = {n for n, _ in net.named_parameters()} - spared(net)
    assert decayed == {
        "conv.weight",
        *(
            f"lstm.weight_{w}_l{layer}{way}"
            for w in ("ih", "hh")
            for layer in (0, 1)
            for way in ("", "_reverse")
        ),
        "cell.weight_ih",
        "cell.weight_hh",
        "mha.q_proj_weight",
        "mha.k_proj_weight",
        "mha.v_proj_weight",
        "mha.out_proj.weight",
        "bilinear.weight",
        "ours.weight_ih_l0",
        "ours.weight_hh_l0",
        "emb.weight",
    }


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(5, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.emb(ids)))


def test_a_tied_parameter_stands_once_and_embeddings_are_a_choice() -> None:
    assert spared(Tied()) == {"norm.weight", "norm.bias"}
    assert spared(Tied(), decay_embeddings=False) == {"emb.weight", "norm.weight", "norm.bias"}
    assert spared(Tied(), torch.tensor([[1, 2]])) == {"norm.weight", "norm.bias"}


def test_a_vector_tied_between_a_norm_and_a_weight_is_a_weight() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(4, bias=False)
            self.readout = self.norm.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x) @ self.readout

    assert (
        spared(Shared(), torch.randn(2, 4)) == {"norm.weight"} or spared(Shared(), torch.randn(2, 4)) == set()
    )


def test_parametrized_weights_stay_weights() -> None:
    linear = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
    assert spared(nn.Sequential(linear)) == {"0.bias"}


def test_frozen_parameters_are_there_and_optimizers_take_the_groups() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)).requires_grad_(False)
    assert spared(net) == {"0.bias", "1.weight", "1.bias"}
    for optimizer in (torch.optim.SGD, torch.optim.AdamW):
        made = optimizer(parameter_groups(net, weight_decay=0.1), lr=0.1)
        assert [g["weight_decay"] for g in made.param_groups] == [0.1, 0.0]
        made.load_state_dict(made.state_dict())
    only_weights = parameter_groups(nn.Linear(3, 3, bias=False), weight_decay=0.1)
    torch.optim.SGD(only_weights, lr=0.1)


def test_norms_of_transformers_are_known() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=11, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2
    )
    net = transformers.LlamaForCausalLM(config)
    assert all("norm" in name for name in spared(net))
    assert len(spared(net)) == 3


@pytest.mark.parametrize("bad", [-0.1, float("nan"), float("inf")])
def test_a_weight_decay_that_is_none_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="weight_decay must be 0 or more"):
        parameter_groups(nn.Linear(1, 1), weight_decay=bad)


def test_a_lazy_layer_is_named() -> None:
    with pytest.raises(ValueError, match=r"0\.weight.*not initialized yet"):
        parameter_groups(nn.Sequential(nn.LazyLinear(3)), weight_decay=0.1)
