"""Small models that the graph tests share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Calls(nn.Module):
    """A linear layer, and then whatever a function does with the result; `up` is a second layer."""

    def __init__(self, then: Callable[[Any, Tensor], Any], **attributes: Any) -> None:
        super().__init__()
        self.then = then
        self.lin = nn.Linear(8, 8)
        self.up = nn.Linear(8, 8)
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Any:
        return self.then(self, self.lin(x))


def x(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape or (2, 4, 8), generator=torch.Generator().manual_seed(seed))


class BasicBlock(nn.Module):
    def __init__(self, channels: int, out: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.downsample = None
        if stride != 1 or channels != out:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out)
            )

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += identity
        return self.relu(out)


class PreActBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.bn1, self.bn2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(F.relu(self.bn2(self.conv1(F.relu(self.bn1(x))))))


def resnet() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        BasicBlock(4, 4),
        BasicBlock(4, 6, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 5),
    )


class UNet(nn.Module):
    """One level: the skip is concatenated, not added."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 4, 3, padding=1)
        self.bottom = nn.Conv2d(4, 4, 3, padding=1)
        self.up = nn.ConvTranspose2d(4, 4, 2, stride=2)
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = F.relu(self.down(x))
        deep = F.relu(self.bottom(F.max_pool2d(skip, 2)))
        return self.head(torch.cat([skip, self.up(deep)], 1))


class GPTBlock(nn.Module):
    """GPT-2's block: packed qkv through `chunk`, a mask buffer, the tanh GELU written out."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.c_fc, self.c_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.register_buffer("mask", torch.tril(torch.ones(16, 16)).bool())

    def forward(self, x: Tensor) -> Tensor:
        b, t, w = x.shape
        q, k, v = (
            part.view(b, t, self.heads, w // self.heads).transpose(1, 2)
            for part in self.c_attn(self.ln_1(x)).split(w, dim=2)
        )
        scores = (q @ k.transpose(-2, -1)) * (1.0 / (w // self.heads) ** 0.5)
        scores = scores.masked_fill(~self.mask[:t, :t], float("-inf")).softmax(-1)
        x = x + self.c_proj((scores @ v).transpose(1, 2).reshape(b, t, w))
        h = self.c_fc(self.ln_2(x))
        h = 0.5 * h * (1.0 + torch.tanh(0.7978845608 * (h + 0.044715 * torch.pow(h, 3.0))))
        return x + self.c_out(h)


class GPT(nn.Module):
    """Embeddings, blocks, a final norm and an output head tied to the token embedding."""

    def __init__(self, layers: int = 2, width: int = 8, heads: int = 2, vocabulary: int = 11) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(16, width)
        self.h = nn.ModuleList(GPTBlock(width, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


class HandRMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        h = x.to(torch.float32)
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * h.to(x.dtype)


class LlamaBlock(nn.Module):
    """Llama's block: hand-written RMSNorm, rotary positions, SwiGLU, no biases."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.input_norm, self.post_norm = HandRMSNorm(width), HandRMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        left, right = x.chunk(2, -1)
        return (x * cos) + (torch.cat((-right, left), -1) * sin)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        residual, h = x, self.input_norm(x)
        b, t, w = h.shape
        q, k, v = (p(h).view(b, t, self.heads, -1).transpose(1, 2) for p in (self.q, self.k, self.v))
        h = F.scaled_dot_product_attention(
            self.rotate(q, cos, sin), self.rotate(k, cos, sin), v, is_causal=True
        )
        x = residual + self.o(h.transpose(1, 2).contiguous().view(b, t, w))
        return x + self.down(F.silu(self.gate(h := self.post_norm(x))) * self.up(h))


class Llama(nn.Module):
    def __init__(self, layers: int = 2, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.layers = nn.ModuleList(LlamaBlock(width, heads) for _ in range(layers))
        self.norm = HandRMSNorm(width)
        self.head = nn.Linear(width, 11, bias=False)
        self.register_buffer(
            "frequencies", 1.0 / 10000 ** (torch.arange(0, width // heads, 2) / (width // heads))
        )

    def forward(self, ids: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(ids.shape[1]).float(), self.frequencies)
        angles = torch.cat((angles, angles), -1)
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, angles.cos(), angles.sin())
        return self.head(self.norm(x))


def tokens(batch: int = 2, length: int = 5) -> Tensor:
    return torch.randint(0, 11, (batch, length), generator=torch.Generator().manual_seed(0))
