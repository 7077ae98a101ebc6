"""Nets that are healthy, nets that are sick and how: the doctor is held to both lists."""

from __future__ import annotations

import math
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


def stack(depth: int, width: int, activation: Callable[[], nn.Module] = nn.ReLU, *, bias: bool = True) -> nn.Sequential:
    return nn.Sequential(*(m for _ in range(depth) for m in (nn.Linear(width, width, bias=bias), activation())))


def classify(net: nn.Module, x: Tensor, classes: int = 10) -> Case:
    return Case(net, x, labels(len(x), classes), loss=nn.CrossEntropyLoss(), intent="train")


def he_mlp() -> Case:
    net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    return classify(he(net), normal(128, 32))


def he_deep_mlp() -> Case:
    return classify(he(nn.Sequential(stack(50, 128), nn.Linear(128, 10))), normal(64, 128))


def he_cnn() -> Case:
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(32, 10),
    )  # fmt: skip
    return classify(he(net), normal(32, 3, 16, 16))


def default_mlp() -> Case:
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 50), nn.ReLU(), nn.Linear(50, 10))
    return classify(net, normal(100, 8, 8))


def default_batchnorm_mlp() -> Case:
    net = nn.Sequential(
        nn.Linear(20, 64, bias=False), nn.BatchNorm1d(64), nn.ReLU(),
        nn.Linear(64, 64, bias=False), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 5),
    )  # fmt: skip
    return classify(net, normal(128, 20), 5)


def lenet() -> Case:
    net = nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(inplace=True),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * 16, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip
    return classify(net, normal(32, 1, 24, 24)[..., :24, :24])


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


def resnet() -> Case:
    stages = [Block(8, 8, 1), Block(8, 8, 1), Block(8, 16, 2), Block(16, 16, 1), Block(16, 32, 2), Block(32, 32, 1)]
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True), *stages,
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip
    for m in net.modules():
        if isinstance(m, nn.Conv2d):
            nn.init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu")
    return classify(net, normal(32, 3, 16, 16))


class FixupBlock(nn.Module):
    def __init__(self, channels: int, blocks: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.before1, self.after1, self.before2, self.after2 = (nn.Parameter(torch.zeros(1)) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(1))
        nn.init.kaiming_normal_(self.conv1.weight, nonlinearity="relu")
        self.conv1.weight.data.mul_(blocks**-0.5)
        nn.init.zeros_(self.conv2.weight)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.conv1(x + self.before1) + self.after1)
        return F.relu(self.conv2(y + self.before2) * self.scale + self.after2 + x)


def fixup() -> Case:
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.ReLU(), *(FixupBlock(8, 4) for _ in range(4)),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10),
    )  # fmt: skip
    nn.init.kaiming_normal_(net[0].weight, nonlinearity="relu")
    nn.init.zeros_(net[-1].weight)
    nn.init.zeros_(net[-1].bias)
    return classify(net, normal(32, 3, 16, 16))


class ReZeroBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.alpha = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.alpha * self.second(F.gelu(self.first(x)))


def rezero() -> Case:
    net = nn.Sequential(nn.Linear(16, 32), *(ReZeroBlock(32) for _ in range(12)), nn.Linear(32, 10))
    return classify(net, normal(64, 16))


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


def lora() -> Case:
    net = nn.Sequential(Lora(16, 64), nn.ReLU(), Lora(64, 64), nn.ReLU(), nn.Linear(64, 10))
    return classify(net, normal(64, 16))


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


def adaln_zero() -> Case:
    return Case(Diffuser(), (normal(64, 8), normal(64, 4, seed=1)), normal(64, 8, seed=2), loss=nn.MSELoss(), intent="train")


class GPT(nn.Module):
    """A small pre-norm decoder, initialized as GPT-2 is, with tied embeddings."""

    def __init__(self, vocabulary: int = 50, width: int = 32, depth: int = 4, length: int = 16) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({
                "ln1": nn.LayerNorm(width), "qkv": nn.Linear(width, 3 * width), "proj": nn.Linear(width, width),
                "ln2": nn.LayerNorm(width), "up": nn.Linear(width, 4 * width), "down": nn.Linear(4 * width, width),
            })
            for _ in range(depth)
        )  # fmt: skip
        self.ln = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.token.weight
        for name, p in self.named_parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02 / ((2 * depth) ** 0.5 if name.endswith(("proj.weight", "down.weight")) else 1))
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token(ids) + self.position(torch.arange(ids.shape[1]))
        for block in self.blocks:
            q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in block["qkv"](block["ln1"](x)).chunk(3, dim=-1))
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + block["proj"](mixed.transpose(1, 2).flatten(2))
            x = x + block["down"](F.gelu(block["up"](block["ln2"](x))))
        return self.head(self.ln(x))


