"""Initialization of whole models: a table of signals and gradients, for docs/guides/initialization.md.

    python benchmarks/initialization.py [--only NAME] [--print]

Each net is initialized by musigma, and left as torch (or transformers) builds it, and by Xavier's and He's
normal laws on every matrix with biases 0; three seeds each. A batch of random inputs goes through, and a
random gradient at the output comes back. Nets and inputs are small: the laws are the same at any size.
"""

from __future__ import annotations

import argparse
import math
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import musigma as ms

PAGE = Path(__file__).resolve().parents[1] / "docs" / "guides" / "initialization.md"
BEGIN, END = "<!-- table: benchmarks/initialization.py -->", "<!-- end of the table -->"
SEEDS, DEPTH, WIDTH = 3, 50, 512
Net = tuple[nn.Module, Any]


def own(z: Tensor) -> Tensor:
    """An activation nobody has a gain for."""
    return torch.tanh(z) + 0.3 * torch.relu(z)


class Apply(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def mlp(activation: Callable[[Tensor], Tensor]) -> Net:
    layers: list[nn.Module] = []
    for _ in range(DEPTH):
        layers += [nn.Linear(WIDTH, WIDTH), Apply(activation)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 10)), torch.randn(64, WIDTH)


def vgg() -> Net:
    layers: list[nn.Module] = []
    channels = 3
    for width, count in ((32, 2), (64, 2), (128, 3), (128, 3)):
        for _ in range(count):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    head = [nn.Flatten(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10)]
    return nn.Sequential(*layers, *head), torch.randn(16, 3, 32, 32)


class Residual(nn.Module):
    """x + conv(relu(conv(relu(x)))), with BatchNorms or without."""

    def __init__(self, width: int, norm: bool) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(width) if norm else nn.Identity()
        self.norm2 = nn.BatchNorm2d(width) if norm else nn.Identity()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=not norm)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=not norm)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(F.relu(self.norm2(self.conv1(F.relu(self.norm1(x))))))


def resnet(norm: bool) -> Net:
    blocks = [Residual(32, norm) for _ in range(12)]
    tail = [nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)]
    return nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), *blocks, *tail), torch.randn(16, 3, 16, 16)


def separable() -> Net:
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, padding=1), nn.ReLU()]
    for _ in range(8):
        layers += [nn.Conv2d(64, 64, 3, padding=1, groups=64), nn.ReLU(), nn.Conv2d(64, 64, 1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)), torch.randn(
        16, 3, 16, 16
    )


class UNet(nn.Module):
    """Two steps down, two up by transposed convolutions, with skips that are concatenated."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.down1, self.down2 = (
            nn.Conv2d(3, width, 3, padding=1),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
        )
        self.middle = nn.Conv2d(2 * width, 4 * width, 3, stride=2, padding=1)
        self.up2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.mix2 = nn.Conv2d(4 * width, 2 * width, 3, padding=1)
        self.up1 = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.mix1 = nn.Conv2d(2 * width, width, 3, padding=1)
        self.head = nn.Conv2d(width, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = F.relu(self.down1(x))
        b = F.relu(self.down2(a))
        c = F.relu(self.middle(b))
        b = F.relu(self.mix2(torch.cat([b, F.relu(self.up2(c))], 1)))
        a = F.relu(self.mix1(torch.cat([a, F.relu(self.up1(b))], 1)))
        return self.head(a)


class Recurrent(nn.Module):
    """A stack of four recurrent layers and a head on the last step."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([kind(64, 64, batch_first=True) for _ in range(4)])
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x, _ = layer(x)
        return self.head(x[:, -1])


