"""What the schemes are for: the law Var(z) = fan_in·Var(W)·E[a²], measured through real depth."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from musigma.init import (
    SCHEMES,
    gain,
    he_normal_,
    he_uniform_,
    moments_of,
    normal_hundredth_,
    torch_default_,
    uniform_,
    xavier_normal_,
    xavier_uniform_,
)
from musigma.init.meanfield._activations import ACTIVATIONS
from musigma.statistics import moments

DEPTH = 30


def mean_square(x: Tensor) -> float:
    return moments(x.square(), None).mean.item()


@dataclass
class Trace:
    """Mean squares through a stack of layers without biases: of inputs, weights and pre-activations."""

    inputs: list[float]
    weights: list[float]
    outputs: list[float]


def trace(
    scheme: Callable[..., Tensor],
    activation: Callable[[Tensor], Tensor],
    width: int,
    seed: int,
    **options: object,
) -> Trace:
    g = torch.Generator().manual_seed(seed)
    a = torch.randn(200, width, generator=g, dtype=torch.float64)
    seen = Trace([], [], [])
    for _ in range(DEPTH):
        w = scheme(torch.empty(width, width), generator=g, **options).double()
        z = a @ w.T
        seen.inputs.append(mean_square(a))
        seen.weights.append(mean_square(w))
        seen.outputs.append(mean_square(z))
        a = activation(z)
    return seen


def layer_spread(width: int) -> float:
    """Relative spread of one ReLU layer's mean square over random weights.

    E‖x‖⁴/(E‖x‖²)² = 1 + 5/n a layer: of n independent units, each ReLU of a normal, whose square has
    (E x⁴)/(E x²)² = (3/2)/(1/4) = 6. For linear and saturating units it is smaller.
    """
    return math.sqrt(5 / width)


@pytest.mark.parametrize(
    ("scheme", "activation"),
    [(he_normal_, F.relu), (he_uniform_, F.relu), (xavier_normal_, torch.tanh), (xavier_uniform_, F.relu)],
)
def test_each_layer_multiplies_by_fan_in_times_weight_variance(
    scheme: Callable[..., Tensor], activation: Callable[[Tensor], Tensor]
) -> None:
    """Var(z) = fan_in·Var(W)·E[a²], not ·Var(a): activations are not centered after a ReLU."""
    width = 256
    seen = trace(scheme, activation, width, seed=0)
    predicted = [width * w * a for w, a in zip(seen.weights, seen.inputs, strict=True)]
    # Given its input, a layer's mean square over n units is that of n normals at worst (all 200 rows
    # share the weights, so rows don't help): √(2/n).
    for z, law in zip(seen.outputs, predicted, strict=True):
        assert z == pytest.approx(law, rel=5 * math.sqrt(2 / width))


def test_the_variance_of_uncentered_activations_is_not_enough() -> None:
    """With Var(a) in its place a He layer would come out (1 − 1/π)·… a third too small."""
    g = torch.Generator().manual_seed(1)
    a = F.relu(torch.randn(5000, 400, generator=g, dtype=torch.float64))
    z = a @ he_normal_(torch.empty(400, 400), generator=g).double().T
    seen = moments(a, None)
    by_var = 400 * (2 / 400) * seen.var().item()
    by_square = 400 * (2 / 400) * mean_square(a)
    assert mean_square(z) == pytest.approx(by_square, rel=5 * math.sqrt(2 / 400))
    assert by_var / by_square == pytest.approx(1 - 1 / math.pi, rel=0.01)


def geometric_rate(seen: Trace) -> float:
    """Factor on the mean square of a pre-activation per layer, averaged on the logarithm."""
    return math.log(seen.outputs[-1] / seen.outputs[0]) / (DEPTH - 1)


@pytest.mark.parametrize("width", [100, 256])
def test_he_with_relu_keeps_the_mean_square(width: int) -> None:
    """Within the finite-width interval: the mean of log q drifts by −s²/2, s² = L·log(1 + 5/n)."""
    seeds = 10
    log_ratio = torch.tensor(
        [geometric_rate(trace(he_normal_, F.relu, width, s)) * (DEPTH - 1) for s in range(seeds)],
        dtype=torch.float64,
    )
    s2 = (DEPTH - 1) * math.log1p(5 / width)
    interval = 4 * math.sqrt(s2 / seeds)
    assert abs(moments(log_ratio, 0).mean.item() + s2 / 2) < interval
    # The interval could tell keeping from halving: 29·log 2 = 20.
    assert interval < 3


def test_finite_width_spread_grows_as_published() -> None:
    """E‖x‖⁴/(E‖x‖²)² = (1 + 5/n)^L, 4.32 at n = 100, L = 30, seen as the variance of log ‖x‖²."""
    n, nets = 100, 400
    assert (1 + 5 / n) ** DEPTH == pytest.approx(4.32, abs=0.005)
    g = torch.Generator().manual_seed(0)
    x = torch.ones(nets, n, 1)
    for _ in range(DEPTH):
        x = F.relu(he_normal_(torch.empty(nets, n, n), fans=(n, n), generator=g) @ x)
    logs = moments(x.square(), (1, 2)).mean.log()
    # The ratio itself is hopeless to sample: its tail is as heavy as its value is large (4.96 was measured).
    # Its logarithm, L·log(1 + 5/n), is the variance of log ‖x‖² up to O(1/n²): 6 % here. √(2/nets) to sample.
    expected = DEPTH * math.log1p(5 / n)
    assert moments(logs, 0).var(1).item() == pytest.approx(expected, rel=0.06 + 5 * math.sqrt(2 / nets))


@pytest.mark.parametrize("scheme", [xavier_normal_, xavier_uniform_])
def test_xavier_with_relu_halves_every_layer(scheme: Callable[..., Tensor]) -> None:
    rates = torch.tensor(
        [geometric_rate(trace(scheme, F.relu, 256, s)) for s in range(5)], dtype=torch.float64
    )
    s2 = math.log1p(5 / 256)
    error = 5 * math.sqrt(s2 / ((DEPTH - 1) * 5))
    assert moments(rates, 0).mean.item() == pytest.approx(-math.log(2) - s2 / 2, abs=error)


def test_xavier_with_tanh_loses_as_one_over_twice_the_depth() -> None:
    """q' = E[tanh²(√q z)] = q − 2q² + …, so q_l → 1/(2l): a power law, where ReLU loses exponentially."""
    q, exact = 1.0, []
    for _ in range(DEPTH):
        exact.append(q)
        q = moments_of("tanh", 0.0, math.sqrt(q)).mean_square
    runs = [trace(xavier_normal_, torch.tanh, 256, s).outputs for s in range(3)]
    seen = moments(torch.tensor(runs, dtype=torch.float64), 0).mean
    for layer in (1, 9, 29):
        # Fluctuations of single layers (√(2/n) each) are damped by the map, whose slope is 1 − 4q: about
        # √(l/3) of them survive, over 3 seeds.
        error = 5 * math.sqrt(2 / 256) * math.sqrt((layer + 1) / 3) / math.sqrt(3)
        assert seen[layer].item() == pytest.approx(exact[layer], rel=error)
    # The asymptote itself, by the map alone: 1/q_l = 2l + O(log l).
    for _ in range(DEPTH, 300):
        exact.append(q)
        q = moments_of("tanh", 0.0, math.sqrt(q)).mean_square
    assert exact[-1] * 2 * 300 == pytest.approx(1.0, abs=math.log(300) / 300)


