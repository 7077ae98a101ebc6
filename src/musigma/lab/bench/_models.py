"""Whole models, built twice: with torch.nn's norms, and with musigma's where a user would write them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from musigma import functional
from musigma import nn as mnn
from musigma.lab.bench._calls import Library


class BasicBlock(nn.Module):
    """ResNet-18's: two convolutions, the second's norm followed by the sum and the activation."""

    def __init__(self, library: Library, c_in: int, c_out: int, stride: int) -> None:
        super().__init__()
        norm = mnn.BatchNorm2d if library == "ours" else nn.BatchNorm2d
        self.fused = library == "ours"
        self.conv1 = nn.Conv2d(c_in, c_out, 3, stride, 1, bias=False)
        self.norm1 = norm(c_out)
        self.conv2 = nn.Conv2d(c_out, c_out, 3, 1, 1, bias=False)
        self.norm2 = norm(c_out)
        self.skip: nn.Module = nn.Identity()
        if stride != 1 or c_in != c_out:
            self.skip = nn.Sequential(nn.Conv2d(c_in, c_out, 1, stride, bias=False), norm(c_out))

    def forward(self, x: Tensor) -> Tensor:
        """relu(norm(conv(relu(norm(conv(x))))) + skip(x))."""
        if self.fused:
            y = self.norm1(self.conv1(x), activation="relu")
            return self.norm2(self.conv2(y), add=self.skip(x), activation="relu")
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        y = self.norm2(self.conv2(y))
        y += self.skip(x)
        return F.relu(y, inplace=True)


class Cnn(nn.Module):
    """ResNet-18's eight blocks on small images, half as wide."""

    def __init__(self, library: Library, classes: int = 10) -> None:
        super().__init__()
        self.fused = library == "ours"
        self.stem = nn.Conv2d(3, 32, 3, 1, 1, bias=False)
        self.norm = (mnn.BatchNorm2d if self.fused else nn.BatchNorm2d)(32)
        widths = [(32, 32, 1), (32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2), (128, 128, 1)]
        widths += [(128, 256, 2), (256, 256, 1)]
        self.blocks = nn.Sequential(*(BasicBlock(library, *width) for width in widths))
        self.head = nn.Linear(256, classes)

    def forward(self, x: Tensor) -> Tensor:
        """(n, 3, h, w) to (n, classes)."""
        x = self.stem(x)
        x = self.norm(x, activation="relu") if self.fused else F.relu(self.norm(x), inplace=True)
        return self.head(self.blocks(x).mean((2, 3)))


class Attention(nn.Module):
    """Self-attention on torch's fused kernel."""

    def __init__(self, width: int, heads: int, *, causal: bool, bias: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """(n, length, width) to the same."""
        n, length, width = x.shape
        q, k, v = self.qkv(x).view(n, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).reshape(n, length, width))


class Mlp(nn.Sequential):
    """ViT's two layers."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class SwiGlu(nn.Module):
    """Llama's gated layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(width, 2 * (8 * width // 3), bias=False)
        self.down = nn.Linear(8 * width // 3, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(…, width) to the same."""
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Transformer(nn.Module):
    """Pre-norm blocks: x + attention(norm(x)), x + feed_forward(norm(x)), and a last norm.

    With musigma the sum and the norm that follows it are one call.
    """

    def __init__(
        self, library: Library, kind: Literal["vit", "llama"], width: int, heads: int, depth: int
    ) -> None:
        super().__init__()
        self.rms, self.fused = kind == "llama", library == "ours"
        layers = mnn if self.fused else nn
        norm: Callable[[], nn.Module] = (
            (lambda: layers.RMSNorm(width, eps=1e-6))
            if self.rms
            else (lambda: layers.LayerNorm(width, eps=1e-6))
        )
        self.sublayers = nn.ModuleList()
        for _ in range(depth):
            self.sublayers.append(Attention(width, heads, causal=self.rms, bias=not self.rms))
            self.sublayers.append(SwiGlu(width) if self.rms else Mlp(width))
        self.norms = nn.ModuleList(norm() for _ in range(2 * depth + 1))

    def forward(self, x: Tensor) -> Tensor:
        """(n, length, width) to the same."""
        if not self.fused:
            for norm, sublayer in zip(self.norms, self.sublayers, strict=False):
                x = x + sublayer(norm(x))
            return self.norms[-1](x)
        y = self.norms[0](x)
        for sublayer, norm in zip(self.sublayers, list(self.norms)[1:], strict=True):
            y, x = self._add_norm(norm, sublayer(y), x)
        return y

    def _add_norm(self, norm: nn.Module, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        if isinstance(norm, mnn.RMSNorm):
            return functional.add_rms_norm(x, residual, norm.normalized_shape, norm.weight, norm.eps)
        assert isinstance(norm, mnn.LayerNorm)
        return functional.add_layer_norm(x, residual, norm.normalized_shape, norm.weight, norm.bias, norm.eps)


@dataclass(frozen=True)
class Model:
    """A model to train a step of.

    Args:
        name: what the tables call it.
        build: makes it with one library's norms.
        shape: of its input.
        dtype: of all of it.
        channels_last: whether its images' channels lie side by side.
    """

    name: str
    build: Callable[[Library], nn.Module]
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    channels_last: bool = False


MODELS = (
    Model("ResNet-18-like CNN, 16×3×32×32", Cnn, (16, 3, 32, 32)),
    Model("ResNet-18-like CNN, channels_last, 16×3×32×32", Cnn, (16, 3, 32, 32), channels_last=True),
    Model(
        "ViT-like, 4 blocks, 4×197×192", lambda library: Transformer(library, "vit", 192, 3, 4), (4, 197, 192)
    ),
    Model(
        "Llama-like, 4 blocks, 1×256×512",
        lambda library: Transformer(library, "llama", 512, 8, 4),
        (1, 256, 512),
    ),
    Model(
        "Llama-like, 4 blocks, 1×256×512, bfloat16",
        lambda library: Transformer(library, "llama", 512, 8, 4),
        (1, 256, 512),
        torch.bfloat16,
    ),
)
"""What `musigma bench` trains a step of."""


@dataclass(frozen=True)
class Trained:
    """A model, its input and its optimizer."""

    model: nn.Module
    x: Tensor
    optimizer: torch.optim.Optimizer

    def loss(self) -> Tensor:
        """A loss whose gradient is of order one."""
        y = self.model(self.x)
        return (y if y.dtype is torch.float64 else y.float()).square().mean()

    def step(self) -> None:
        """Forward, backward, and a step so small that the thousandth is like the first."""
        self.optimizer.zero_grad(set_to_none=True)
        self.loss().backward()
        self.optimizer.step()


def trained(model: Model, library: Library, seed: int = 0) -> Trained:
    """Build it; the same seed gives the same weights in both libraries."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = model.build(library).to(model.dtype)
        x = torch.randn(model.shape).to(model.dtype)
    if model.channels_last:
        # mypy knows this overload of a module's `to` as little as torch's stubs do
        net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        x = x.to(memory_format=torch.channels_last)
    return Trained(net, x, torch.optim.SGD(net.parameters(), lr=1e-6))
