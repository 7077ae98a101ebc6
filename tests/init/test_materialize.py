"""A model on the meta device gets memory, and every tensor its values: once, and never garbage."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import musigma as ms
from ranks import run

RULES: dict[str, Any] = {"*.weight": "he_normal", "*.bias": "zeros"}


def hollow(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.state_dict()) | dict(model.named_buffers())


def no_garbage(model: nn.Module) -> bool:
    whole = (t.isfinite().all() for t in tensors(model).values() if t.is_floating_point())
    return all(whole) and not any(t.is_meta for t in tensors(model).values())


class Rotary(nn.Module):
    """Keeps its arguments, so that its table can be computed anew; `plain` is no buffer."""

    def __init__(self, dim: int, base: float = 10_000.0) -> None:
        super().__init__()
        self.dim, self.base = dim, base
        table = base ** -(torch.arange(0, dim, 2) / dim)
        self.register_buffer("table", table, persistent=False)
        self.register_buffer("positions", torch.arange(7))
        self.plain = table * 2


class Forgetful(nn.Module):
    """The tutorial's positional encoding: what its table was made from is nowhere to be found."""

    def __init__(self, width: int, length: int = 50) -> None:
        super().__init__()
        self.register_buffer("table", torch.sin(torch.arange(length)[:, None] * torch.ones(width)))


class Mlp(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_meta_device_makes_no_difference(dtype: torch.dtype) -> None:
    plain, other = Mlp().to(dtype), hollow(Mlp).to(dtype)
    ms.init.apply(plain, RULES, seed=3)
    assert ms.init.materialize(other, "cpu", rules=RULES, seed=3) is other
    assert all(torch.equal(p, other.get_parameter(n)) for n, p in plain.named_parameters())
    assert all(type(p) is nn.Parameter and p.requires_grad for p in other.parameters())


def test_a_plan_is_followed_with_its_own_seed() -> None:
    @dataclasses.dataclass
    class Plan:
        entries: tuple[Any, ...]
        seed: int = 4

    entry = lambda name, scheme, **options: SimpleNamespace(tensor=name, scheme=scheme, options=options)  # noqa: E731
    plan = Plan((entry("0.weight", "normal", std=0.3), entry("2.weight", "zeros"), entry("0.bias", "zeros")))
    model = ms.init.materialize(hollow(Mlp), rules=plan)
    expected = Mlp()
    ms.init.apply(expected, {"0.weight": functools.partial(ms.init.normal_, std=0.3)}, seed=4)
    assert torch.equal(model[0].weight, expected[0].weight)
    assert model[2].weight.abs().sum() == 0
    assert no_garbage(model)


def test_buffers_come_from_the_modules_own_code() -> None:
    make = lambda: nn.Sequential(Rotary(8, base=500.0), nn.BatchNorm1d(8), nn.BatchNorm1d(8, affine=False))  # noqa: E731
    plain, other = make(), ms.init.materialize(hollow(make))
    assert tensors(plain).keys() == tensors(other).keys()
    assert all(torch.equal(t, tensors(other)[n]) for n, t in tensors(plain).items())
    assert torch.equal(other[0].plain, plain[0].plain)
    assert "0.table" not in other.state_dict()


def test_a_buffer_nobody_can_compute_is_named_and_nothing_changes() -> None:
    model = hollow(lambda: nn.Sequential(nn.Linear(4, 4), Forgetful(4)))
    with pytest.raises(
        ValueError, match=r"1\.table: Forgetful does not keep its constructor's argument 'width'"
    ) as e:
        ms.init.materialize(model)
    assert "put a buffer's values there yourself" in str(e.value)
    assert all(t.is_meta for t in tensors(model).values())
    # What the message advises.
    model[1].table = Forgetful(4).table
    assert no_garbage(ms.init.materialize(model))


def test_a_constructor_that_changes_its_arguments_is_not_trusted() -> None:
    class Squared(nn.Module):
        def __init__(self, base: float) -> None:
            super().__init__()
            self.base = base**2
            self.register_buffer("table", self.base * torch.ones(3))

    with pytest.raises(ValueError, match=r"table: a new Squared comes out otherwise: its 'base' differs"):
        ms.init.materialize(hollow(lambda: Squared(3.0)))


def test_memory_that_a_constructor_leaves_unwritten_is_an_error() -> None:
    class Empty(nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.size = size
            self.scale = nn.Parameter(torch.empty(size))
            self.register_buffer("count", torch.empty(size, dtype=torch.int64))

    with pytest.raises(ValueError, match=r"scale: a new Empty leaves it unwritten\n  count: a new Empty"):
        ms.init.materialize(hollow(lambda: Empty(3)))
    model = hollow(lambda: Empty(3))
    model.count = torch.zeros(3, dtype=torch.int64)
    assert no_garbage(ms.init.materialize(model, rules={"scale": "ones"}))


def test_what_a_parametrization_holds_is_named_and_written_by_rules() -> None:
    make = lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))  # noqa: E731
    with pytest.raises(ValueError, match=r"parametrizations\.weight\.original0: ParametrizationList"):
        ms.init.materialize(hollow(make))
    rules = {"*.original0": "ones", "*.original1": "normal", "bias": "zeros"}
    model = ms.init.materialize(hollow(make), rules=rules)
    # Weight norm: each row has the length that original0 says.
    assert torch.allclose(model.weight.norm(dim=1), torch.ones(3))


