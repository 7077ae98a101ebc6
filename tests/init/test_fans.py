"""The effective fans are those that the layer's own forward and backward variances show."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import Tensor, nn

from musigma.init import Fans, fans, he_normal_, lecun_normal_, normal_
from musigma.statistics import moments

CONVOLUTIONS = {
    "plain": (lambda: nn.Conv2d(16, 24, 3), (27 * 16 // 3, 24 * 9)),
    "1d": (lambda: nn.Conv1d(10, 6, 5), (50, 30)),
    "3d": (lambda: nn.Conv3d(3, 8, (1, 2, 3)), (18, 48)),
    "grouped": (lambda: nn.Conv2d(16, 24, 3, groups=4), (36, 54)),
    "depthwise": (lambda: nn.Conv2d(32, 32, 3, groups=32), (9, 9)),
    "depthwise x2": (lambda: nn.Conv1d(16, 32, 5, groups=16), (5, 10)),
    "dilated": (lambda: nn.Conv2d(8, 8, 3, dilation=2), (72, 72)),
    "strided": (lambda: nn.Conv2d(16, 24, 4, stride=2), (256, 96)),
    "strided unevenly": (lambda: nn.Conv1d(16, 24, 3, stride=2), (48, 36)),
    "strided apart": (lambda: nn.Conv2d(64, 24, 1, stride=2), (64, 6)),
    "transposed": (lambda: nn.ConvTranspose2d(16, 24, 3), (144, 216)),
    "transposed 1d strided": (lambda: nn.ConvTranspose1d(12, 24, 4, stride=2), (24, 96)),
    "transposed 3d": (lambda: nn.ConvTranspose3d(4, 6, 2, stride=2), (4, 48)),
    "transposed grouped": (lambda: nn.ConvTranspose2d(16, 24, 4, stride=2, groups=4), (16, 96)),
    "transposed uneven": (lambda: nn.ConvTranspose1d(16, 24, 3, stride=2), (24, 72)),
}
# C83's three shapes and what torch's count makes of their output variance.
TRANSPOSED = [(256, 16, 4, 2), (16, 256, 4, 2), (64, 64, 3, 1), (32, 24, 5, 2), (48, 48, 4, 4)]


def interior(x: Tensor) -> Tensor:
    """Positions no border reaches, a whole number of periods of every stride used here (1, 2, 4)."""
    return x[(..., *[slice(8, 8 + (n - 16) // 4 * 4) for n in x.shape[2:]])]


def variances(layer: nn.Module, seed: int) -> tuple[float, float]:
    """Mean square of the output and of the input's gradient, for unit input, weights and output gradient."""
    g = torch.Generator().manual_seed(seed)
    normal_(layer.weight, generator=g)
    nn.init.zeros_(layer.bias)
    dims = layer.weight.dim() - 2
    x = torch.randn(4, layer.in_channels, *[{1: 200, 2: 48, 3: 24}[dims]] * dims, generator=g)
    x.requires_grad_()
    z = layer(x)
    z.backward(torch.randn(z.shape, generator=g))
    both = (interior(t.detach().square()) for t in (z, x.grad))
    return tuple(moments(t, None).mean.item() for t in both)  # type: ignore[return-value]


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolution_fans_are_the_variances_the_layer_shows(name: str) -> None:
    make, expected = CONVOLUTIONS[name]
    counted = fans(make())
    assert counted == expected
    runs = torch.tensor([variances(make(), seed) for seed in range(8)], dtype=torch.float64)
    seen = moments(runs, 0)
    # Eight independent draws: five standard errors of their own mean, which is all the spread there is.
    error = 5 * seen.std(1) / math.sqrt(8)
    assert abs(seen.mean[0] - counted.fan_in) < error[0]
    assert abs(seen.mean[1] - counted.fan_out) < error[1]
    # ... and the test could tell a wrong count from a right one.
    assert error[0] < 0.25 * counted.fan_in
    assert error[1] < 0.25 * counted.fan_out


