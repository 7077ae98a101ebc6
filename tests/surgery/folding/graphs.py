"""Random models of convolutions, norms and whatever may stand between them, from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from tests.surgery.folding.nets import settled
from torch import Tensor, nn

import musigma as ms

Step = Callable[["Program", list[Tensor]], Tensor]


class Program(nn.Module):
    """Steps that each make one value of earlier ones.

    Args:
        layers: the modules, by name.
        steps: what is done, in order; the last value is returned, with those of `returned`.
        returned: places of other values that the model hands out.
    """

    def __init__(self, layers: dict[str, nn.Module], steps: list[Step], returned: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(layers)
        self.steps, self.returned = steps, returned

    def forward(self, x: Tensor) -> Any:
        values = [x]
        for step in self.steps:
            values.append(step(self, values))
        out = values[-1]
        return (out, *(values[k] for k in self.returned)) if self.returned else out


@dataclass
class Case:
    """A model, what to call it with, and how its numbers are kept."""

    model: nn.Module
    example: Tensor
    dtype: torch.dtype
    norms: int
    words: list[str] = field(default_factory=list)


def image_case(seed: int) -> Case:
    """A model on (n, c, *spatial) in 1 to 3 dims."""
    return _Images(random.Random(seed)).case(seed)


def token_case(seed: int) -> Case:
    """A model on (n, length, features)."""
    return _Tokens(random.Random(seed)).case(seed)


class _Maker:
    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.layers: dict[str, nn.Module] = {}
        self.steps: list[Step] = []
        self.shapes: list[tuple[int, ...]] = []
        self.words: list[str] = []
        self.norms = 0

    def module(self, layer: nn.Module) -> str:
        name = f"m{len(self.layers)}"
        self.layers[name] = layer
        return name

    def apply(self, layer: nn.Module, source: int, name: str | None = None) -> None:
        name = name or self.module(layer)
        self.step(lambda m, v, name=name: m.layers[name](v[source]), type(layer).__name__)

    def step(self, step: Step, word: str) -> None:
        self.steps.append(step)
        self.words.append(word)

    def case(self, seed: int) -> Case:
        rng = self.rng
        torch.manual_seed(seed)
        example = self.start()
        values = [example]
        for _ in range(rng.randint(2, 7)):
            before = len(self.steps)
            self.grow(values)
            program = Program(self.layers, self.steps, []).eval()
            for step in self.steps[before:]:
                with torch.no_grad():
                    values.append(step(program, values))
        returned = [rng.randrange(1, len(values))] if rng.random() < 0.05 else []
        model = settled(Program(self.layers, self.steps, returned), seed)
        self.disturb(model)
        dtype = rng.choice([torch.float32, torch.float32, torch.float64, torch.bfloat16])
        model = model.to(dtype).train(rng.random() < 0.2)
        if rng.random() < 0.2 and example.ndim == 4:
            model = model.to(memory_format=torch.channels_last)
        return Case(model, example.to(dtype), dtype, self.norms, self.words)

    def disturb(self, model: Program) -> None:
        """Now and then tie, hook, freeze, parametrize, or read a parameter elsewhere."""
        rng = self.rng
        weights = [m for m in model.modules() if isinstance(m, nn.Linear | nn.modules.conv._ConvNd)]
        if rng.random() < 0.1:
            same = [
                (a, b) for a in weights for b in weights if a is not b and a.weight.shape == b.weight.shape
            ]
            if same:
                first, second = rng.choice(same)
                second.weight = first.weight
        if rng.random() < 0.1:
            rng.choice(list(model.layers.values())).register_forward_hook(lambda *_: None)
        if rng.random() < 0.1 and weights:
            rng.choice(weights).requires_grad_(False)
        plain = [m for m in weights if not isinstance(m, nn.modules.conv._ConvTransposeNd)]
        if rng.random() < 0.06 and plain:
            nn.utils.parametrizations.weight_norm(rng.choice(plain))
        if rng.random() < 0.06 and weights:
            model.steps[-1] = _plus(model.steps[-1], rng.choice(weights))

    def start(self) -> Tensor:
        raise NotImplementedError

    def grow(self, values: list[Tensor]) -> None:
        raise NotImplementedError


def _plus(step: Step, layer: nn.Module) -> Step:
    return lambda m, v: step(m, v) + layer.weight.sum()  # type: ignore[operator, union-attr]


class _Images(_Maker):
    def start(self) -> Tensor:
        self.dims = self.rng.choice([1, 1, 2, 2, 2, 3])
        size = {1: 12, 2: 8, 3: 5}[self.dims]
        return torch.randn(self.rng.choice([1, 2, 3]), self.rng.choice([2, 3, 4, 6]), *[size] * self.dims)

    def grow(self, values: list[Tensor]) -> None:
        rng, source = self.rng, len(values) - 1
        if len(values) > 2 and rng.random() < 0.08:
            source = rng.randrange(1, len(values))
        x = values[source]
        if x.ndim == 2:
            self.flat(source, x)
            return
        grown = rng.random()
        if grown < 0.35:
            self.convolution(source, x)
        if grown < 0.65:
            self.norm(len(self.steps) if grown < 0.35 else source, values)
        elif grown < 0.8:
            self.mix(source, x)
        elif grown < 0.88:
            self.combine(source, x, values)
        elif grown < 0.94:
            act = rng.choice([nn.ReLU(), nn.ReLU(inplace=True), nn.SiLU(), nn.Identity(), nn.Dropout(0.3)])
            self.apply(act, source)
        else:
            self.apply(nn.Flatten(), source)

    def convolution(self, source: int, x: Tensor) -> None:
        rng, d, c = self.rng, self.dims, x.shape[1]
        groups = rng.choice([g for g in (1, 1, 2, 3, c) if c % g == 0])
        out = groups * rng.choice([1, 2, 3])
        known = [
            (n, m) for n, m in self.layers.items()
            if isinstance(m, nn.modules.conv._ConvNd) and m.in_channels == c and self.fits(m, x)
        ]  # fmt: skip
        if known and rng.random() < 0.1:
            name, layer = rng.choice(known)
            self.apply(layer, source, name)
            return
        if rng.random() < 0.3:
            kind = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[d - 1]
            stride = rng.choice([1, 2]) if max(x.shape[2:]) < 9 else 1
            layer: nn.Module = kind(
                c, out, rng.choice([1, 2, 3]), stride, padding=rng.choice([0, 0, 1]), groups=groups,
                bias=rng.random() < 0.5, dilation=rng.choice([1, 1, 2]),
            )  # fmt: skip
        else:
            kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[d - 1]
            mode = rng.choice(["zeros", "zeros", "zeros", "reflect", "replicate", "circular"])
            stride = rng.choice([1, 1, 2])
            padding = rng.choice([0, 0, 1, "same" if stride == 1 else 1])
            size, dilation = rng.choice([(1, 1), (2, 1), (3, 1), (2, 2)])
            layer = kind(c, out, size, stride, padding, dilation, groups, rng.random() < 0.5, mode)
        if self.fits(layer, x):
            self.apply(layer, source)
        else:
            self.apply(kind(c, out, 1, groups=groups), source)

    def fits(self, layer: nn.Module, x: Tensor) -> bool:
        try:
            with torch.no_grad():
                y = layer(x)
        except (RuntimeError, ValueError):
            return False
        return y.numel() < 40_000 and min(y.shape) > 0

    def norm(self, source: int, values: list[Tensor]) -> None:
        rng, d = self.rng, self.dims
        x = values[source] if source < len(values) else self.run(values, source)
        c, affine = x.shape[1], rng.random() < 0.85
        known = [
            (n, m) for n, m in self.layers.items() if getattr(m, "num_features", None) == c
        ]  # fmt: skip
        if known and rng.random() < 0.06:
            name, layer = rng.choice(known)
            self.apply(layer, source, name)
            return
        kinds: list[Callable[[], nn.Module]] = [
            *[lambda: (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[d - 1](c, affine=affine)] * 4,
            lambda: (ms.nn.BatchNorm1d, ms.nn.BatchNorm2d, ms.nn.BatchNorm3d)[d - 1](c, affine=affine),
            lambda: ms.nn.FrozenBatchNorm(c, affine=affine),
            lambda: (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)[d - 1](
                c, affine=affine, track_running_stats=rng.random() < 0.7
            ),
            lambda: nn.GroupNorm(rng.choice([g for g in (1, 2, 3) if c % g == 0]), c, affine=affine),
            lambda: ms.nn.NormAct((ms.nn.BatchNorm1d, ms.nn.BatchNorm2d, ms.nn.BatchNorm3d)[d - 1](c)),
            lambda: nn.SyncBatchNorm(c, affine=affine),
        ]
        layer = rng.choice(kinds)()
        if isinstance(layer, nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d | nn.GroupNorm) and (
            x[0, 0].numel() < 2
        ):
            layer = nn.Identity()
        self.norms += not isinstance(layer, nn.Identity)
        self.apply(layer, source)

    def run(self, values: list[Tensor], source: int) -> Tensor:
        program = Program(self.layers, self.steps, []).eval()
        found = list(values)
        with torch.no_grad():
            for step in self.steps[len(values) - 1 : source]:
                found.append(step(program, found))
        return found[source]

    def mix(self, source: int, x: Tensor) -> None:
        rng, d = self.rng, self.dims
        avg = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[d - 1]
        most = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[d - 1]
        pads = [rng.choice([0, 1, 2]) for _ in range(2 * d)]
        whole = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)[d - 1]
        value = rng.choice([0.0, 0.0, 1.5])
        padder = (nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d)[d - 1]
        large = min(x.shape[2:]) > 2
        made: list[tuple[str, Step]] = [
            ("pad", lambda m, v: F.pad(v[source], pads, value=value)),
            (
                "up",
                lambda m, v: (
                    F.interpolate(v[source], scale_factor=2) if v[source].numel() < 4000 else v[source]
                ),
            ),
            ("channels", lambda m, v: F.pad(v[source], [0, 0] * d + [1, 1])),
            ("chunk", lambda m, v: torch.cat(v[source].chunk(2, 1)[::-1], 1)),
            ("slice", lambda m, v: v[source][:, : max(1, v[source].shape[1] // 2)]),
            ("move", lambda m, v: v[source].transpose(1, -1).contiguous().transpose(1, -1)),
            ("mean", lambda m, v: v[source].mean(-1, keepdim=True)),
        ]
        if large:
            made += [
                ("avg", lambda m, v: avg(v[source], 2)),
                ("avg0", lambda m, v: avg(v[source], 2, 1, 1)),
                ("max", lambda m, v: most(v[source], 2)),
            ]
        word, step = rng.choice(made)
        if rng.random() < 0.15:
            self.apply(padder(tuple(pads), value), source)
        elif rng.random() < 0.1:
            self.apply(whole(1), source)
        else:
            self.step(step, word)

    def combine(self, source: int, x: Tensor, values: list[Tensor]) -> None:
        rng = self.rng
        same = [k for k, v in enumerate(values) if v.shape == x.shape]
        beside = [k for k, v in enumerate(values) if v.ndim == x.ndim and v.shape[2:] == x.shape[2:]]
        one, other = rng.choice(same), rng.choice(beside)
        picked = rng.random()
        if picked < 0.4:
            self.step(lambda m, v: v[source] + v[one], "add")
        elif picked < 0.9:
            self.step(lambda m, v: torch.cat([v[source], v[other]], 1), "cat")
        else:
            self.step(lambda m, v: v[source] if v[source].sum() > -1e30 else v[source] * 2, "branch")

    def flat(self, source: int, x: Tensor) -> None:
        rng, f = self.rng, x.shape[1]
        picked = rng.random()
        if picked < 0.5:
            self.apply(nn.Linear(f, rng.choice([2, 3, 6]), bias=rng.random() < 0.6), source)
        elif picked < 0.8:
            self.norms += 1
            self.apply(nn.BatchNorm1d(f), source)
        else:
            self.apply(nn.ReLU(), source)


class _Tokens(_Maker):
    def start(self) -> Tensor:
        self.width = self.rng.choice([4, 6, 8])
        return torch.randn(self.rng.choice([1, 2]), self.rng.choice([1, 3, 5]), self.width)

    def grow(self, values: list[Tensor]) -> None:
        rng, source = self.rng, len(values) - 1
        x = values[source]
        d, picked = x.shape[-1], rng.random()
        if picked < 0.3:
            self.norm(source, d)
        elif picked < 0.6:
            self.apply(nn.Linear(d, rng.choice([d, d, 4]), bias=rng.random() < 0.6), source)
        elif picked < 0.7:
            same = [k for k, v in enumerate(values) if v.shape == x.shape]
            one = rng.choice(same)
            self.step(lambda m, v: v[source] + v[one], "add")
        elif picked < 0.8:
            self.norms += 1
            name = self.module(nn.BatchNorm1d(d))
            self.step(lambda m, v: m.layers[name](v[source].transpose(1, 2)).transpose(1, 2), "BatchNorm")
        elif picked < 0.86 and d % 2 == 0:
            name = self.module(nn.MultiheadAttention(d, 2, batch_first=True, bias=rng.random() < 0.8))
            self.step(lambda m, v: m.layers[name](v[source], v[source], v[source])[0], "attention")
        elif picked < 0.92:
            self.apply(rng.choice([nn.ReLU(), nn.GELU(), nn.Dropout(0.2)]), source)
        else:
            parts = rng.choice([1, 2])
            self.step(lambda m, v: torch.cat(v[source].chunk(parts, -1)[::-1], -1), "chunk")

    def norm(self, source: int, d: int) -> None:
        rng = self.rng
        self.norms += 1
        self.apply(
            rng.choice(
                [
                    nn.LayerNorm(d),
                    nn.LayerNorm(d, bias=False),
                    nn.RMSNorm(d),
                    ms.nn.LayerNorm(d),
                    ms.nn.RMSNorm(d),
                ]
            ),
            source,
        )
