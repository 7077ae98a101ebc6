"""Every kind of bad start is found and named; the same model started well is not."""

from __future__ import annotations

import copy
import json
import math

import pytest
import torch
from torch import Tensor, nn

import musigma as ms


def codes(audit: ms.init.Audit) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for finding in audit:
        found.setdefault(finding.code, []).append(finding.tensor)
    return found


def mlp(depth: int, width: int, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), activation())]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def draw(model: nn.Module, how, *args: object) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.modules.conv._ConvNd):
            how(module.weight, *args)
            nn.init.zeros_(module.bias)
    return model


@torch.no_grad()
def test_not_a_number() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    model[1].weight[0, 1] = math.nan
    (finding,) = ms.init.audit(model)
    assert (finding.tensor, finding.code, finding.evidence["nan"]) == ("1.weight", "unwritten", 1)


def test_meta_model_emptied_and_never_filled() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    model.to_empty(device="cpu")  # NaN under pytest
    found = codes(ms.init.audit(model))["unwritten"]
    assert set(found) == {*(n for n, _ in model.named_parameters()), "1.running_mean", "1.running_var"}


@torch.no_grad()
def test_bits_of_something_else() -> None:
    model = nn.Linear(64, 32)
    model.weight.view(-1)[::7] = 1e-39
    model.bias[3] = 2e30
    assert codes(ms.init.audit(model)) == {"unwritten": ["weight", "bias"]}


def test_zero_layer_inside_is_unwritten_and_a_zero_head_is_not() -> None:
    model, x = mlp(2, 16), torch.randn(4, 16)
    nn.init.zeros_(model[2].weight)
    assert codes(ms.init.audit(model)) == codes(ms.init.audit(model, x)) == {"unwritten": ["2.weight"]}
    head = mlp(2, 16)
    nn.init.zeros_(head[-1].weight)
    assert not ms.init.audit(head)
    assert not ms.init.audit(head, x)


