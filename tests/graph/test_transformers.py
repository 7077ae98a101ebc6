"""Models of the transformers library, where it is installed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from musigma.graph import UNKNOWN, record

transformers = pytest.importorskip("transformers")

SMALL = {"vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2}


def llama() -> torch.nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, **SMALL
    )
    return transformers.LlamaForCausalLM(config)


def gpt2() -> torch.nn.Module:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, **SMALL))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "last", "activation"),
    [
        (llama, "model.layers.1.mlp.down_proj.weight", ("model.layers.0.mlp.gate_proj.weight", "silu")),
        (gpt2, "transformer.h.1.mlp.c_proj.weight", ("transformer.h.0.mlp.c_fc.weight", "gelu_tanh")),
    ],
)
def test_language_models(make: Any, last: str, activation: tuple[str, str]) -> None:
    graph = record(make(), torch.arange(5)[None].repeat(2, 1))
    assert UNKNOWN not in {source for node in graph for source in node.inputs}
    branches = graph.residual_branches()
    assert len(branches) == 4
    assert branches[-1].last_parameter == last
    assert all(len(branch.norms) == 1 for branch in branches)
    found = graph.following_activation(activation[0])
    assert found is not None
    assert found.name == activation[1]
    assert all(graph.uses(group[0]) for group in graph.parameters)
