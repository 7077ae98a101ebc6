"""Nets that are healthy: none of them may get an error, nor a warning that is not listed."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from nets import (
    GPT,
    Block,
    Build,
    Diffuser,
    Encoder,
    FixupBlock,
    Lora,
    LSTMTagger,
    ReZeroBlock,
    UNet,
    ViT,
    classify,
    he,
    labels,
    normal,
    stack,
)
from torch import Tensor, nn

from musigma.doctor import Case


def he_mlp() -> Case:
    net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    return classify(he(net), normal(128, 32))


def he_deep_mlp() -> Case:
    net = he(nn.Sequential(stack(50, 128), nn.Linear(128, 10)))
    nn.init.normal_(net[-1].weight, std=0.01)
    return classify(net, normal(64, 128))


def he_cnn() -> Case:
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(32, 10),
    )  # fmt: skip
    return classify(he(net), normal(32, 3, 16, 16))


def default_mlp() -> Case:
    net = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 50), nn.ReLU(), nn.Linear(50, 10)
    )
    return classify(net, normal(100, 8, 8))


def default_batchnorm_mlp() -> Case:
    net = nn.Sequential(
        nn.Linear(20, 64, bias=False), nn.BatchNorm1d(64), nn.ReLU(),
        nn.Linear(64, 64, bias=False), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 5),
    )  # fmt: skip
    return classify(net, normal(128, 20), 5)


def lenet() -> Case:
    net = nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(16 * 16, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip
    return classify(net, normal(32, 1, 24, 24))


def tanh_mlp() -> Case:
    net = nn.Sequential(stack(6, 64, nn.Tanh), nn.Linear(64, 10))
    for m in net.modules():
        if isinstance(m, nn.Linear):
            nn.init.xavier_normal_(m.weight)
            nn.init.zeros_(m.bias)
    return classify(net, normal(64, 64))


def selu_mlp() -> Case:
    net = nn.Sequential(stack(20, 64, nn.SELU), nn.Linear(64, 10))
    for m in net.modules():
        if isinstance(m, nn.Linear):
            nn.init.normal_(m.weight, std=m.in_features**-0.5)
            nn.init.zeros_(m.bias)
    return classify(net, normal(64, 64))


def resnet() -> Case:
    stages = [
        Block(8, 8, 1),
        Block(8, 8, 1),
        Block(8, 16, 2),
        Block(16, 16, 1),
        Block(16, 32, 2),
        Block(32, 32, 1),
    ]
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True), *stages,
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip
    for m in net.modules():
        if isinstance(m, nn.Conv2d):
            nn.init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu")
    return classify(net, normal(32, 3, 16, 16))


def fixup() -> Case:
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.ReLU(), *(FixupBlock(8, 4) for _ in range(4)),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10),
    )  # fmt: skip
    nn.init.kaiming_normal_(net[0].weight, nonlinearity="relu")
    nn.init.zeros_(net[-1].weight)
    nn.init.zeros_(net[-1].bias)
    return classify(net, normal(32, 3, 16, 16))


def rezero() -> Case:
    net = nn.Sequential(nn.Linear(16, 32), *(ReZeroBlock(32) for _ in range(12)), nn.Linear(32, 10))
    return classify(net, normal(64, 16))


def lora() -> Case:
    net = nn.Sequential(Lora(16, 64), nn.ReLU(), Lora(64, 64), nn.ReLU(), nn.Linear(64, 10))
    return classify(net, normal(64, 16))


def adaln_zero() -> Case:
    return Case(
        Diffuser(),
        (normal(64, 8), normal(64, 4, seed=1)),
        normal(64, 8, seed=2),
        loss=nn.MSELoss(),
        intent="train",
    )


def gpt() -> Case:
    ids = torch.randint(50, (16, 17), generator=torch.Generator().manual_seed(0))
    return Case(
        GPT(), ids[:, :-1], ids[:, 1:], intent="train",
        loss=lambda logits, wanted: F.cross_entropy(logits.flatten(0, 1), wanted.flatten()),
    )  # fmt: skip


def torch_encoder() -> Case:
    return classify(Encoder(norm_first=False), normal(32, 12, 16))


def vit() -> Case:
    return classify(ViT(), normal(32, 3, 16, 16))


def lstm() -> Case:
    ids = torch.randint(40, (32, 10), generator=torch.Generator().manual_seed(0))
    return Case(LSTMTagger(), ids, labels(32, 5), loss=nn.CrossEntropyLoss(), intent="train")


def autoencoder() -> Case:
    net = nn.Sequential(
        nn.Linear(64, 32),
        nn.ReLU(),
        nn.Linear(32, 8),
        nn.ReLU(),
        nn.Linear(8, 32),
        nn.ReLU(),
        nn.Linear(32, 64),
        nn.Sigmoid(),
    )
    x = torch.rand(64, 64, generator=torch.Generator().manual_seed(0))
    return Case(net, x, x, loss=nn.MSELoss(), intent="train")


def unet() -> Case:
    x = normal(16, 1, 16, 16)
    return Case(UNet(), x, (x > 0).float(), loss=nn.BCEWithLogitsLoss(), intent="train")


def regression() -> Case:
    net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    x = normal(128, 8)
    return Case(
        net,
        x,
        x[:, :1] - x[:, 1:2],
        loss=nn.MSELoss(),
        optimizer=torch.optim.Adam(net.parameters()),
        intent="train",
    )


def zero_head() -> Case:
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 21))
    nn.init.zeros_(net[2].weight)
    nn.init.zeros_(net[2].bias)
    return Case(net, normal(210, 8), torch.arange(210) % 21, loss=nn.CrossEntropyLoss())


def linear_probe() -> Case:
    net = nn.Sequential(stack(3, 32).requires_grad_(False), nn.Linear(32, 10))
    return classify(net, normal(64, 32))


def batchnorm_first() -> Case:
    """Raw inputs are fine where the first layer is a normalization."""
    net = nn.Sequential(nn.BatchNorm1d(10), nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 2))
    return classify(net, normal(256, 10) * 3 + 100, 2)


def trained_mlp() -> Case:
    net = he(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)))
    x = normal(256, 16)
    y = x[:, :4].argmax(1)
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(150):
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
    optimizer.zero_grad()
    return Case(net, x, y, loss=nn.CrossEntropyLoss())


def convmixer() -> Case:
    """Depthwise convolutions, whose units read different inputs."""

    class Residual(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return x + super().forward(x)

    blocks = [
        nn.Sequential(
            Residual(nn.Conv2d(16, 16, 5, groups=16, padding=2), nn.GELU(), nn.BatchNorm2d(16)),
            nn.Conv2d(16, 16, 1), nn.GELU(), nn.BatchNorm2d(16),
        )
        for _ in range(3)
    ]  # fmt: skip
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)]
    return classify(
        nn.Sequential(nn.Conv2d(3, 16, 2, 2), nn.GELU(), nn.BatchNorm2d(16), *blocks, *head),
        normal(32, 3, 16, 16),
    )


def he_conv_stack() -> Case:
    """Forty He-initialized convolutions without normalization train well."""
    layers = [
        m for _ in range(39) for m in (nn.Conv2d(16, 16, 3, padding=1, padding_mode="circular"), nn.ReLU())
    ]
    first = nn.Conv2d(3, 16, 3, padding=1, padding_mode="circular")
    net = nn.Sequential(first, nn.ReLU(), *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    return classify(he(net), normal(8, 3, 8, 8))


HEALTHY: dict[str, Build] = {
    name: build
    for name, build in list(globals().items())
    if getattr(build, "__module__", None) == __name__ and not isinstance(build, type)
}

# Warnings that a healthy net of the list may get, and why.
DOCUMENTED: dict[str, frozenset[str]] = {}
