"""Nets that are sick, and how: the doctor has to find at least these codes."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from nets import Build, classify, normal, stack
from torch import Tensor, nn

from musigma.doctor import Case


def all_zero() -> Case:
    """longjon/caffe#3: the loss stays at ln 21."""
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 21))
    for p in net.parameters():
        nn.init.zeros_(p)
    return Case(net, normal(210, 8), torch.arange(210) % 21, loss=nn.CrossEntropyLoss())


def default_deep() -> Case:
    """pytorch#15314: twenty ReLU layers with torch's default."""
    return Case(stack(20, 128), normal(64, 128))


def xavier_relu_deep() -> Case:
    net = stack(30, 128, bias=False)
    for m in net[::2]:
        nn.init.xavier_normal_(m.weight)
    return Case(net, normal(128, 128))


def tiny_weights() -> Case:
    net = nn.Sequential(
        nn.Linear(64, 128),
        nn.ReLU(),
        nn.Linear(128, 64),
        nn.ReLU(),
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )
    for m in net[::2]:
        nn.init.normal_(m.weight, std=0.01)
        nn.init.zeros_(m.bias)
    return classify(net, normal(128, 64))


def huge_weights() -> Case:
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
    for m in net[::2]:
        nn.init.normal_(m.weight)
    return classify(net, normal(128, 64))


def uniform_positive() -> Case:
    """Weights uniform between 0 and 1: all of one sign."""
    net = stack(5, 64)
    for m in net[::2]:
        nn.init.uniform_(m.weight)
    return classify(nn.Sequential(net, nn.Linear(64, 10)), normal(128, 64))


def sigmoid_deep() -> Case:
    return classify(nn.Sequential(stack(10, 64, nn.Sigmoid), nn.Linear(64, 10)), normal(128, 64))


def constant_weights() -> Case:
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    nn.init.constant_(net[0].weight, 0.2)
    nn.init.constant_(net[2].weight, 0.3)
    return classify(net, normal(64, 8), 3)


def cloned_branches() -> Case:
    class Twins(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(8, 16), nn.Linear(8, 16)
            self.right.load_state_dict(self.left.state_dict())
            self.head = nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(F.relu(self.left(x)) + F.relu(self.right(x)))

    return classify(Twins(), normal(64, 8), 3)


def raw_inputs() -> Case:
    scale = torch.tensor([1.0, 100.0, 0.01, 5.0])
    return classify(
        nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3)), normal(128, 4) * scale + 3 * scale, 3
    )


def raw_images() -> Case:
    x = torch.randint(256, (32, 1, 12, 12), generator=torch.Generator().manual_seed(0)).float()
    return classify(nn.Sequential(nn.Flatten(), nn.Linear(144, 32), nn.ReLU(), nn.Linear(32, 10)), x)


def nan_input() -> Case:
    x = normal(64, 8)
    x[5, 3] = math.nan
    return classify(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)), x, 3)


def constant_columns() -> Case:
    x = normal(64, 8)
    x[:, 3] = 1e6
    return classify(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)), x, 3)


def dead_layer() -> Case:
    net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(inplace=True), nn.Linear(64, 3))
    nn.init.constant_(net[0].bias, -4.0)
    return classify(net, normal(64, 8), 3)


def dead_regression() -> Case:
    """MVCNN-TensorFlow#14: a ReLU after the last layer of a small regression net."""
    for seed in range(200):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 1), nn.ReLU())
        x = torch.rand(128, 5, generator=torch.Generator().manual_seed(seed))
        if not net(x).any():
            break
    return Case(net, x, x.sum(1, keepdim=True), loss=nn.MSELoss())


def dead_logits() -> Case:
    net = nn.Sequential(nn.Linear(5, 3), nn.ReLU())
    nn.init.constant_(net[0].bias, -5.0)
    x = torch.rand(6, 5, generator=torch.Generator().manual_seed(0))
    return Case(net, x, torch.zeros(6, dtype=torch.long), loss=nn.CrossEntropyLoss())


def confident_head() -> Case:
    net = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 27))
    nn.init.normal_(net[2].weight)
    return classify(net, normal(270, 16), 27)


def offset_targets() -> Case:
    net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    x = normal(128, 8)
    return Case(net, x, x[:, :1] + 100, loss=nn.MSELoss())


def overflow() -> Case:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.exp(100 * self.layer(x)))

    return classify(Net(), normal(64, 8), 3)


def infinite_slope() -> Case:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 4)
            nn.init.zeros_(self.layer.weight)
            nn.init.zeros_(self.layer.bias)
            self.head = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.layer(x)
            centered = h - h.mean(-1, keepdim=True)
            return self.head(centered / (centered.square().mean(-1, keepdim=True).sqrt() + 1e-5))

    return classify(Net(), normal(64, 8), 3)


def unused_parameter() -> Case:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.spare = nn.Linear(8, 3), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)

    return classify(Net(), normal(64, 8), 3)


SICK: dict[str, tuple[Build, frozenset[str]]] = {
    f.__name__: (f, frozenset(codes.split()))
    for f, codes in (
        (all_zero, "INI201 GRD504"),
        (default_deep, "INI202 INI207"),
        (xavier_relu_deep, "INI202 INI205 GRD501"),
        (tiny_weights, "INI202 INI205"),
        (huge_weights, "INI202 INI206 INI210"),
        (uniform_positive, "INI202 INI206 INI210"),
        (sigmoid_deep, "INI207 GRD501"),
        (constant_weights, "INI201"),
        (cloned_branches, "INI201"),
        (raw_inputs, "INP101"),
        (raw_images, "INP101 INP104"),
        (nan_input, "INP103"),
        (constant_columns, "INP102"),
        (dead_layer, "INI209"),
        (dead_regression, "GRD504 SIG405 SIG406"),
        (dead_logits, "GRD504 SIG405 SIG406"),
        (confident_head, "INI210"),
        (offset_targets, "INI210"),
        (overflow, "SIG401"),
        (infinite_slope, "GRD503"),
        (unused_parameter, "GRD504"),
    )
}