class Branches(nn.Module):
    """A residual stream, the last layer of each branch zero, a query of zeros and a gate of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in "123"
        )
        self.query, self.key, self.gate = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        for module in (*(block[2] for block in self.blocks), self.query, self.gate):
            nn.init.zeros_(module.weight)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        mixed = (self.query(x) @ self.key(x).mT).softmax(-1) @ x
        return x + mixed * (1 + self.gate(x))


def test_zeros_that_leave_the_signal_alone() -> None:
    assert not ms.init.audit(Branches(), torch.randn(2, 5, 8))


@pytest.mark.parametrize("value", [0.5, 1.0, -0.1])
def test_constant_weights(value: float) -> None:
    model = nn.Linear(6, 4)
    nn.init.constant_(model.weight, value)
    (finding,) = ms.init.audit(model)
    assert (finding.tensor, finding.code, finding.evidence["different"]) == ("weight", "identical-units", 1)


def test_repeated_rows_but_not_depthwise_kernels() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Conv1d(6, 6, 3, groups=6))
    with torch.no_grad():
        model[0].weight[:] = model[0].weight[:1]
        model[1].weight[:] = model[1].weight[:1]
    model[1].weight.requires_grad_(False)
    assert codes(ms.init.audit(model)) == {"identical-units": ["0.weight"]}


def test_cloned_encoder_layers() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    nn.init.normal_(layer.self_attn.in_proj_weight, std=0.1)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    found = codes(ms.init.audit(model, torch.randn(2, 3, 16)))["identical-clone"]
    leaves = ("self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.weight", "linear2.weight")
    assert found == [f"layers.{i}.{leaf}" for i in (1, 2) for leaf in leaves]


def test_a_frozen_copy_is_a_target_network() -> None:
    online = nn.Linear(16, 16)
    model = nn.ModuleDict({"online": online, "target": copy.deepcopy(online).requires_grad_(False)})
    assert not ms.init.audit(model)


@pytest.mark.parametrize(("dim", "pieces"), [(0, 2), (1, 4)])
def test_shards_drawn_with_one_seed(dim: int, pieces: int) -> None:
    model = nn.Linear(32, 32, bias=False)
    piece = model.weight.detach().chunk(pieces, dim)[0]
    model.weight.data = torch.cat([piece] * pieces, dim)
    (finding,) = ms.init.audit(model)
    assert finding.code == "repeated-pieces"
    assert (finding.evidence["pieces"], finding.evidence["dim"]) == (pieces, dim)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_c80_truncated_normal_with_absolute_bounds(dtype: torch.dtype) -> None:
    model = nn.Linear(200, 200, bias=False, dtype=dtype)
    u = torch.empty(200, 200).uniform_(-1, 1)
    with torch.no_grad():
        model.weight.copy_(u.erfinv() * 0.02 * math.sqrt(2))
    assert not ms.init.audit(model)
    with torch.no_grad():
        model.weight.view(-1)[::911] = -2.0
    (finding,) = ms.init.audit(model)
    assert (finding.code, finding.evidence["outliers"]) == ("outlier-entries", 44)
    assert finding.evidence["farthest_in_sigmas"] > 90


def test_clamped_instead_of_truncated() -> None:
    model = nn.Linear(100, 100, bias=False)
    nn.init.normal_(model.weight, std=0.02)
    model.weight.data.clamp_(-0.04, 0.04)
    (finding,) = ms.init.audit(model)
    assert finding.code == "outlier-entries"
    assert finding.evidence["at_bound"] == int((model.weight.abs() == 0.04).sum())
    nn.init.trunc_normal_(model.weight, std=0.02, a=-0.04, b=0.04)
    assert not ms.init.audit(model)


def test_c81_packed_attention() -> None:
    model = nn.MultiheadAttention(256, 4)
    (finding,) = ms.init.audit(model)
    assert (finding.tensor, finding.code) == ("in_proj_weight", "packed-as-one-matrix")
    assert finding.evidence["expected"] == pytest.approx(1 / 16)
    assert finding.evidence["ratio"] == pytest.approx(1 / math.sqrt(2), rel=0.01)
    ms.init.apply(model, {"in_proj_weight": "xavier_uniform"})
    assert not ms.init.audit(model)


class Fused(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out((q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v)


def test_c81_fused_projection_of_a_custom_attention() -> None:
    model, x = Fused(64), torch.randn(2, 5, 64)
    assert not ms.init.audit(model, x)
    nn.init.xavier_normal_(model.qkv.weight)
    assert codes(ms.init.audit(model, x)) == {"packed-as-one-matrix": ["qkv.weight"]}


@pytest.mark.parametrize("scheme", [nn.init.xavier_uniform_, nn.init.orthogonal_])
def test_c81_gates_drawn_as_one_matrix(scheme) -> None:
    model = nn.LSTM(64, 64)
    assert not ms.init.audit(model)
    scheme(model.weight_hh_l0)
    assert codes(ms.init.audit(model)) == {"packed-as-one-matrix": ["weight_hh_l0"]}
    ms.init.apply(model, {"weight_hh_l0": "orthogonal"})
    assert not ms.init.audit(model)


@pytest.mark.parametrize("shape", [(256, 16, 4, 2), (16, 256, 4, 2)])
def test_c83_transposed_convolution(shape: tuple[int, int, int, int]) -> None:
    *channels, kernel, stride = shape
    model = nn.Sequential(nn.ConvTranspose2d(*channels, kernel, stride=stride), nn.ReLU())
    assert not ms.init.audit(model)
    nn.init.kaiming_normal_(model[0].weight, nonlinearity="relu")
    x = torch.randn(2, channels[0], 5, 5)
    for audit in (ms.init.audit(model), ms.init.audit(model, x)):
        (finding,) = audit
        assert (finding.tensor, finding.code) == ("0.weight", "wrong-fan")
        assert finding.evidence["fan_in"] == channels[0] * kernel**2 / stride**2
    ms.init.apply(model, {"0.weight": "he_normal"})
    assert not ms.init.audit(model, x)


def test_c83_a_norm_divides_the_factor_out() -> None:
    model = nn.Sequential(nn.ConvTranspose2d(64, 8, 4, stride=2), nn.BatchNorm2d(8))
    nn.init.kaiming_normal_(model[0].weight, nonlinearity="relu")
    assert not ms.init.audit(model, torch.randn(2, 64, 5, 5))
    audit = ms.init.audit(model)
    assert not audit
    assert "0.weight" in audit.notes[0]


def test_c83_grouped_convolution_counted_over_all_groups() -> None:
    model = nn.Sequential(nn.Conv2d(32, 64, 3, groups=8), nn.ReLU())
    nn.init.kaiming_normal_(model[0].weight, mode="fan_out")
    (finding,) = ms.init.audit(model, torch.randn(2, 32, 8, 8))
    assert (finding.code, finding.evidence["counted_fan_out"]) == ("wrong-fan", 64 * 9)
    # 1/√8, or 0.42 should Xavier's law be as near
    assert finding.evidence["ratio"] < 0.5


def test_c84_tensors_without_entries() -> None:
    with pytest.warns(UserWarning, match="zero-element"):
        model = nn.Sequential(nn.Linear(0, 4), nn.Linear(4, 0))
    audit = ms.init.audit(model)
    assert not audit
    assert audit["0.weight"].verdict.startswith("not read")


@torch.no_grad()
def test_c86_forget_gates() -> None:
    model = nn.LSTM(4, 3, num_layers=2, bidirectional=True)
    assert not ms.init.audit(model)
    for name, parameter in model.named_parameters():
        if "bias" in name:
            parameter.zero_()
    assert not ms.init.audit(model)
    model.bias_hh_l0[3:6] = 1.0
    others = ["bias_hh_l0_reverse", "bias_hh_l1", "bias_hh_l1_reverse"]
    assert codes(ms.init.audit(model)) == {"forget-gate-bias": others}
    for name, parameter in model.named_parameters():
        if "bias" in name:
            parameter[3:6] = 1.0
    audit = ms.init.audit(model)
    assert len(audit) == 4
    assert {f.evidence["realised"] for f in audit} == {2.0}
    ms.init.lstm_forget_bias_(model)
    assert not ms.init.audit(model)


def test_c87_what_a_checkpoint_lacked() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    model.to_empty(device="cpu")
    model.load_state_dict({k: v for k, v in mlp(0, 8).state_dict().items() if "x" in k}, strict=False)
    for parameter in model[0].parameters():
        nn.init.normal_(parameter, std=0.3)
    assert codes(ms.init.audit(model)) == {"unwritten": ["2.weight", "2.bias"]}


def test_c89_selu_gain() -> None:
    model, x = mlp(6, 128, nn.SELU), torch.randn(16, 128)
    draw(model, nn.init.kaiming_normal_, 0, "fan_in", "selu")
    found = codes(ms.init.audit(model, x))
    assert found == {"selu-gain": [f"{2 * i}.weight" for i in range(6)]}
    draw(model, nn.init.kaiming_normal_, 0, "fan_in", "linear")
    assert not ms.init.audit(model, x)


def test_c90_default_under_deep_relu() -> None:
    model, x = mlp(20, 128), torch.randn(64, 128)
    found = [f for f in ms.init.audit(model, x) if f.code == "samples-collapse"]
    assert len(found) >= 18
    # (the first layer reads what no ReLU has cut, and wants 1)
    evidence = found[1].evidence
    assert evidence["var_times_fan_in"] == pytest.approx(1 / 3, rel=0.05)
    assert evidence["wanted"] == pytest.approx(2, rel=0.05)
    # the spread looks healthy and is the same for every input
    assert evidence["rms"] > 0.02
    assert evidence["between_over_rms"] < 1e-5
    draw(model, nn.init.kaiming_normal_, 0, "fan_in", "relu")
    assert not ms.init.audit(model, x)


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ((nn.init.xavier_normal_,), "signal-vanishes"),
        ((nn.init.normal_, 0.0, 0.01), "signal-vanishes"),
        ((nn.init.normal_, 0.0, 0.3), "signal-explodes"),
        ((nn.init.uniform_, 0.0, 1.0), "signal-explodes"),
    ],
)
def test_wrong_gain_in_a_deep_net(how: tuple, code: str) -> None:
    model = draw(mlp(20, 64), *how)
    assert len(codes(ms.init.audit(model, torch.randn(32, 64)))[code]) >= 19


def test_report_is_honest() -> None:
    model = nn.MultiheadAttention(64, 4)
    audit = ms.init.audit(model)
    assert audit
    assert len(audit) == 1
    with pytest.raises(ValueError, match="packed-as-one-matrix"):
        audit.raise_if_any()
    told = json.loads(audit.to_json())
    assert told["findings"][0]["tensor"] == "in_proj_weight"
    assert "in_proj_weight" in audit.to_html()
    assert max(map(len, str(audit).splitlines())) <= 80
    healthy = ms.init.audit(nn.Linear(8, 8))
    assert not healthy
    healthy.raise_if_any()


def test_nothing_of_the_model_changes() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2)).train()
    x = torch.randn(16, 8)
    model(x).sum().backward()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    grads = [p.grad for p in model.parameters()]
    state = torch.get_rng_state()
    ms.init.audit(model, x, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert [p.grad for p in model.parameters()] == grads or all(
        p.grad is g for p, g in zip(model.parameters(), grads, strict=True)
    )
    assert model.training


def test_left_on_the_meta_device() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2, device="meta"))
    assert codes(ms.init.audit(model)) == {"unwritten": ["1.weight", "1.bias"]}


def test_one_seed_for_layers_of_two_sizes() -> None:
    layers = []
    for width in (16, 24):
        torch.manual_seed(5)
        layers.append(nn.Linear(width, 16))
    (finding,) = ms.init.audit(nn.ModuleList(layers))
    assert (finding.tensor, finding.code, finding.evidence["exact"]) == ("1.weight", "identical-clone", False)
    assert "one seed" in finding.problem


def test_weights_with_a_mean() -> None:
    model, x = mlp(1, 32), torch.randn(8, 32)
    nn.init.uniform_(model[0].weight)
    for audit in (ms.init.audit(model), ms.init.audit(model, x)):
        assert codes(audit) == {"off-center": ["0.weight"]}
    normed = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 4))
    nn.init.uniform_(normed[0].weight)
    assert not ms.init.audit(normed, x)


@pytest.mark.parametrize("activation", [nn.Tanh, nn.Sigmoid])
def test_saturated_units(activation: type[nn.Module]) -> None:
    model, x = mlp(2, 64, activation), torch.randn(8, 64)
    assert not ms.init.audit(model, x)
    nn.init.normal_(model[0].weight)
    assert codes(ms.init.audit(model, x)) == {"saturated": ["0.weight"]}


def test_parts_of_a_weight_norm_are_no_weights() -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(16, 16)), nn.ReLU())
    nn.init.ones_(model[0].parametrizations.weight.original0)
    assert not ms.init.audit(model, torch.randn(4, 16))
    with torch.no_grad():
        model[0].parametrizations.weight.original1[0, 0] = math.inf
    assert codes(ms.init.audit(model)) == {"unwritten": ["0.parametrizations.weight.original1"]}


def test_scripted_quantized_and_eight_bit_models() -> None:
    plain = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    eight = nn.Linear(8, 2)
    eight.weight = nn.Parameter(eight.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
    assert not ms.init.audit(eight)
    assert ms.init.audit(eight)["weight"].verdict.startswith("not read")
    compiled = torch.compile(plain, backend="eager")
    assert [line.name for line in ms.init.audit(compiled, torch.randn(2, 8)).tensors] == [
        line.name for line in ms.init.audit(plain).tensors
    ]


def test_sigmoids_make_inputs_alike() -> None:
    model, x = draw(mlp(12, 64, nn.Sigmoid), nn.init.xavier_normal_), torch.randn(32, 64)
    assert "samples-collapse" in codes(ms.init.audit(model, x))