@pytest.mark.parametrize(("c_in", "c_out", "kernel", "stride"), TRANSPOSED)
@pytest.mark.parametrize("dims", [1, 2])
def test_transposed_convolutions_keep_the_variance(
    c_in: int, c_out: int, kernel: int, stride: int, dims: int
) -> None:
    """C83: fan_in and fan_out are swapped by the weight layout (in, out/groups, k, k), and the stride."""
    layer = (nn.ConvTranspose1d if dims == 1 else nn.ConvTranspose2d)(
        c_in, c_out, kernel, stride=stride, bias=False
    )
    true = c_in * kernel**dims / stride**dims
    assert fans(layer).fan_in == true
    g = torch.Generator().manual_seed(0)
    lecun_normal_(layer.weight, fans=fans(layer), generator=g)
    out = layer(torch.randn(8, c_in, *[{1: 120, 2: 24}[dims]] * dims, generator=g)).detach()
    # The output's mean square is that of the weights, over c_in·c_out·k^dims of them: relative error
    # √(2/n) of a chi square; it and the inputs' own are far below the case's 5 %.
    n = c_in * c_out * kernel**dims
    tolerance = 5 * math.sqrt(2 / n) + 0.03
    assert tolerance < 0.25
    assert moments(interior(out.square()), None).mean.item() == pytest.approx(1.0, abs=tolerance)


def test_dense_layers() -> None:
    assert fans(nn.Linear(5, 7)) == Fans(5, 7)
    lazy = nn.LazyLinear(3)
    lazy(torch.ones(1, 4))
    assert fans(lazy) == Fans(4, 3)
    assert fans(nn.Bilinear(3, 4, 6)) == Fans(12, 24)
    assert fans(nn.Embedding(10, 6)) == Fans(1, 6)
    assert fans(nn.EmbeddingBag(10, 6, mode="sum")) == Fans(1, 6)
    assert fans(torch.empty(4, 3, 2, 2)) == Fans(12, 16)
    assert fans(nn.Sequential(nn.ReLU(), nn.Linear(2, 3)), "1.weight") == Fans(2, 3)


def test_bilinear_and_embedding_follow_their_law() -> None:
    g = torch.Generator().manual_seed(0)
    layer = nn.Bilinear(20, 30, 40, bias=False)
    lecun_normal_(layer.weight, fans=fans(layer), generator=g)
    x = torch.randn(200, 20, generator=g).requires_grad_()
    z = layer(x, torch.randn(200, 30, generator=g))
    z.backward(torch.randn(z.shape, generator=g))
    # 24,000 weights in sums of products of two normals: kurtosis 9 over 200·20 entries at least, 5 sigma.
    tolerance = 5 * math.sqrt(8 / (200 * 20))
    assert moments(z.detach().square(), None).mean.item() == pytest.approx(1.0, rel=tolerance)
    seen = moments(x.grad.square(), None).mean.item() * 600
    assert seen == pytest.approx(fans(layer).fan_out, rel=tolerance)

    table = nn.Embedding(100, 64)
    lecun_normal_(table.weight, fans=fans(table), generator=g)
    rows = table(torch.arange(100)).detach()
    assert moments(rows, None).var().item() == pytest.approx(1.0, rel=5 * math.sqrt(2 / 6400))


@pytest.mark.parametrize("width", [8, 9])
def test_attention_is_counted_per_projection(width: int) -> None:
    packed = nn.MultiheadAttention(width, 1)
    separate = nn.MultiheadAttention(width, 1, kdim=5, vdim=6)
    assert fans(packed, "in_proj_weight") == (width, width)
    assert fans(separate, "q_proj_weight") == (width, width)
    assert fans(separate, "k_proj_weight") == (5, width)
    assert fans(separate, "v_proj_weight") == (6, width)
    assert fans(packed.out_proj) == (width, width)
    assert fans(nn.MultiheadAttention(width, 1, add_bias_kv=True), "bias_k") == (width, width)


