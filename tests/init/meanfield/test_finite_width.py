"""Random nets against theory: what chance does at a finite width, and that critical points hold up to it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from musigma.init import Activation
from musigma.init.meanfield import Critical, critical, width_interval
from musigma.init.meanfield._activations import ACTIVATIONS, resolve
from musigma.statistics import moments

# Those that can be critical; the others' gradients are told to change.
CRITICAL = sorted(
    set(ACTIVATIONS)
    - {
        "threshold",
        "sigmoid",
        "hardsigmoid",
        "softplus",
        "logsigmoid",
        "hardshrink",
        "tanhshrink",
        "relu_squared",
    }
)


def mean_square(x: Tensor, dim: tuple[int, ...] | None = None) -> Tensor:
    return moments(x.detach().square(), dim).mean


def log_sd(logs: Tensor) -> float:
    return moments(logs, 0).std(1).item()


class Net(NamedTuple):
    """Standard deviations of all pre-activations, gradient's mean square first over last, correlation."""

    stds: list[float]
    gradient: float
    correlation: float


def run(
    phi: Callable[[Tensor], Tensor], point: Critical, *, depth: int, width: int, batch: int, seed: int
) -> Net:
    g = torch.Generator().manual_seed(seed)
    z = (point.std * torch.randn(batch, width, generator=g)).requires_grad_()
    seen = [z]
    for _ in range(depth - 1):
        w = torch.randn(width, width, generator=g) * math.sqrt(point.weight_var / width)
        b = torch.randn(width, generator=g) * math.sqrt(point.bias_var)
        z = phi(z) @ w.T + b
        z.retain_grad()
        seen.append(z)
    z.backward(torch.randn(z.shape, generator=g))
    grads = [mean_square(s.grad).item() for s in (seen[0], seen[-1]) if s.grad is not None]
    rows = nn.functional.normalize(z.detach(), dim=1) @ nn.functional.normalize(z.detach(), dim=1).T
    pairs = rows[~torch.eye(batch, dtype=torch.bool)]
    return Net(
        [math.sqrt(mean_square(s).item()) for s in seen],
        grads[0] / grads[1],
        moments(pairs, None).mean.item(),
    )


def holds(activation: Activation, phi: Callable[[Tensor], Tensor]) -> None:
    """50 layers of width 512, three seeds: every layer's std within its interval, gradients flat."""
    depth, width, batch = 50, 512, 32
    point = critical(activation, depth=depth)
    assert point.reachable
    assert point.stable
    nets = [run(phi, point, depth=depth, width=width, batch=batch, seed=s) for s in range(3)]
    for layer in range(depth):
        # 150 layers of an activation: one in a hundred such tests may miss.
        near = width_interval(
            activation,
            width=width,
            depth=layer + 1,
            samples=batch,
            std=point.std,
            coverage=1 - 1e-4,
            weight_var=point.weight_var,
            bias_var=point.bias_var,
        )
        for net in nets:
            assert near.std[0] <= net.stds[layer] <= near.std[1]
    flat = math.exp(sum(math.log(net.gradient) for net in nets) / 3)
    assert 1 / 4 < flat < 4
    # Inputs stay apart: none of these nets makes a constant of them.
    assert max(net.correlation for net in nets) < 0.995


@pytest.mark.parametrize("name", ["relu", "gelu", "tanh"])
def test_fifty_layers_keep_signal_and_gradient(name: str) -> None:
    holds(name, ACTIVATIONS[name])


def test_fifty_layers_of_a_users_own_activation() -> None:
    def own(z: Tensor) -> Tensor:
        return torch.tanh(z) + 0.3 * torch.relu(z)

    holds(own, own)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(CRITICAL) - {"relu", "gelu", "tanh"}))
def test_fifty_layers_of_every_activation(name: str) -> None:
    holds(name, ACTIVATIONS[name])


def test_a_second_moment_gain_alone_lets_gelu_stray() -> None:
    """What `critical` is for: 1/E[φ²] keeps q = 1 on paper, with slope 1.144; chance drives nets off it."""
    point = Critical(1.0, 2.3517, 0.0, 1.072, 1.144, stable=False, reachable=False)
    nets = [run(ACTIVATIONS["gelu"], point, depth=50, width=512, batch=8, seed=s) for s in range(3)]
    assert max(abs(math.log(net.stds[-1])) for net in nets) > math.log(5)


