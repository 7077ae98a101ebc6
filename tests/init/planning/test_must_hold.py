"""The nets that a plan must keep: the spread of every layer, and the gradient from last to first."""

import math

import pytest
import torch
from torch import nn

import musigma as ms


class _Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


ACTIVATIONS = {
    "relu": nn.ReLU,
    "leaky_relu": nn.LeakyReLU,
    "elu": nn.ELU,
    "selu": nn.SELU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "mish": nn.Mish,
    "tanh": nn.Tanh,
    "softsign": nn.Softsign,
    "lambda": lambda: _Function(lambda x: torch.sin(x) + 0.3 * x),
}


def _mlp(activation, depth, width):
    layers = []
    for before in (64, *[width] * (depth - 1)):
        layers += [nn.Linear(before, width), activation()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def _x(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.slow
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_fifty_layers_keep_signal_and_gradient(name):
    ratios = []
    for seed in range(3):
        plan = ms.init.initialize(_mlp(ACTIVATIONS[name], 50, 512), _x(64, 64), seed=seed)
        hidden = [check for check in plan.verification.checks if check.kind == "activation"]
        assert len(hidden) == 50
        assert all(check.low <= check.std <= check.high for check in hidden), plan.verification.missed
        # Per unit, so that layers of one width compare.
        ratios.append(hidden[0].gradient / hidden[-1].gradient)
    assert 1 / 4 <= math.prod(ratios) ** (1 / 3) <= 4


def test_a_sigmoid_net_is_told_to_take_a_norm():
    plan = ms.init.plan(_mlp(nn.Sigmoid, 12, 32), _x(16, 64))
    assert any("norm" in note and "sigmoid" in note for note in plan.notes)


class _Vgg(nn.Sequential):
    def __init__(self):
        layers, before = [], 3
        for width in (32, 32, 0, 64, 64, 0, 128, 128, 0):
            if not width:
                layers.append(nn.MaxPool2d(2))
                continue
            layers += [nn.Conv2d(before, width, 3, padding=1), nn.ReLU(inplace=True)]
            before = width
        super().__init__(*layers, nn.Flatten(), nn.Linear(128 * 16, 64), nn.ReLU(), nn.Linear(64, 10))


class _Block(nn.Module):
    def __init__(self, before, width, stride, norm):
        super().__init__()
        self.first, self.second = nn.Conv2d(before, width, 3, stride, 1), nn.Conv2d(width, width, 3, 1, 1)
        self.norms = nn.ModuleList(norm(width) for _ in range(2))
        same = before == width and stride == 1
        self.skip = nn.Identity() if same else nn.Conv2d(before, width, 1, stride)

    def forward(self, x):
        y = torch.relu(self.norms[0](self.first(x)))
        return torch.relu(self.norms[1](self.second(y)) + self.skip(x))


def _resnet(norm):
    blocks, before = [nn.Conv2d(3, 32, 3, padding=1), nn.ReLU()], 32
    for width, stride in ((32, 1), (32, 1), (64, 2), (64, 1), (64, 1)):
        blocks.append(_Block(before, width, stride, norm))
        before = width
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def _depthwise():
    layers = [nn.Conv2d(3, 64, 3, 2, 1), nn.ReLU()]
    for _ in range(4):
        layers += [nn.Conv2d(64, 64, 3, 1, 1, groups=64), nn.ReLU(), nn.Conv2d(64, 64, 1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


class _UNet(nn.Module):
    def __init__(self):
        super().__init__()

        def pair(before, width):
            convs = nn.Conv2d(before, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
            return nn.Sequential(convs[0], nn.ReLU(), convs[1], nn.ReLU())

        self.down, self.middle, self.up = pair(3, 32), pair(32, 64), nn.ConvTranspose2d(64, 32, 4, 2, 1)
        self.join, self.out = pair(64, 32), nn.Conv2d(32, 2, 1)

    def forward(self, x):
        a = self.down(x)
        b = self.up(self.middle(nn.functional.max_pool2d(a, 2)))
        return self.out(self.join(torch.cat([a, b], 1)))


class _Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.table, self.cells, self.out = (
            nn.Embedding(50, 64),
            kind(64, 64, 3, batch_first=True),
            nn.Linear(64, 50),
        )

    def forward(self, ids):
        return self.out(self.cells(self.table(ids))[0])


NETS = {
    "vgg": (_Vgg, lambda: _x(8, 3, 32, 32)),
    "resnet": (lambda: _resnet(nn.Identity), lambda: _x(8, 3, 16, 16)),
    "resnet_norm": (lambda: _resnet(nn.BatchNorm2d), lambda: _x(8, 3, 16, 16)),
    "depthwise": (_depthwise, lambda: _x(8, 3, 32, 32)),
    "unet": (_UNet, lambda: _x(4, 3, 32, 32)),
    "lstm": (lambda: _Recurrent(nn.LSTM), lambda: torch.arange(64).view(4, 16) * 7 % 50),
    "gru": (lambda: _Recurrent(nn.GRU), lambda: torch.arange(64).view(4, 16) * 7 % 50),
}


def _lives_up(plan):
    verification = plan.verification
    assert all(math.isfinite(check.std) for check in verification.checks)
    outside = [c for c in verification.checks if c.std < c.low or c.std > c.high]
    assert not outside, verification.missed
    if verification.loss is not None:
        assert verification.loss < verification.ideal + 0.1


@pytest.mark.parametrize("name", NETS)
def test_layers_have_the_spread_that_the_plan_names(name):
    make, example = NETS[name]
    _lives_up(ms.init.initialize(make(), example()))


def _transformers():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 128}
    words = {"vocab_size": 100}
    ids = {"input_ids": torch.arange(64).view(4, 16) * 37 % 100}
    llama = transformers.LlamaConfig(**sizes, **words, num_key_value_heads=2)
    tied = transformers.LlamaConfig(**sizes, **words, num_key_value_heads=2, tie_word_embeddings=True)
    gpt2 = transformers.GPT2Config(
        n_layer=3, n_embd=64, n_head=4, n_positions=32, bos_token_id=1, eos_token_id=2, **words
    )
    vit = transformers.ViTConfig(**sizes, image_size=32, patch_size=8)
    return {
        "gpt2": (transformers.GPT2LMHeadModel, gpt2, ids),
        "llama": (transformers.LlamaForCausalLM, llama, ids),
        "llama_tied": (transformers.LlamaForCausalLM, tied, ids),
        "vit": (transformers.ViTForImageClassification, vit, {"pixel_values": _x(4, 3, 32, 32)}),
        "bert": (transformers.BertForMaskedLM, transformers.BertConfig(**sizes, **words), ids),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "llama_tied", "vit", "bert"])
def test_transformers_have_the_spread_that_the_plan_names(name):
    make, config, example = _transformers()[name]
    _lives_up(ms.init.initialize(make(config), example))