@pytest.mark.parametrize(
    ("kind", "cell"), [(nn.LSTM, nn.LSTMCell), (nn.GRU, nn.GRUCell), (nn.RNN, nn.RNNCell)]
)
def test_recurrent_layers_are_counted_per_gate(kind: type[nn.RNNBase], cell: type[nn.RNNCellBase]) -> None:
    layer = kind(5, 7, num_layers=2, bidirectional=True)
    assert fans(layer, "weight_ih_l0") == (5, 7)
    assert fans(layer, "weight_hh_l0_reverse") == (7, 7)
    assert fans(layer, "weight_ih_l1") == (14, 7)
    assert fans(cell(5, 7), "weight_ih") == (5, 7)
    assert fans(cell(5, 7), "weight_hh") == (7, 7)


def test_lstm_projections_have_fans_of_their_own() -> None:
    layer = nn.LSTM(5, 7, proj_size=3)
    assert fans(layer, "weight_hr_l0") == (7, 3)
    assert fans(layer, "weight_hh_l0") == (3, 7)


def test_weights_stored_as_in_by_out() -> None:
    class Conv1D(nn.Module):  # transformers' linear layer of GPT-2
        def __init__(self, nf: int, nx: int) -> None:
            super().__init__()
            self.nf, self.nx = nf, nx
            self.weight = nn.Parameter(torch.empty(nx, nf))

    assert fans(Conv1D(12, 4)) == (4, 12)


@pytest.mark.parametrize("shape", [(), (3,), (0,)])
def test_flat_tensors_have_no_fans(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="fewer than 2 dimensions") as caught:
        fans(torch.empty(shape))
    assert str(tuple(shape)) in str(caught.value)
    with pytest.raises(ValueError, match="'weight' of BatchNorm1d has shape"):
        fans(nn.BatchNorm1d(3))


def test_missing_and_unborn_weights_name_the_way_out() -> None:
    with pytest.raises(AttributeError, match=r"try one of \['in_proj_weight', 'in_proj_bias'\]"):
        fans(nn.MultiheadAttention(4, 1))
    with pytest.raises(AttributeError, match="pass one of its children"):
        fans(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match="run one batch through the model"):
        fans(nn.LazyLinear(3))


def test_weights_without_elements_have_fans() -> None:
    """C84: zero-element weights."""
    assert fans(torch.empty(0, 3)) == (3, 0)
    assert fans(torch.empty(0, 4, 3, 3)) == (36, 0)
    assert fans(torch.empty(0, 0)) == (0, 0)
    assert fans(nn.Embedding(0, 5)) == (1, 5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, at construction
        assert fans(nn.Linear(0, 4)) == (0, 4)
        assert fans(nn.Linear(4, 0)) == (4, 0)


def test_parametrized_weights_are_counted_through_the_parametrization() -> None:
    layer = nn.utils.parametrizations.weight_norm(nn.Conv2d(8, 8, 3, groups=8))
    assert fans(layer) == (9, 9)
    # Computing a spectral norm in training mode takes a step of its power iteration.
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(5, 7))
    before = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    assert fans(layer) == (5, 7)
    assert all(torch.equal(before[name], buffer) for name, buffer in layer.named_buffers())


def test_fan_out_keeps_the_gradient_through_a_grouped_stack() -> None:
    """torch counts 4 times too many outputs here, and the gradient would fade by 2⁻¹ a layer."""
    g = torch.Generator().manual_seed(0)
    layers = [
        nn.Conv1d(64, 64, 5, groups=4, padding=2, padding_mode="circular", bias=False) for _ in range(10)
    ]
    for layer in layers:
        he_normal_(layer.weight, mode="fan_out", fans=fans(layer), nonlinearity="linear", generator=g)
    x = torch.randn(16, 64, 50, generator=g).requires_grad_()
    z = nn.Sequential(*layers)(x)
    upstream = torch.randn(z.shape, generator=g)
    z.backward(upstream)
    kept = moments(x.grad.square(), None).mean.item() / moments(upstream.square(), None).mean.item()
    # Ten random linear layers, 80 products into each of 64 channels: log-variance 10·2/64·(1+…) ≈ 0.4 at
    # most, 3 sigma on either side. torch's count gives 4⁻¹⁰.
    assert abs(math.log(kept)) < 3 * math.sqrt(0.4)