def test_methods_are_no_arguments_that_a_module_keeps() -> None:
    class Named(nn.Module):
        def __init__(self, modules: int) -> None:
            super().__init__()
            self.register_buffer("table", torch.ones(modules))

    with pytest.raises(ValueError, match="Named does not keep its constructor's argument 'modules'"):
        ms.init.materialize(hollow(lambda: Named(3)))


def test_loaded_weights_keep_their_bits_and_missing_ones_are_written() -> None:
    """C87: an init run after loading overwrote the loaded weights; missing keys stayed uninitialised."""
    model = hollow(lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)))
    loaded = {n: torch.full(p.shape, 0.5) for n, p in model.state_dict().items() if n[0] != "2"}
    loaded["1.num_batches_tracked"] = torch.tensor(7)
    model.load_state_dict(loaded, strict=False, assign=True)
    ms.init.materialize(model, rules={"2.weight": "he_normal"}, skip=loaded)
    assert all(torch.equal(model.state_dict()[n], t) for n, t in loaded.items())
    assert no_garbage(model)


def test_what_is_said_to_be_loaded_must_be() -> None:
    model = hollow(Mlp)
    with pytest.raises(ValueError, match=r"0\.weight is on the meta device; load it first"):
        ms.init.materialize(model, rules=RULES, skip=["0.weight"])
    with pytest.raises(ValueError, match=r"nearest names: 0\.weight"):
        ms.init.materialize(model, rules=RULES, skip=["0.wieght"])
    with pytest.raises(ValueError, match="matches no parameter"):
        ms.init.materialize(model, rules={"*.c_proj.weight": "zeros"})
    with pytest.raises(ValueError, match="device must be one that holds numbers"):
        ms.init.materialize(model, "meta")
    assert all(p.is_meta for p in model.parameters())


def test_ties_and_attributes_of_parameters_survive() -> None:
    model = hollow(lambda: nn.ModuleDict({"embed": nn.Embedding(9, 4), "head": nn.Linear(4, 9, bias=False)}))
    model["head"].weight = model["embed"].weight
    model["head"].weight.no_decay = True
    ms.init.materialize(model, rules={"head.weight": "lecun_normal"})
    assert model["head"].weight is model["embed"].weight
    assert model["head"].weight.no_decay
    assert len(list(model.parameters())) == 1


def test_own_code_gives_the_same_numbers_in_half_precision_and_any_order() -> None:
    make = lambda order: nn.ModuleDict({n: nn.Linear(6, 5) for n in order})  # noqa: E731
    one = ms.init.materialize(hollow(lambda: make("abc")))
    other = ms.init.materialize(hollow(lambda: make("cba")).bfloat16())
    for name, p in one.named_parameters():
        assert torch.equal(p.bfloat16(), other.get_parameter(name))
    # torch's own law: bound 1/√fan_in.
    assert 0 < one["a"].weight.abs().max() <= 1 / math.sqrt(6)
    assert not torch.equal(one["a"].weight, one["b"].weight)


