"""Recurrent layers with a normalization inside, against torch's without one and against the equations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence
from torch.testing import assert_close

import musigma as ms
from musigma._errors import MusigmaWarning

LAYERS = {"LSTM": ms.nn.LayerNormLSTM, "GRU": ms.nn.LayerNormGRU, "RNN": ms.nn.LayerNormRNN}
SHAPES: list[dict[str, Any]] = [
    {},
    {"num_layers": 2},
    {"bidirectional": True},
    {"num_layers": 3, "bidirectional": True, "batch_first": True},
]


def without_norms(layer: nn.Module) -> nn.Module:
    for name, _ in list(layer.named_children()):
        setattr(layer, name, nn.Identity())
    return layer


def pair(name: str, **options: Any) -> tuple[nn.Module, nn.Module]:
    """torch's layer, and ours with its weights and no norms: the same function."""
    theirs = getattr(nn, name)(3, 5, bias=False, **options).double()
    ours = without_norms(LAYERS[name](3, 5, **options).double())
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def states(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize("options", SHAPES, ids=str)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("initial", [False, True])
def test_without_its_norms_it_is_torchs(name: str, options: dict[str, Any], initial: bool) -> None:
    """Weights, gate order, layers, directions, batches and states: everything around the norms."""
    theirs, ours = pair(name, **options)
    x = torch.randn(4, 6, 3, dtype=torch.float64, requires_grad=True)
    n = 4 if options.get("batch_first") else 6
    cells = options.get("num_layers", 1) * (2 if options.get("bidirectional") else 1)
    h, c = (torch.randn(cells, n, 5, dtype=torch.float64) for _ in range(2))
    hx = None if not initial else (h, c) if name == "LSTM" else h
    (output, final), (expected, expected_final) = ours(x, hx), theirs(x, hx)
    assert_close(output, expected)
    assert_close(states(final), states(expected_final))
    g = torch.randn_like(output)
    assert_close(torch.autograd.grad(output, x, g), torch.autograd.grad(expected, x, g))


def test_without_its_norms_a_projecting_lstm_is_torchs() -> None:
    theirs, ours = pair("LSTM", num_layers=2, proj_size=2, bidirectional=True)
    x = torch.randn(4, 6, 3, dtype=torch.float64)
    (output, (h, c)), (expected, (eh, ec)) = ours(x), theirs(x)
    assert_close((output, h, c), (expected, eh, ec))


@pytest.mark.parametrize("name", LAYERS)
def test_one_sequence_without_a_batch_dim(name: str) -> None:
    theirs, ours = pair(name, num_layers=2)
    x = torch.randn(4, 3, dtype=torch.float64)
    h, c = (torch.randn(2, 5, dtype=torch.float64) for _ in range(2))
    hx = (h, c) if name == "LSTM" else h
    (output, final), (expected, expected_final) = ours(x, hx), theirs(x, hx)
    assert_close(output, expected)
    assert_close(states(final), states(expected_final))


@pytest.mark.parametrize("enforce_sorted", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_packed_sequences_of_several_lengths(name: str, enforce_sorted: bool) -> None:
    theirs, ours = pair(name, num_layers=2, bidirectional=True)
    lengths = (5, 5, 3, 1) if enforce_sorted else (3, 5, 1, 5)
    packed = pack_sequence(
        [torch.randn(n, 3, dtype=torch.float64) for n in lengths], enforce_sorted=enforce_sorted
    )
    (output, final), (expected, expected_final) = ours(packed), theirs(packed)
    assert isinstance(output, PackedSequence)
    for got, wanted in zip(pad_packed_sequence(output), pad_packed_sequence(expected), strict=True):
        assert_close(got, wanted)
    assert_close(states(final), states(expected_final))


def norm_of(layer: nn.Module, name: str) -> Callable[[Tensor], Tensor]:
    norm = getattr(layer, name)
    return lambda t: F.layer_norm(t, t.shape[-1:], norm.weight, norm.bias, norm.eps)


def randomized(layer: nn.Module) -> nn.Module:
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn_like(p))
    return layer.double()


def test_lstm_by_the_papers_equations() -> None:
    layer = randomized(ms.nn.LayerNormLSTM(3, 5))
    n_ih, n_hh, n_cell = (norm_of(layer, f"norm_{k}_l0") for k in ("ih", "hh", "cell"))
    x = torch.randn(4, 2, 3, dtype=torch.float64)
    h = c = torch.zeros(2, 5, dtype=torch.float64)
    outputs = []
    for step in x:
        i, f, g, o = (n_ih(step @ layer.weight_ih_l0.T) + n_hh(h @ layer.weight_hh_l0.T)).chunk(4, -1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(n_cell(c))
        outputs.append(h)
    output, (h_n, c_n) = layer(x)
    assert_close(output, torch.stack(outputs))
    assert_close((h_n[0], c_n[0]), (h, c))


def test_gru_by_the_papers_equations() -> None:
    layer = randomized(ms.nn.LayerNormGRU(3, 5))
    gates_x, gates_h, new_x, new_h = (norm_of(layer, f"norm_{k}_l0") for k in ("ih", "hh", "in", "hn"))
    x = torch.randn(4, 2, 3, dtype=torch.float64)
    h = torch.zeros(2, 5, dtype=torch.float64)
    for step in x:
        a, b = step @ layer.weight_ih_l0.T, h @ layer.weight_hh_l0.T
        r, z = torch.sigmoid(gates_x(a[:, :10]) + gates_h(b[:, :10])).chunk(2, -1)
        n = torch.tanh(new_x(a[:, 10:]) + r * new_h(b[:, 10:]))
        h = (1 - z) * n + z * h
    assert_close(layer(x)[1][0], h)


@pytest.mark.parametrize("nonlinearity", ["tanh", "relu"])
def test_rnn_by_the_notes_update_rule(nonlinearity: str) -> None:
    """The first note: (g/σ) · (a − μ) + b on the summed inputs a of one layer."""
    layer = randomized(ms.nn.LayerNormRNN(3, 5, nonlinearity=nonlinearity))
    x = torch.randn(4, 2, 3, dtype=torch.float64)
    h = torch.zeros(2, 5, dtype=torch.float64)
    for step in x:
        a = step @ layer.weight_ih_l0.T + h @ layer.weight_hh_l0.T
        m = ms.moments(a, -1, keepdim=True)
        h = getattr(torch, nonlinearity)(
            layer.norm_l0.weight * m.rstd(1e-5) * (a - m.mean) + layer.norm_l0.bias
        )
    assert_close(layer(x)[1][0], h)


def drifting(steps: int = 12, n: int = 256) -> Tensor:
    """Sequences whose summed inputs have another mean and spread at every step."""
    t = torch.arange(steps, dtype=torch.float32)[:, None, None]
    return torch.randn(steps, n, 3) * (0.2 + 0.3 * t) + 0.5 * t


def train_eval_gap(layer: nn.Module, x: Tensor) -> float:
    """How far evaluation is from training on the batch whose statistics were kept, in output stds."""
    with torch.no_grad():
        trained = layer.train()(x)[0]
        evaluated = layer.eval()(x)[0]
    return ((trained - evaluated).square().mean().sqrt() / trained.std()).item()


def test_one_set_of_statistics_fails_in_recurrence_and_layer_norm_needs_none() -> None:
    x = drifting()
    shared, per_step = (
        ms.nn.BatchNormLSTM(3, 8, max_steps=steps, momentum=1.0 if steps > 1 else None) for steps in (1, 12)
    )
    per_step.load_state_dict({k: v for k, v in shared.state_dict().items() if "weight" in k}, strict=False)
    # kept from this batch alone, per-step statistics differ by the unbiased variance only: 256/255
    assert train_eval_gap(per_step, x) < 0.01
    assert train_eval_gap(shared, x) > 0.3
    assert train_eval_gap(ms.nn.LayerNormLSTM(3, 8), x) == 0.0


def test_statistics_of_each_step_are_kept_apart() -> None:
    layer = ms.nn.BatchNormLSTM(3, 4, max_steps=6, momentum=1.0)
    x = drifting(6, 64)
    layer(x)
    for t in range(6):
        inputs = ms.moments(F.linear(x[t], layer.weight_ih_l0).detach(), 0)
        assert_close(layer.norm_ih_l0.running_mean[t].double(), inputs.mean, rtol=1e-5, atol=1e-5)
        assert_close(layer.norm_ih_l0.running_var[t].double(), inputs.var(correction=1), rtol=1e-5, atol=1e-5)
    # h is zero before the first step: its summed inputs have no spread there, and some later
    assert layer.norm_hh_l0.running_var[0].abs().max() == 0
    assert layer.norm_hh_l0.running_var[1].min() > 0
    assert layer.norm_cell_l0.num_batches_tracked.tolist() == [1] * 6


def test_batch_norm_lstm_by_the_papers_equations() -> None:
    layer = ms.nn.BatchNormLSTM(3, 5, max_steps=4).double()
    assert_close(layer.norm_cell_l0.weight, torch.full((5,), 0.1, dtype=torch.float64))
    assert layer.norm_hh_l0.bias is None

    def normalized(t: Tensor, name: str) -> Tensor:
        norm = getattr(layer, name)
        return F.batch_norm(t, None, None, norm.weight, norm.bias, training=True)

    x = torch.randn(4, 7, 3, dtype=torch.float64)
    h = c = torch.zeros(7, 5, dtype=torch.float64)
    for step in x:
        gates = normalized(step @ layer.weight_ih_l0.T, "norm_ih_l0")
        gates = gates + normalized(h @ layer.weight_hh_l0.T, "norm_hh_l0")
        i, f, g, o = gates.chunk(4, -1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(normalized(c, "norm_cell_l0"))
    assert_close(layer(x)[1][0][0], h)


def test_steps_beyond_the_last_use_the_lasts_statistics() -> None:
    layer = ms.nn.BatchNormLSTM(3, 4, max_steps=2)
    layer(torch.randn(5, 8, 3))
    assert layer.norm_ih_l0.num_batches_tracked.tolist() == [1, 4]
    assert layer.eval()(torch.randn(9, 1, 3))[0].isfinite().all()


def test_the_reverse_direction_counts_its_own_steps() -> None:
    layer = ms.nn.BatchNormLSTM(3, 4, max_steps=6, momentum=1.0, bidirectional=True)
    x = drifting(6, 64)
    layer(x)
    first = ms.moments(F.linear(x[-1], layer.weight_ih_l0_reverse).detach(), 0)
    assert_close(layer.norm_ih_l0_reverse.running_mean[0].double(), first.mean, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", LAYERS)
def test_batch_of_one_equals_its_row_and_evaluation_equals_training(name: str) -> None:
    layer = LAYERS[name](3, 5, num_layers=2)
    x = torch.randn(6, 9, 3)
    whole = layer(x)[0]
    assert_close(layer(x[:, 4:5])[0], whole[:, 4:5])
    assert torch.equal(layer.eval()(x)[0], whole)


def test_dropout_acts_between_layers_in_training_only() -> None:
    layer = ms.nn.LayerNormGRU(3, 5, num_layers=2, dropout=0.5)
    x = torch.randn(6, 9, 3)
    assert not torch.equal(layer(x)[0], layer(x)[0])
    layer.eval()
    assert torch.equal(layer(x)[0], layer(x)[0])
    with pytest.warns(MusigmaWarning, match="num_layers=1"):
        ms.nn.LayerNormGRU(3, 5, dropout=0.5)


def test_no_steps_leave_the_state_alone() -> None:
    h = torch.randn(1, 2, 5)
    output, final = ms.nn.LayerNormGRU(3, 5)(torch.zeros(0, 2, 3), h)
    assert output.shape == (0, 2, 5)
    assert torch.equal(final, h)


@pytest.mark.parametrize(
    "layer", [ms.nn.LayerNormLSTM(3, 5), ms.nn.LayerNormGRU(3, 5), ms.nn.LayerNormRNN(3, 5)]
)
def test_every_parameter_gets_a_gradient(layer: nn.Module) -> None:
    layer(torch.randn(4, 2, 3))[0].square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("bias", [True, False])
def test_without_bias_no_norm_has_one(bias: bool) -> None:
    for layer in (ms.nn.LayerNormLSTM(3, 5, bias=bias), ms.nn.BatchNormLSTM(3, 5, bias=bias, max_steps=2)):
        assert any("bias" in name for name, _ in layer.named_parameters()) == bias


ERRORS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "dims": (
        lambda: ms.nn.LayerNormLSTM(3, 5)(torch.ones(3)),
        ValueError,
        "LayerNormLSTM: Expected input to be 2D or 3D",
    ),
    "features": (
        lambda: ms.nn.LayerNormGRU(3, 5)(torch.ones(2, 2, 4)),
        RuntimeError,
        "input.size.-1. must be equal to input_size. Expected 3, got 4",
    ),
    "state": (
        lambda: ms.nn.LayerNormGRU(3, 5)(torch.ones(2, 2, 3), torch.ones(1, 3, 5)),
        RuntimeError,
        r"Expected hidden\[0\] size \(1, 2, 5\), got \[1, 3, 5\]",
    ),
    "one state of two": (
        lambda: ms.nn.LayerNormLSTM(3, 5)(torch.ones(2, 2, 3), torch.ones(1, 2, 5)),
        RuntimeError,
        "state is h and c, got 1",
    ),
    "batched state of one sequence": (
        lambda: ms.nn.LayerNormGRU(3, 5)(torch.ones(2, 3), torch.ones(1, 1, 5)),
        RuntimeError,
        "hx should also be 2-D but got 3-D",
    ),
    "size": (lambda: ms.nn.LayerNormGRU(3, 0), ValueError, "hidden_size must be greater than zero, got 0"),
    "projection": (lambda: ms.nn.LayerNormLSTM(3, 5, proj_size=5), ValueError, "proj_size has to be smaller"),
    "dropout": (lambda: ms.nn.LayerNormGRU(3, 5, dropout=1.5), ValueError, r"range \[0, 1\], got 1.5"),
    "nonlinearity": (
        lambda: ms.nn.LayerNormRNN(3, 5, nonlinearity="sin"),
        ValueError,
        "Select from 'tanh' or 'relu'",
    ),
    "steps": (
        lambda: ms.nn.BatchNormLSTM(3, 5, max_steps=0),
        ValueError,
        "max_steps must be greater than zero",
    ),
    "packed": (
        lambda: ms.nn.BatchNormLSTM(3, 5, max_steps=4)(pack_sequence([torch.ones(2, 3)])),
        TypeError,
        "LayerNormLSTM",
    ),
    "batch of one": (
        lambda: ms.nn.BatchNormLSTM(3, 5, max_steps=4)(torch.ones(2, 1, 3)),
        ValueError,
        "Expected more than 1 value per channel",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case: str) -> None:
    run, error, words = ERRORS[case]
    with pytest.raises(error, match=words):
        run()


def test_repr_shows_what_differs_from_the_defaults() -> None:
    assert repr(ms.nn.LayerNormLSTM(3, 5, num_layers=2)).startswith("LayerNormLSTM(\n  3, 5, num_layers=2\n")
