"""The two builds of a whole model are the same model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from musigma.lab import bench
from musigma.lab.bench import _models, _steps
from musigma.lab.bench._calls import Library

# As the built-in ones, on fewer pixels and shorter sequences
MODELS = [
    bench.Model("cnn", _models.Cnn, (2, 3, 16, 16)),
    bench.Model("cnn last", _models.Cnn, (2, 3, 16, 16), channels_last=True),
    bench.Model("vit", lambda library: _models.Transformer(library, "vit", 24, 3, 2), (2, 5, 24)),
    bench.Model("llama", lambda library: _models.Transformer(library, "llama", 24, 3, 2), (2, 5, 24)),
    bench.Model(
        "llama half",
        lambda library: _models.Transformer(library, "llama", 24, 3, 2),
        (2, 5, 24),
        torch.bfloat16,
    ),
]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_both_have_the_same_weights_and_nearly_the_same_gradients(model: bench.Model) -> None:
    ours, torchs = (_models.trained(model, library).model for library in ("ours", "torch"))
    theirs = torchs.state_dict()
    assert list(ours.state_dict()) == list(theirs)
    assert all(torch.equal(value, theirs[name]) for name, value in ours.state_dict().items())
    row = bench.ModelRow(model=model.name, threads=1, errors=_steps.step_errors(model))
    assert row.right, row.errors


@pytest.mark.parametrize("model", MODELS[:1] + MODELS[3:4], ids=lambda model: model.name)
def test_a_norm_that_computes_something_else_is_caught(
    model: bench.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = model.build

    def sabotaged(library: Library) -> nn.Module:
        net = build(library)
        if library == "ours":
            norms = [m for m in net.modules() if isinstance(m, nn.BatchNorm2d | nn.RMSNorm)]
            norms[-1].eps = 0.1
        return net

    changed = bench.Model(model.name, sabotaged, model.shape)
    assert not bench.ModelRow(model="", threads=1, errors=_steps.step_errors(changed)).right


@pytest.mark.parametrize("library", ["ours", "torch"])
def test_a_step_moves_the_weights_and_keeps_the_input(library: Library) -> None:
    made = _models.trained(MODELS[2], library)
    # a key's bias moves all scores alike, so vectors may stay where they are
    matrices = [p for p in made.model.parameters() if p.dim() == 2]
    x, before = made.x.clone(), [p.detach().clone() for p in matrices]
    for group in made.optimizer.param_groups:
        group["lr"] = 1.0
    made.step()
    assert torch.equal(made.x, x)
    assert all(not torch.equal(p, b) for p, b in zip(matrices, before, strict=True))


def test_the_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    _models.trained(MODELS[0], "ours")
    assert torch.equal(torch.get_rng_state(), before)


def test_saved_leaves_the_weights_out() -> None:
    saved = _steps.step_saved(MODELS[3])
    weights = sum(p.nbytes for p in _models.trained(MODELS[3], "torch").model.parameters())
    # ten vectors of 24 come in; a linear layer keeps its input, never its weight again
    assert 0 < saved.ours < weights
    assert 0 < saved.torchs < weights


def test_every_model_is_there_that_was_promised() -> None:
    names = " ".join(model.name for model in bench.MODELS)
    assert all(kind in names for kind in ("ResNet-18", "ViT", "Llama"))
    assert len({model.name for model in bench.MODELS}) == len(bench.MODELS)
