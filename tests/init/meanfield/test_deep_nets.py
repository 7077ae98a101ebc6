"""Nets of ten thousand layers without norms or skips, and of a thousand without norms: they learn.

Without skips the readout is ten of the last layer's units, fixed: whatever is learned the deep part learns.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from musigma.init import delta_orthogonal_, initialize, orthogonal_
from musigma.init.meanfield import Critical, critical
from musigma.statistics import moments

pytestmark = pytest.mark.slow

Model = Callable[[Tensor], Tensor]


def dense(depth: int, point: Critical, generator: torch.Generator) -> nn.Sequential:
    """Tanh layers of width 64, as many as the digits have pixels."""
    layers: list[nn.Module] = []
    for _ in range(depth):
        layer = nn.Linear(64, 64)
        orthogonal_(layer.weight, gain=math.sqrt(point.weight_var), generator=generator)
        nn.init.normal_(layer.bias, 0.0, math.sqrt(point.bias_var), generator=generator)
        layers += [layer, nn.Tanh()]
    return nn.Sequential(*layers)


def convolutional(depth: int, point: Critical, generator: torch.Generator) -> nn.Sequential:
    """3 × 3 convolutions of 16 channels that wrap around: no position is at a border."""
    layers: list[nn.Module] = []
    for _ in range(depth):
        layer = nn.Conv2d(16, 16, 3, padding=1, padding_mode="circular")
        delta_orthogonal_(layer.weight, gain=math.sqrt(point.weight_var), generator=generator)
        assert layer.bias is not None
        nn.init.normal_(layer.bias, 0.0, math.sqrt(point.bias_var), generator=generator)
        layers += [layer, nn.Tanh()]
    return nn.Sequential(*layers)


def rms(x: Tensor) -> float:
    return math.sqrt(moments(x.detach().square(), None).mean.item())


def profile(model: nn.Sequential, x: Tensor) -> tuple[Tensor, Tensor]:
    """Of every pre-activation: its rms over the first one's, and its gradient's over the last one's."""
    values: list[Tensor] = []

    def keep(module: nn.Module, args: object, out: Tensor) -> None:
        out.retain_grad()
        values.append(out)

    hooks = [layer.register_forward_hook(keep) for layer in model[::2]]
    g = torch.Generator().manual_seed(7)
    out = model(x)
    out.backward(torch.randn(out.shape, generator=g))
    for hook in hooks:
        hook.remove()
    signal = torch.tensor([rms(v) for v in values])
    gradient = torch.tensor([rms(v.grad) for v in values if v.grad is not None])
    return signal / signal[0], gradient / gradient[-1]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [0, 1])
def test_ten_thousand_dense_layers_keep_norm_and_gradient_within_a_tenth(seed: int) -> None:
    depth, g = 10_000, torch.Generator().manual_seed(seed)
    point = critical("tanh", depth=depth)
    x = point.std * torch.randn(16, 64, generator=g)
    signal, gradient = profile(dense(depth, point, g), x)
    assert len(signal) == len(gradient) == depth
    assert 0.9 < signal.min().item() <= signal.max().item() < 1.1
    assert 0.9 < gradient.min().item() <= gradient.max().item() < 1.1


@pytest.mark.timeout(600)
def test_ten_thousand_convolutions_keep_norm_and_gradient_within_a_tenth() -> None:
    depth, g = 10_000, torch.Generator().manual_seed(0)
    point = critical("tanh", depth=depth)
    x = point.std * torch.randn(4, 16, 8, 8, generator=g)
    signal, gradient = profile(convolutional(depth, point, g), x)
    assert 0.9 < signal.min().item() <= signal.max().item() < 1.1
    assert 0.9 < gradient.min().item() <= gradient.max().item() < 1.1


@pytest.mark.timeout(1200)
def test_one_call_finds_that_point() -> None:
    """`initialize` reads the depth and the activation off the model as it ran."""
    depth, g = 10_000, torch.Generator().manual_seed(0)
    layers = [module for _ in range(depth) for module in (nn.Linear(64, 64), nn.Tanh())]
    model = nn.Sequential(*layers)
    x = torch.randn(16, 64, generator=g)
    plan = initialize(model, x, scheme="delta_orthogonal", verify=False)
    assert plan["0.weight"].scheme == "orthogonal"
    signal, gradient = profile(model[:-2], x)  # after the last layer no activation follows
    assert 0.9 < signal.min().item() <= signal.max().item() < 1.1
    assert 0.9 < gradient.min().item() <= gradient.max().item() < 1.1


def test_gaussian_weights_do_not() -> None:
    """What orthogonality is for: the same point, the same width, a thousand layers of independent weights."""
    depth, g = 1000, torch.Generator().manual_seed(0)
    point = critical("tanh", depth=10_000)
    model = dense(depth, point, g)
    for layer in model[::2]:
        nn.init.normal_(layer.weight, 0.0, math.sqrt(point.weight_var / 64), generator=g)
    _, gradient = profile(model, point.std * torch.randn(16, 64, generator=g))
    assert not 0.9 < gradient[0].item() < 1.1