def transformer(name: str, **options: Any) -> Net:
    import transformers as tf

    size = {"hidden_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4}
    ids = torch.randint(0, 500, (8, 24))
    if name == "gpt2":
        config = tf.GPT2Config(vocab_size=500, n_embd=128, n_layer=6, n_head=4, n_positions=32)
        return tf.GPT2LMHeadModel(config).eval(), {"input_ids": ids}
    if name == "llama":
        llama = tf.LlamaConfig(
            vocab_size=500, intermediate_size=352, max_position_embeddings=32, **size, **options
        )
        return tf.LlamaForCausalLM(llama).eval(), {"input_ids": ids}
    if name == "t5":
        t5 = tf.T5Config(vocab_size=500, d_model=128, d_kv=32, d_ff=512, num_layers=4, num_heads=4)
        return tf.T5ForConditionalGeneration(t5).eval(), {"input_ids": ids, "decoder_input_ids": ids}
    if name == "vit":
        vit = tf.ViTConfig(image_size=32, patch_size=8, intermediate_size=512, **size)
        return tf.ViTForImageClassification(vit).eval(), {"pixel_values": torch.randn(8, 3, 32, 32)}
    bert = tf.BertConfig(vocab_size=500, intermediate_size=512, max_position_embeddings=32, **size)
    return tf.BertForSequenceClassification(bert).eval(), {"input_ids": ids}


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu, "leaky_relu": F.leaky_relu, "elu": F.elu, "selu": F.selu, "gelu": F.gelu, "silu": F.silu,
    "mish": F.mish, "tanh": torch.tanh, "softsign": F.softsign, "sigmoid": torch.sigmoid,
    "tanh + 0.3·relu": own,
}  # fmt: skip
NETS: dict[str, Callable[[], Net]] = {
    **{f"MLP, {name}": (lambda f=f: mlp(f)) for name, f in ACTIVATIONS.items()},  # type: ignore[misc]
    "VGG, no norm": vgg,
    "ResNet, no norm": lambda: resnet(False),
    "ResNet, BatchNorm": lambda: resnet(True),
    "depthwise-separable": separable,
    "U-Net": lambda: (UNet(), torch.randn(8, 3, 32, 32)),
    "LSTM × 4": lambda: (Recurrent(nn.LSTM), torch.randn(16, 20, 64)),
    "GRU × 4": lambda: (Recurrent(nn.GRU), torch.randn(16, 20, 64)),
    "GPT-2": lambda: transformer("gpt2"),
    "Llama": lambda: transformer("llama"),
    "Llama, tied": lambda: transformer("llama", tie_word_embeddings=True),
    "T5": lambda: transformer("t5"),
    "ViT": lambda: transformer("vit"),
    "BERT": lambda: transformer("bert"),
}


@dataclass
class Flow:
    """What becomes of a signal from the first hidden layer to the last, and of a gradient on its way back.

    Layers are compared with their like: those whose paths differ in the numbers only, if there are any.
    """

    signal: float
    gradient: float


def flow(model: nn.Module, example: Any) -> Flow:
    """One batch forward and a random gradient backward; the last weight layer, the head, is left out."""
    kept: list[tuple[str, Tensor]] = []

    def hook(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def keep(module: nn.Module, args: Any, out: Any) -> None:
            tensor = out[0] if isinstance(out, tuple) else out
            if tensor.requires_grad:
                tensor.retain_grad()
                kept.append((re.sub(r"\b\d+\b", "*", name), tensor))

        return keep

    hooks = [m.register_forward_hook(hook(name)) for name, m in model.named_modules() if is_layer(m)]
    out = model(**example) if isinstance(example, dict) else model(example)
    out = out if isinstance(out, Tensor) else out.logits
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(0)))
    for handle in hooks:
        handle.remove()
    alike: dict[str, list[Tensor]] = {}
    for name, tensor in kept[:-1]:
        alike.setdefault(name, []).append(tensor)
    ends = [(like[0], like[-1]) for like in alike.values() if len(like) > 1]
    ends = ends or [(kept[0][1], kept[-2][1])]
    signal = [rms(last) / rms(first) if rms(first) else math.nan for first, last in ends]
    sizes = [(energy(first.grad), energy(last.grad)) for first, last in ends]
    return Flow(geometric(signal), geometric([first / last if last else math.nan for first, last in sizes]))


def rms(x: Tensor) -> float:
    return ms.moments(x.detach().square(), None).mean.sqrt().item()