def test_global_random_state_is_left_alone() -> None:
    state = torch.get_rng_state()
    ms.init.materialize(hollow(lambda: nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 3), Rotary(4))))
    assert torch.equal(torch.get_rng_state(), state)


def test_frozen_and_whole_number_parameters_are_written_too() -> None:
    def make() -> nn.Module:
        model = Mlp()
        model[0].weight.requires_grad_(False)
        return model

    model = ms.init.materialize(hollow(make), rules=RULES)
    assert not model[0].weight.requires_grad
    assert model[0].weight.abs().sum() > 0


def test_a_recurrent_layer_runs_afterwards() -> None:
    lstm = ms.init.materialize(hollow(lambda: nn.LSTM(4, 3, num_layers=2)))
    assert lstm(torch.ones(5, 1, 4))[0].isfinite().all()


CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {"num_key_value_heads": 2}),
    "llama-tied-linear-rope": (
        "LlamaForCausalLM",
        {
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
        },
    ),
    "gpt2": ("GPT2LMHeadModel", {"bos_token_id": 1, "eos_token_id": 1}),
    "bert": ("BertModel", {}),
    "vit": ("ViTModel", {"image_size": 16, "patch_size": 4}),
    "t5": ("T5ForConditionalGeneration", {"d_kv": 8}),
    "whisper": (
        "WhisperModel",
        {
            "num_mel_bins": 8,
            "pad_token_id": 1,
            "bos_token_id": 1,
            "eos_token_id": 1,
            "decoder_start_token_id": 1,
            "decoder_layers": 1,
            "decoder_attention_heads": 4,
        },
    ),
}


def transformer(name: str) -> tuple[Callable[[], nn.Module], nn.Module]:
    transformers = pytest.importorskip("transformers")
    kind, options = CONFIGS[name]
    config = getattr(transformers, kind).config_class(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=60,
        **({} if name in ("gpt2", "t5") else {"intermediate_size": 64}),
        **options,
    )
    make = lambda: getattr(transformers, kind)(config)  # noqa: E731
    return make, make()


@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_models_are_as_their_constructors_make_them(name: str) -> None:
    make, plain = transformer(name)
    other = ms.init.materialize(hollow(make), seed=1)
    assert no_garbage(other)
    assert plain.state_dict().keys() == other.state_dict().keys()
    for key, buffer in plain.named_buffers():
        assert torch.equal(buffer, other.get_buffer(key)), key
    assert len(list(plain.parameters())) == len(list(other.parameters()))
    for (key, ours), theirs in zip(other.named_parameters(), plain.parameters(), strict=True):
        # Both are draws of one law: standard deviations differ by about √(1/n), taken five times.
        a, b = ms.moments(ours, None).std().item(), ms.moments(theirs, None).std().item()
        assert a == pytest.approx(b, rel=5 / math.sqrt(ours.numel()), abs=1e-9), key


def shards(rank: int) -> dict[str, Tensor]:
    model = hollow(lambda: nn.Sequential(nn.Linear(7, 13), nn.BatchNorm1d(13), Rotary(8), nn.Linear(13, 3)))
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    ms.init.materialize(model, "cpu", rules={"0.weight": "he_normal"}, seed=5)
    return {n: getattr(t, "full_tensor", lambda t=t: t)() for n, t in model.state_dict().items()}


@pytest.mark.slow
def test_four_ranks_hold_the_pieces_of_what_one_process_makes(tmp_path: Path) -> None:
    alone = nn.Sequential(nn.Linear(7, 13), nn.BatchNorm1d(13), Rotary(8), nn.Linear(13, 3)).to("meta")
    ms.init.materialize(alone, "cpu", rules={"0.weight": "he_normal"}, seed=5)
    for seen in run(shards, 4, tmp_path):
        assert seen.keys() == alone.state_dict().keys()
        assert all(torch.equal(t, alone.state_dict()[n]) for n, t in seen.items())