class Digits:
    """The 8 × 8 digits, standardized over all pixels."""

    def __init__(self, std: float) -> None:
        data = pytest.importorskip("sklearn.datasets").load_digits()
        x = torch.tensor(data.data, dtype=torch.float32)
        seen = moments(x, None)
        self.std = std
        self.x = ((x - seen.mean) / seen.std() * std).to(torch.float32)
        self.y = torch.tensor(data.target)
        self.test = torch.arange(len(x)) % 6 == 0

    def batch(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        rows = torch.nonzero(~self.test).flatten()
        some = rows[torch.randint(len(rows), (size,), generator=generator)]
        return self.x[some], self.y[some]


def train(
    logits: Model, model: nn.Module, digits: Digits, *, steps: int, lr: float
) -> tuple[list[float], float]:
    """Losses by step and the accuracy on held-out digits."""
    g = torch.Generator().manual_seed(3)
    # What a weight does to a unit is as small as its input, about digits.std; what a bias does is not.
    slow = [p for p in model.parameters() if p.dim() == 1]
    fast = [p for p in model.parameters() if p.dim() != 1]
    groups = [{"params": fast, "lr": lr}, {"params": slow, "lr": lr * digits.std**2}]
    optimizer = torch.optim.SGD(groups, lr=lr, momentum=0.9)
    losses = []
    for _ in range(steps):
        x, y = digits.batch(64, g)
        loss = F.cross_entropy(logits(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        right = logits(digits.x[digits.test]).argmax(1) == digits.y[digits.test]
    return losses, moments(right.double(), None).mean.item()


def assert_learned(losses: list[float], accuracy: float) -> None:
    # Guessing costs ln 10 = 2.3 and is right once in ten.
    assert sum(losses[-5:]) / 5 < 1.0
    assert accuracy > 0.7


@pytest.mark.timeout(1800)
def test_ten_thousand_dense_layers_learn_digits() -> None:
    depth, g = 10_000, torch.Generator().manual_seed(1)
    point = critical("tanh", depth=depth)
    model = dense(depth, point, g)
    # Every layer turns the output by as much: the step has to shrink with their number.
    losses, accuracy = train(
        lambda x: model(x)[:, :10] / point.std, model, Digits(point.std), steps=40, lr=0.03 / depth
    )
    assert_learned(losses, accuracy)


@pytest.mark.timeout(1800)
def test_a_thousand_convolutions_learn_digits() -> None:
    """A thousand, not ten thousand: these take 64 times the work of a dense layer, an hour at that depth."""
    depth, g = 1000, torch.Generator().manual_seed(1)
    point = critical("tanh", depth=depth)
    model = convolutional(depth, point, g)
    # The digit in all channels by a fixed direction of length √16: unit variance stays.
    lift = F.normalize(torch.randn(16, generator=g), dim=0).view(1, 16, 1, 1) * 4

    def logits(x: Tensor) -> Tensor:
        maps = model(x.view(-1, 1, 8, 8) * lift)
        # Ten of the 1024 outputs would see one place each; a mean over places keeps all.
        return maps.flatten(1)[:, ::102][:, :10] / point.std

    losses, accuracy = train(logits, model, Digits(point.std), steps=60, lr=0.03 / depth)
    assert_learned(losses, accuracy)


class Block(nn.Module):
    """x + α·b(relu(a(relu(x)))), α learned or 1."""

    def __init__(self, width: int, scaled: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)
        self.scale = nn.Parameter(torch.ones(())) if scaled else None

    def forward(self, x: Tensor) -> Tensor:
        branch = self.b(F.relu(self.a(F.relu(x))))
        return x + (branch if self.scale is None else self.scale * branch)


def resnet(scaled: bool) -> nn.Sequential:
    """Five hundred blocks of two layers, no norm."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block(64, scaled) for _ in range(500)), nn.ReLU(), nn.Linear(64, 10))


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("recipe", "lr"), [("fixup", 0.01), ("skipinit", 0.003)])
def test_a_thousand_layers_without_norm_learn_digits(recipe: str, lr: float) -> None:
    model, digits = resnet(scaled=recipe == "skipinit"), Digits(1.0)
    initialize(model, digits.x[:16], scheme=recipe, verify=False)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    losses, accuracy = train(model, model, digits, steps=60, lr=lr)
    assert losses[0] < 2 * math.log(10)
    assert_learned(losses, accuracy)
    # Not the head alone: every branch has left 0.
    ends = [n for n in before if n.endswith("scale" if recipe == "skipinit" else "b.weight")]
    assert len(ends) == 500
    parameters = dict(model.named_parameters())
    assert all((parameters[name] != before[name]).any() for name in ends)


def test_the_same_net_by_default_starts_far_off() -> None:
    """Five hundred branches of torch's default add up: the loss starts tens of times above guessing."""
    digits = Digits(1.0)
    with torch.no_grad():
        loss = F.cross_entropy(resnet(scaled=False)(digits.x[:64]), digits.y[:64])
    assert not loss.item() < 10 * math.log(10)