def gpt() -> Case:
    ids = torch.randint(50, (16, 17), generator=torch.Generator().manual_seed(0))
    return Case(
        GPT(), ids[:, :-1], ids[:, 1:], intent="train",
        loss=lambda logits, wanted: F.cross_entropy(logits.flatten(0, 1), wanted.flatten()),
    )  # fmt: skip


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


def torch_encoder() -> Case:
    return classify(Encoder(norm_first=False), normal(32, 12, 16))


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 32, 4, stride=4)
        self.cls = nn.Parameter(torch.zeros(1, 1, 32))
        self.position = nn.Parameter(torch.zeros(1, 17, 32))
        layers = [nn.TransformerEncoderLayer(32, 4, 64, activation="gelu", batch_first=True, norm_first=True) for _ in range(3)]
        self.blocks = nn.Sequential(*layers)
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 10)
        nn.init.trunc_normal_(self.position, std=0.02)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], dim=1) + self.position
        return self.head(self.norm(self.blocks(x))[:, 0])


def vit() -> Case:
    return classify(ViT(), normal(32, 3, 16, 16))


class LSTMTagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 16)
        self.lstm = nn.LSTM(16, 32, num_layers=2, batch_first=True)
        self.head = nn.Linear(32, 5)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(ids))[0][:, -1])


def lstm() -> Case:
    ids = torch.randint(40, (32, 10), generator=torch.Generator().manual_seed(0))
    return Case(LSTMTagger(), ids, labels(32, 5), loss=nn.CrossEntropyLoss(), intent="train")


def autoencoder() -> Case:
    net = nn.Sequential(
        nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8), nn.ReLU(), nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 64), nn.Sigmoid()
    )
    x = torch.rand(64, 64, generator=torch.Generator().manual_seed(0))
    return Case(net, x, x, loss=nn.MSELoss(), intent="train")


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


def unet() -> Case:
    x = normal(16, 1, 16, 16)
    return Case(UNet(), x, (x > 0).float(), loss=nn.BCEWithLogitsLoss(), intent="train")


def regression() -> Case:
    net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    x = normal(128, 8)
    return Case(net, x, x[:, :1] - x[:, 1:2], loss=nn.MSELoss(), optimizer=torch.optim.Adam(net.parameters()), intent="train")


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
    return classify(nn.Sequential(nn.Conv2d(3, 16, 2, 2), nn.GELU(), nn.BatchNorm2d(16), *blocks, *head), normal(32, 3, 16, 16))


def he_conv_stack() -> Case:
    """Forty He-initialized convolutions without normalization train well."""
    layers = [m for _ in range(39) for m in (nn.Conv2d(16, 16, 3, padding=1, padding_mode="circular"), nn.ReLU())]
    first = nn.Conv2d(3, 16, 3, padding=1, padding_mode="circular")
    net = nn.Sequential(first, nn.ReLU(), *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    return classify(he(net), normal(8, 3, 8, 8))


HEALTHY: dict[str, Build] = {
    f.__name__: f
    for f in (
        he_mlp, he_deep_mlp, he_cnn, default_mlp, default_batchnorm_mlp, lenet, tanh_mlp, selu_mlp, resnet, fixup,
        rezero, lora, adaln_zero, gpt, torch_encoder, vit, lstm, autoencoder, unet, regression, zero_head, linear_probe,
        batchnorm_first, trained_mlp, convmixer, he_conv_stack,
    )
}  # fmt: skip

# Warnings that a healthy net of the list may get, and why.
DOCUMENTED: dict[str, frozenset[str]] = {}


def all_zero() -> Case:
    """longjon/caffe#3: the loss stays at ln 21."""
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 21))
    for p in net.parameters():
        nn.init.zeros_(p)
    return Case(net, normal(210, 8), torch.arange(210) % 21, loss=nn.CrossEntropyLoss())


def default_deep() -> Case:
    """pytorch#15314: twenty ReLU layers with torch's default."""
    return Case(stack(20, 256), normal(512, 256))


def xavier_relu_deep() -> Case:
    net = stack(30, 128, bias=False)
    for m in net[::2]:
        nn.init.xavier_normal_(m.weight)
    return Case(net, normal(128, 128))


def tiny_weights() -> Case:
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
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
    return classify(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3)), normal(128, 4) * scale + 3 * scale, 3)


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
