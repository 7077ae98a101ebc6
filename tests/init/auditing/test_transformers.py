"""The transformers library's own initializations, and what ports of GPT-2 get wrong."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import musigma as ms

transformers = pytest.importorskip("transformers")

SIZE = {
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "vocab_size": 80,
}


def ids() -> torch.Tensor:
    return torch.randint(0, 80, (3, 10), generator=torch.Generator().manual_seed(0))


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        n_layer=3, n_embd=32, n_head=2, vocab_size=80, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config).eval()


def t5() -> nn.Module:
    config = transformers.T5Config(
        num_layers=2, d_model=32, d_ff=64, d_kv=16, num_heads=2, vocab_size=80, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config).eval()


def vit() -> nn.Module:
    config = transformers.ViTConfig(image_size=16, patch_size=8, **SIZE | {"vocab_size": 2})
    return transformers.ViTModel(config).eval()


MODELS = {
    "gpt2": (gpt2, lambda: {"input_ids": ids()}, ()),
    "bert": (
        lambda: transformers.BertModel(transformers.BertConfig(**SIZE)).eval(),
        lambda: {"input_ids": ids()},
        (),
    ),
    "t5": (t5, lambda: {"input_ids": ids(), "decoder_input_ids": ids()}, ()),
    # Two branches a block are added to the stream, with the spread of all other weights.
    "llama": (
        lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZE)).eval(),
        lambda: {"input_ids": ids()},
        ("o_proj.weight", "down_proj.weight"),
    ),
    "vit": (vit, lambda: {"pixel_values": torch.randn(2, 3, 16, 16)}, ("o_proj.weight", "fc2.weight")),
}


@pytest.mark.parametrize("name", MODELS)
def test_own_initialization(name: str) -> None:
    build, example, unscaled = MODELS[name]
    model = build()
    assert not ms.init.audit(model)
    audit = ms.init.audit(model, example())
    assert not audit.trained
    assert {f.code for f in audit} <= {"residual-unscaled"}
    ends = [n for n, _ in model.named_parameters() if unscaled and n.endswith(unscaled)]
    assert sorted(f.tensor for f in audit) == sorted(ends)
    laws = {line.name: line for line in audit.tensors}
    assert all(line.law is not None for line in laws.values())


@pytest.mark.parametrize("name", MODELS)
def test_nothing_is_left_after_initialize(name: str) -> None:
    build, example, _ = MODELS[name]
    model = build()
    x = example()
    plan = ms.init.initialize(model, x, seed=1)
    audit = ms.init.audit(model, x, plan=plan)
    assert not audit, str(audit)
    assert {audit[entry.tensor].verdict for entry in plan} == {"as planned"}


def redrawn(model: nn.Module, ending: str, std: float) -> nn.Module:
    for name, parameter in model.named_parameters():
        if name.endswith(ending):
            nn.init.normal_(parameter, std=std)
    return model


def ends(model: nn.Module, ending: str) -> list[str]:
    return [name for name, _ in model.named_parameters() if name.endswith(ending)]


def test_scaling_that_matched_no_name() -> None:
    model = redrawn(gpt2(), "c_proj.weight", 0.02)
    audit = ms.init.audit(model, {"input_ids": ids()})
    assert [f.tensor for f in audit] == ends(model, "c_proj.weight")
    evidence = audit.findings[0].evidence
    assert evidence["branches"] == 6
    assert evidence["ratio"] == pytest.approx(math.sqrt(6), rel=0.1)


def test_scaling_that_matched_one_of_two_names() -> None:
    model = redrawn(gpt2(), "mlp.c_proj.weight", 0.02)
    audit = ms.init.audit(model, {"input_ids": ids()})
    assert [f.tensor for f in audit] == ends(model, "mlp.c_proj.weight")


def test_the_wrong_projection_scaled() -> None:
    model = redrawn(redrawn(gpt2(), "c_proj.weight", 0.02), "c_fc.weight", 0.02 / math.sqrt(6))
    audit = ms.init.audit(model, {"input_ids": ids()})
    assert {f.code for f in audit} == {"residual-unscaled"}
    assert {f.tensor for f in audit} == {*ends(model, "c_proj.weight"), *ends(model, "c_fc.weight")}


def test_torch_embedding_tied_to_the_head() -> None:
    model = gpt2()
    nn.init.normal_(model.lm_head.weight)
    (finding,) = ms.init.audit(model, {"input_ids": ids()})
    assert (finding.tensor, finding.code) == ("lm_head.weight", "tied-embedding-scale")
    assert finding.evidence["output_rms"] == pytest.approx(math.sqrt(32), rel=0.5)


class Shared(nn.Module):
    """Blocks that share their weights, in GPT-2's manner, scaled in a loop over names."""

    def __init__(self, blocks: int, once: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))
            for _ in range(blocks)
        )
        for block in self.blocks:
            block[1].weight, block[3].weight = self.blocks[0][1].weight, self.blocks[0][3].weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
        with torch.no_grad():
            for name, parameter in self.named_parameters(remove_duplicate=once):
                if name.endswith("3.weight") and parameter.dim() > 1:
                    parameter.mul_(blocks**-0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = x + block(x)
        return x


@pytest.mark.parametrize("blocks", [2, 3, 6])
def test_tie_scaled_once_for_every_name(blocks: int) -> None:
    x = torch.randint(0, 50, (2, 6))
    assert not ms.init.audit(Shared(blocks, once=True), x)
    (finding,) = ms.init.audit(Shared(blocks, once=False), x)
    assert (finding.tensor, finding.code) == ("blocks.0.3.weight", "tied-scaled-twice")
    assert finding.evidence["times"] == blocks
    assert finding.evidence["expected"] == pytest.approx(0.02 * blocks**-0.5, rel=0.05)