@pytest.mark.parametrize("activation", ["gelu", "silu", "mish", "elu", "tanh", "sin", "relu_squared"])
def test_second_moment_gains_keep_one_layer(activation: str) -> None:
    g = torch.Generator().manual_seed(2)
    a = ACTIVATIONS[activation](torch.randn(4000, 500, generator=g))
    w = he_normal_(torch.empty(2000, 500), nonlinearity=activation, generator=g)
    # 2000 output units, each weighing the same 500 second moments: √(2/2000), and the input's own error,
    # √(kurtosis/(4000·500)) < 1 %.
    assert mean_square(a @ w.T) == pytest.approx(1.0, rel=5 * math.sqrt(2 / 2000) + 0.01)
    assert gain(activation) > 0


class TestTorchsDefault:
    """The published numbers of a default Linear + ReLU stack, and C90."""

    def test_pre_activations_fade(self) -> None:
        """std .576, .238, 1.7e-4 at layers 1, 2, 10 for width 512, no bias."""
        expected = {1: 0.576, 2: 0.238, 10: 1.7e-4}
        seeds, width = 5, 512
        logs: dict[int, list[float]] = {layer: [] for layer in expected}
        for seed in range(seeds):
            g = torch.Generator().manual_seed(seed)
            a = torch.randn(500, width, generator=g)
            for layer in range(1, 11):
                z = a @ torch_default_(torch.empty(width, width), generator=g).T
                if layer in expected:
                    logs[layer].append(moments(z, None).std().log().item())
                a = F.relu(z)
        for layer, std in expected.items():
            # Half the log-variance of the mean square, √(5/n) a layer; published to 2 digits (3 %).
            error = 5 * math.sqrt(layer * 5 / width / seeds) / 2 + 0.03
            mean = moments(torch.tensor(logs[layer], dtype=torch.float64), 0).mean.item()
            assert mean == pytest.approx(math.log(std), abs=error)

    @pytest.mark.parametrize("make", [lambda: nn.Linear(256, 256), lambda: nn.Conv2d(32, 24, 3)])
    def test_a_third_not_two(self, make: Callable[[], nn.Module]) -> None:
        """C90: weight var·fan_in is 1/3 where He's is 2."""
        layer = make()
        fan_in = layer.weight[0].numel()
        n = layer.weight.numel()
        got = moments(layer.weight.detach(), None).var().item() * fan_in
        assert got == pytest.approx(1 / 3, rel=5 * math.sqrt(0.8 / n))
        law = SCHEMES["torch_default"].law(tuple(layer.weight.shape))
        assert law.var * fan_in == pytest.approx(1 / 3)
        he = he_normal_(torch.empty_like(layer.weight), generator=torch.Generator().manual_seed(0))
        assert moments(he, None).var().item() * fan_in == pytest.approx(2, rel=5 * math.sqrt(2 / n))

    @pytest.mark.parametrize("width", [256, 100])
    def test_deep_relu_stacks_forget_their_input(self, width: int) -> None:
        """C90: 20 default layers give every input the same output; He's keep the mean square within 2."""
        ratios: dict[str, list[float]] = {"default": [], "he": []}
        for seed in range(5):
            for kind, logs in ratios.items():
                torch.manual_seed(seed)
                h = torch.randn(512, width)
                before = mean_square(h)
                for _ in range(20):
                    layer = nn.Linear(width, width)
                    if kind == "he":
                        he_normal_(layer.weight)
                        nn.init.zeros_(layer.bias)
                    h = torch.relu(layer(h)).detach()
                logs.append(math.log(mean_square(h) / before))
                spread = (moments(h, 0).std().mean() / math.sqrt(mean_square(h))).item()
                # (1/6)^(20/2) = 1.6e-8 of the input's part over a floor the biases set.
                assert spread < 1e-5 if kind == "default" else spread > 0.05
        mean = {k: moments(torch.tensor(v, dtype=torch.float64), 0).mean.item() for k, v in ratios.items()}
        # What is left is the biases': q = (q + 1/n... )/6 settles at Var(b)/(1 − 1/6)/2 = 1/(5·fan_in).
        assert mean["default"] == pytest.approx(
            math.log(1 / (5 * width)), abs=5 * math.sqrt(5 / width / 5) + 0.05
        )
        s2 = 20 * math.log1p(5 / width)
        assert abs(mean["he"] + s2 / 2) < 5 * math.sqrt(s2 / 5)

    def test_one_layer_keeps_a_sixth(self) -> None:
        """C90: the factor per layer, 1/3 of the weights times 1/2 of the ReLU."""
        rates = [geometric_rate(trace(torch_default_, F.relu, 256, s)) for s in range(5)]
        s2 = math.log1p(5 / 256)
        mean = moments(torch.tensor(rates, dtype=torch.float64), 0).mean.item()
        error = 5 * math.sqrt(s2 / ((DEPTH - 1) * 5))
        assert mean == pytest.approx(math.log(1 / 6) - s2 / 2, abs=error)


def test_fixed_scales_fade_or_explode_with_the_width() -> None:
    """N(0, 0.01²) multiplies the mean square by fan_in/10⁴·1/2; U[0, 1] explodes through its mean."""
    rates = [geometric_rate(trace(normal_hundredth_, F.relu, 200, s)) for s in range(5)]
    s2 = math.log1p(5 / 200)
    mean = moments(torch.tensor(rates, dtype=torch.float64), 0).mean.item()
    error = 5 * math.sqrt(s2 / ((DEPTH - 1) * 5))
    assert mean == pytest.approx(math.log(200 * 1e-4 / 2) - s2 / 2, abs=error)
    # With a common mean of 1/2 the layer's gain is that mean, squared: (fan_in/2)².
    assert geometric_rate(trace(uniform_, F.relu, 200, 0)) == pytest.approx(2 * math.log(100), abs=0.05)