def energy(grad: Tensor | None) -> float:
    return 0.0 if grad is None else float(grad.double().square().sum())


def is_layer(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    matrix = isinstance(weight, Tensor) and weight.dim() > 1 and not isinstance(module, nn.Embedding)
    return matrix or isinstance(module, nn.RNNBase)


def by_law(law: Callable[[Tensor], object]) -> Callable[[nn.Module], None]:
    """A fixed law on every matrix, biases 0: what a loop over the parameters does."""

    def write(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                law(parameter)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    return write


BASELINES: dict[str, Callable[[nn.Module], None]] = {
    "torch's default": lambda model: None,
    "Xavier": by_law(nn.init.xavier_normal_),
    "He": by_law(lambda w: nn.init.kaiming_normal_(w, nonlinearity="relu")),
}


@dataclass
class Ours:
    """Three initializations of one net by musigma."""

    targets: list[float]
    realised: list[float]
    outside: int
    checks: int
    flows: list[Flow]


def by_musigma(make: Callable[[], Net]) -> Ours:
    ours = Ours([], [], 0, 0, [])
    for seed in range(SEEDS):
        torch.manual_seed(seed)
        model, example = make()
        plan = ms.init.initialize(model, example, seed=seed)
        seen = plan.verification
        assert seen is not None
        hidden = [check for check in seen.checks if check.kind != "head"]
        ours.targets += [check.expected for check in hidden]
        ours.realised += [check.std / check.expected for check in hidden if check.expected > 0]
        ours.outside += sum(bool(check.missed) for check in hidden)
        ours.checks += len(hidden)
        ours.flows.append(flow(model, example))
    return ours


def by_baseline(make: Callable[[], Net], write: Callable[[nn.Module], None]) -> list[Flow]:
    flows = []
    for seed in range(SEEDS):
        torch.manual_seed(seed)
        model, example = make()
        write(model)
        flows.append(flow(model, example))
    return flows


def geometric(values: list[float]) -> float:
    if any(not 0 < value < math.inf for value in values):
        return math.nan
    return math.exp(sum(map(math.log, values)) / len(values))


def number(value: float) -> str:
    if math.isnan(value):
        return "0 or ∞"
    if 0.01 <= abs(value) < 1000:
        return f"{value:.2g}" if value < 100 else f"{value:.0f}"
    mantissa, exponent = f"{value:.0e}".split("e") if value else ("0", "0")
    return f"{mantissa}e{int(exponent)}" if value else "0"


def span(values: list[float]) -> str:
    low, high = number(min(values)), number(max(values))
    return low if low == high else f"{low} … {high}"


def ratios(flows: list[Flow]) -> str:
    signal, gradient = geometric([f.signal for f in flows]), geometric([f.gradient for f in flows])
    return f"{number(signal)} / {number(gradient)}"


def row(name: str, make: Callable[[], Net]) -> str:
    ours = by_musigma(make)
    cells = [
        name,
        span(ours.targets),
        span(ours.realised),
        f"{ours.outside} of {ours.checks}",
        ratios(ours.flows),
    ]
    cells += [ratios(by_baseline(make, write)) for write in BASELINES.values()]
    return "| " + " | ".join(cells) + " |"


def table(only: str | None) -> str:
    heads = ["net", "target std", "realised ÷ target", "outside", "musigma", *BASELINES]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for name, make in NETS.items():
        if only is None or only in name:
            lines.append(row(name, make))
            print(lines[-1], flush=True)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", help="nets whose name contains this")
    parser.add_argument("--print", action="store_true", help="leave the page alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    made = table(options.only)
    if options.print or options.only:
        return
    text = PAGE.read_text()
    if BEGIN not in text:
        raise SystemExit(f"{PAGE.name} lacks the marker {BEGIN}")
    PAGE.write_text(re.sub(f"{BEGIN}.*?{END}", lambda _: f"{BEGIN}\n{made}\n{END}", text, flags=re.DOTALL))


if __name__ == "__main__":
    main()