class Cloud(NamedTuple):
    """Logs of many nets: the last layer's mean square over the target, and the gradient's ratio."""

    signal: Tensor
    gradient: Tensor


def cloud(activation: Activation, std: float, *, depth: int, width: int, samples: int, nets: int) -> Cloud:
    phi, point = resolve(activation)[0], critical(activation, std=std)
    assert point.reachable
    if isinstance(activation, str):
        phi = ACTIVATIONS[activation]  # the resolved one records no gradient
    g = torch.Generator().manual_seed(0)
    first = (std * torch.randn(nets, width, samples, generator=g)).requires_grad_()
    z: Tensor = first
    for _ in range(depth - 1):
        w = torch.randn(nets, width, width, generator=g) * math.sqrt(point.weight_var / width)
        b = torch.randn(nets, width, 1, generator=g) * math.sqrt(point.bias_var)
        z = w @ phi(z) + b
    # Gradients that point alike, which the interval supposes.
    d = torch.randn(nets, width, 1, generator=g).expand_as(z)
    (grad,) = torch.autograd.grad(z, first, d)
    signal = mean_square(z, (1, 2)).log() - 2 * math.log(std)
    return Cloud(signal, mean_square(grad, (1, 2)).log() - mean_square(d, (1, 2)).log())


@pytest.mark.parametrize(
    ("activation", "std", "samples"),
    [
        ("relu", 1.0, 1),
        ("tanh", 0.354, 1),
        ("tanh", 0.354, 8),
        ("tanh", 1.0, 1),
        ("gelu", 2.83, 8),
        ("elu", 1.0, 1),
    ],
)
def test_nets_spread_as_one_layers_kurtosis_says(activation: str, std: float, samples: int) -> None:
    depth, width, nets = 12, 64, 240
    seen = cloud(activation, std, depth=depth, width=width, samples=samples, nets=nets)
    point = critical(activation, std=std)
    law = width_interval(
        activation,
        width=width,
        depth=depth,
        samples=samples,
        std=std,
        weight_var=point.weight_var,
        bias_var=point.bias_var,
        coverage=0.99,
    )
    # A sample of 240 knows a standard deviation to 1/√480 = 5 %; theory is of first order in depth/width,
    # which here is 0.2.
    assert log_sd(seen.signal) == pytest.approx(math.sqrt(law.log_var), rel=3 / math.sqrt(2 * nets) + 0.15)
    if samples == 1:
        assert log_sd(seen.gradient) == pytest.approx(
            math.sqrt(law.gradient_log_var), rel=3 / math.sqrt(2 * nets) + 0.15
        )
    realised = std * (seen.signal / 2).exp()
    inside = ((realised > law.std[0]) & (realised < law.std[1])).double()
    # 1 % lie outside: 2.4 of 240, by chance seldom more than 8, with heavier tails than a normal's more.
    assert moments(inside, None).mean.item() > 1 - 12 / nets
    ratio = seen.gradient.exp()
    inside = ((ratio > law.gradient[0]) & (ratio < law.gradient[1])).double()
    assert moments(inside, None).mean.item() > 1 - 12 / nets


@pytest.mark.parametrize(("activation", "std"), [("tanh", 0.354), ("elu", 0.354), ("relu", 1.0)])
def test_orthogonal_nets_spread_less(activation: str, std: float) -> None:
    """A norm passes an orthogonal matrix to the bit: what is left is φ's, and nothing of a linear net's."""
    depth, width, nets = 12, 64, 240
    phi, point = ACTIVATIONS[activation], critical(activation, std=std)
    g = torch.Generator().manual_seed(0)
    first = std * math.sqrt(width) * nn.functional.normalize(torch.randn(nets, width, 1, generator=g), dim=1)
    z = first.requires_grad_()
    for _ in range(depth - 1):
        q, r = torch.linalg.qr(torch.randn(nets, width, width, generator=g))
        w = q * r.diagonal(dim1=1, dim2=2).sign()[:, None] * math.sqrt(point.weight_var)
        z = w @ phi(z) + torch.randn(nets, width, 1, generator=g) * math.sqrt(point.bias_var)
    (grad,) = torch.autograd.grad(z, first, d := torch.randn(nets, width, 1, generator=g))
    law = width_interval(
        activation,
        width=width,
        depth=depth,
        std=std,
        weight_var=point.weight_var,
        bias_var=point.bias_var,
        orthogonal=True,
    )
    signal = mean_square(z, (1, 2)).log() - 2 * math.log(std)
    gradient = mean_square(grad, (1, 2)).log() - mean_square(d, (1, 2)).log()
    error = 3 / math.sqrt(2 * nets) + 0.15
    assert log_sd(signal) == pytest.approx(math.sqrt(law.log_var), rel=error)
    assert log_sd(gradient) == pytest.approx(math.sqrt(law.gradient_log_var), rel=error)
    middle = math.log(law.std[0] * law.std[1] / std**2)
    sampled = 3 * math.sqrt(law.log_var / nets)
    # Means move by terms of order depth/width of the variance itself, which here is a fifth of it.
    assert moments(signal, 0).mean.item() == pytest.approx(middle, abs=sampled + 0.2 * law.log_var)


