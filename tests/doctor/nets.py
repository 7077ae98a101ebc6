"""What the healthy and the sick nets are made of."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from musigma.doctor import Case

Build = Callable[[], Case]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def labels(count: int, classes: int) -> Tensor:
    return torch.randint(classes, (count,), generator=torch.Generator().manual_seed(7))


def he(net: nn.Module) -> nn.Module:
    for m in net.modules():
        if isinstance(m, nn.Linear | nn.Conv2d):
            nn.init.kaiming_normal_(m.weight, nonlinearity="relu")
            if m.bias is not None:
                nn.init.zeros_(m.bias)
    return net


def stack(
    depth: int, width: int, activation: Callable[[], nn.Module] = nn.ReLU, *, bias: bool = True
) -> nn.Sequential:
    return nn.Sequential(
        *(m for _ in range(depth) for m in (nn.Linear(width, width, bias=bias), activation()))
    )


def classify(net: nn.Module, x: Tensor, classes: int = 10) -> Case:
    return Case(net, x, labels(len(x), classes), loss=nn.CrossEntropyLoss(), intent="train")


class Block(nn.Module):
    """A ResNet block whose last normalization starts at 0."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        nn.init.zeros_(self.bn2.weight)
        same = stride == 1 and inside == outside
        down = [nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside)]
        self.skip = nn.Identity() if same else nn.Sequential(*down)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        return F.relu(self.bn2(self.conv2(y)) + self.skip(x))


class FixupBlock(nn.Module):
    def __init__(self, channels: int, blocks: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.before1, self.after1, self.before2, self.after2 = (
            nn.Parameter(torch.zeros(1)) for _ in range(4)
        )
        self.scale = nn.Parameter(torch.ones(1))
        nn.init.kaiming_normal_(self.conv1.weight, nonlinearity="relu")
        self.conv1.weight.data.mul_(blocks**-0.5)
        nn.init.zeros_(self.conv2.weight)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.conv1(x + self.before1) + self.after1)
        return F.relu(self.conv2(y + self.before2) * self.scale + self.after2 + x)


class ReZeroBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.alpha = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.alpha * self.second(F.gelu(self.first(x)))


class Lora(nn.Module):
    """A frozen layer with a low-rank correction whose second factor starts at 0."""

    def __init__(self, inside: int, outside: int, rank: int = 4) -> None:
        super().__init__()
        self.base = nn.Linear(inside, outside)
        self.base.requires_grad_(False)
        self.down = nn.Linear(inside, rank, bias=False)
        self.up = nn.Linear(rank, outside, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class AdaLNZero(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.modulation = nn.Linear(width, 3 * width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift, scale, gate = self.modulation(F.silu(condition)).chunk(3, dim=-1)
        return x + gate * self.mlp(self.norm(x) * (1 + scale) + shift)


class Diffuser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.time = nn.Linear(8, 32), nn.Linear(4, 32)
        self.blocks = nn.ModuleList(AdaLNZero(32) for _ in range(3))
        self.head = nn.Linear(32, 8)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        h, c = self.embed(x), self.time(t)
        for block in self.blocks:
            h = block(h, c)
        return self.head(h)


class GPT(nn.Module):
    """A small pre-norm decoder, initialized as GPT-2 is, with tied embeddings."""

    def __init__(self, vocabulary: int = 50, width: int = 32, depth: int = 4, length: int = 16) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({
                "ln1": nn.LayerNorm(width), "ln2": nn.LayerNorm(width),
                "qkv": nn.Linear(width, 3 * width), "proj": nn.Linear(width, width),
                "up": nn.Linear(width, 4 * width), "down": nn.Linear(4 * width, width),
            })
            for _ in range(depth)
        )  # fmt: skip
        self.ln = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.token.weight
        for name, p in self.named_parameters():
            if p.ndim == 2:
                nn.init.normal_(
                    p, std=0.02 / ((2 * depth) ** 0.5 if name.endswith(("proj.weight", "down.weight")) else 1)
                )
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token(ids) + self.position(torch.arange(ids.shape[1]))
        for block in self.blocks:
            q, k, v = (
                t.unflatten(-1, (4, -1)).transpose(1, 2)
                for t in block["qkv"](block["ln1"](x)).chunk(3, dim=-1)
            )
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + block["proj"](mixed.transpose(1, 2).flatten(2))
            x = x + block["down"](F.gelu(block["up"](block["ln2"](x))))
        return self.head(self.ln(x))


class Encoder(nn.Module):
    """torch's own encoder, with its cloned layers and its final norm."""

    def __init__(self, norm_first: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True, norm_first=norm_first)
        self.embed = nn.Linear(16, 32)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(x)).mean(1))


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 32, 4, stride=4)
        self.cls = nn.Parameter(torch.zeros(1, 1, 32))
        self.position = nn.Parameter(torch.zeros(1, 17, 32))
        layers = [
            nn.TransformerEncoderLayer(32, 4, 64, activation="gelu", batch_first=True, norm_first=True)
            for _ in range(3)
        ]
        self.blocks = nn.Sequential(*layers)
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 10)
        nn.init.trunc_normal_(self.position, std=0.02)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], dim=1) + self.position
        return self.head(self.norm(self.blocks(x))[:, 0])


class LSTMTagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 16)
        self.lstm = nn.LSTM(16, 32, num_layers=2, batch_first=True)
        self.head = nn.Linear(32, 5)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(ids))[0][:, -1])


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 16, 3, 2, 1)
        self.norm1, self.norm2 = nn.GroupNorm(2, 8), nn.GroupNorm(4, 16)
        self.up = nn.ConvTranspose2d(16, 8, 2, 2)
        self.out = nn.Conv2d(16, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = F.relu(self.norm1(self.down1(x)))
        b = F.relu(self.norm2(self.down2(a)))
        return self.out(torch.cat([a, self.up(b)], dim=1))