def test_a_linear_orthogonal_net_leaves_nothing_to_chance() -> None:
    law = width_interval("linear", width=8, depth=1000, orthogonal=True)
    assert (law.log_var, law.gradient_log_var) == pytest.approx((0.0, 0.0), abs=1e-6)


def test_the_interval_is_narrow_enough_to_tell() -> None:
    """A single wrong layer of He's (gain 1 for √2) moves the std by √2: seen at width 512, 8 layers deep."""
    law = width_interval("relu", width=512, depth=8, samples=64)
    assert law.std[1] / law.target < math.sqrt(2)
    assert law.std[0] / law.target > 1 / math.sqrt(2)


def test_relu_accumulates_five_over_n_a_layer() -> None:
    """Hanin's moment: E‖x‖⁴/(E‖x‖²)² = (1 + 5/n) a layer; the last layer adds its own normals' 2/n."""
    n, depth = 100, 31
    law = width_interval("relu", width=n, depth=depth)
    assert law.log_var == pytest.approx((depth - 1) * math.log1p(5 / n) + math.log1p(2 / n), rel=1e-9)
    assert law.gradient_log_var == pytest.approx((depth - 1) * math.log1p(5 / n), rel=1e-9)
    # A log-normal whose mean is kept: the middle of the logs lies half the variance lower.
    assert math.log(law.std[0] * law.std[1] / law.target**2) == pytest.approx(-law.log_var / 2, rel=1e-9)


def test_widths_may_differ_and_the_narrow_layer_counts_most() -> None:
    same = width_interval("relu", width=[100] * 5, depth=5)
    assert same == width_interval("relu", width=100, depth=5)
    neck = width_interval("relu", width=[100, 100, 10, 100, 100], depth=5)
    expected = 3 * math.log1p(5 / 100) + math.log1p(5 / 10) + math.log1p(2 / 100)
    assert neck.log_var == pytest.approx(expected, rel=1e-9)


def test_weights_that_keep_nothing_move_the_target() -> None:
    law = width_interval("relu", width=10**9, depth=11, std=2.0, weight_var=1.0)
    assert law.target == pytest.approx(2.0 * 2**-5, rel=1e-6)
    assert law.gradient[0] == pytest.approx(2.0**-10, rel=1e-2)
    assert law.std[0] < law.target < law.std[1]


def test_more_samples_tell_more_where_inputs_stay_apart() -> None:
    one, many = (width_interval("tanh", width=256, depth=10, samples=s) for s in (1, 64))
    assert many.log_var < 0.5 * one.log_var
    alike = width_interval("tanh", width=256, depth=10, samples=64, correlation=1.0)
    assert alike.log_var == pytest.approx(one.log_var, rel=1e-6)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"width": 0, "depth": 3}, "at least 1 unit, got 0"),
        ({"width": 8, "depth": 0}, "at least 1 layer, got 0"),
        ({"width": [8, 8], "depth": 3}, "got 2 for 3 layers"),
        ({"width": 8, "depth": 3, "samples": 0}, "samples must be at least 1"),
        ({"width": 8, "depth": 3, "coverage": 1.0}, "coverage must lie between 0 and 1"),
        ({"width": 8, "depth": 3, "correlation": 2.0}, "correlation=2.0"),
        ({"width": 8, "depth": 3, "weight_var": 0.0}, "weight_var must be positive"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        width_interval("relu", **options)  # type: ignore[arg-type]
