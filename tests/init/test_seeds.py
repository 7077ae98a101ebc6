"""A tensor's values depend on (seed, name, shape, scheme) and on nothing else."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from musigma.init import (
    SCHEMES,
    apply,
    generator_for,
    he_normal_,
    normal_,
    orthogonal_,
    torch_default_bias_,
    truncated_normal_,
    uniform_,
    zeros_,
)

RULES = {"*.weight": he_normal_, "*.bias": zeros_}
NEEDED: dict[str, dict[str, object]] = {
    "block_constant": {"values": (0.1, 0.3)},
    "constant": {"value": 0.3},
    "depth_scaled": {"layer": 3},
    "sparse": {"sparsity": 0.5},
    "stacked": {"gains": (1.0, 0.5)},
    "wang": {"layers": 6},
}


def mlp(order: tuple[int, ...] = (0, 1, 2)) -> nn.ModuleDict:
    layers = {f"l{i}": nn.Linear(40 - 10 * i, 30 - 10 * i) for i in range(3)}
    return nn.ModuleDict({f"l{i}": layers[f"l{i}"] for i in order})


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_values_do_not_depend_on_the_order_of_registration() -> None:
    one, other = mlp(), mlp((2, 0, 1))
    apply(one, RULES, seed=3)
    apply(other, dict(reversed(RULES.items())), seed=3)
    assert all(torch.equal(p, other.get_parameter(n)) for n, p in one.named_parameters())


def test_values_do_not_depend_on_what_else_is_initialized() -> None:
    one, other = mlp(), mlp()
    apply(one, {"*.weight": normal_}, seed=3)
    apply(other, {"l2.weight": normal_}, seed=3)
    assert torch.equal(one["l2"].weight, other["l2"].weight)


def test_values_depend_on_seed_and_name() -> None:
    one, other = mlp(), mlp()
    apply(one, RULES, seed=0)
    apply(other, RULES, seed=1)
    assert not torch.equal(one["l0"].weight, other["l0"].weight)
    twins = nn.ModuleDict({"a": nn.Linear(20, 20), "b": nn.Linear(20, 20)})
    apply(twins, {"*.weight": normal_})
    assert not torch.equal(twins["a"].weight, twins["b"].weight)


@pytest.mark.parametrize("scheme", sorted(SCHEMES))
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_other_dtypes_hold_the_same_numbers_rounded(scheme: str, dtype: torch.dtype) -> None:
    options = NEEDED.get(scheme, {})
    shape = {"dirac": 1, "delta_orthogonal": 1}.get(scheme, 0)
    make: Callable[[], nn.Module] = lambda: nn.Conv1d(40, 30, 3) if shape else nn.Linear(40, 30)  # noqa: E731
    rule = functools.partial(SCHEMES[scheme].function, **options)
    name = "bias" if scheme == "torch_default_bias" else "weight"
    plain, cast = make(), make().to(dtype)
    apply(plain, {name: rule})
    apply(cast, {name: rule})
    expected, got = getattr(plain, name).to(dtype), getattr(cast, name)
    if dtype is torch.float64:
        assert torch.equal(got.float(), getattr(plain, name))
    elif scheme in ("truncated_normal", "variance_scaling"):
        # What would round onto a bound is rounded inwards.
        assert ((got != expected).double().mean()) < 0.01
    else:
        assert torch.equal(got, expected)


def test_foreign_functions_get_the_same_numbers_in_every_dtype() -> None:
    rules = {"*.weight": nn.init.kaiming_uniform_, "*.bias": lambda w: w.normal_(0, 0.1)}
    state = torch.get_rng_state()
    plain, half, again = mlp(), mlp().bfloat16(), mlp()
    torch.manual_seed(9)
    after = torch.get_rng_state()
    for model in (plain, half, again):
        apply(model, rules, seed=4)
    assert torch.equal(torch.get_rng_state(), after)
    assert not torch.equal(state, after)
    for name, p in plain.named_parameters():
        assert torch.equal(p, again.get_parameter(name))
        assert torch.equal(p.bfloat16(), half.get_parameter(name))
        assert not torch.equal(p, torch.zeros_like(p))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_default_device_makes_no_difference(device: str) -> None:
    """Large models are built under `torch.device("meta")`, scripts start with set_default_device."""
    rules = {
        "l0.weight": functools.partial(he_normal_, nonlinearity=lambda z: z * torch.tensor(0.5)),
        "l1.weight": truncated_normal_,
        "l2.weight": lambda w: w.copy_(torch.randn(w.shape)),
        "*.bias": torch_default_bias_,
    }
    plain, other = mlp(), mlp()
    apply(plain, rules)
    with torch.device(device):
        apply(other, rules)
        w = orthogonal_(torch.empty(5, 5, device="cpu"), generator=torch.Generator("cpu").manual_seed(0))
    assert equal(values(plain), values(other))
    assert torch.equal(w, orthogonal_(torch.empty(5, 5), generator=torch.Generator().manual_seed(0)))


def test_layout_makes_no_difference() -> None:
    plain = nn.Conv2d(8, 6, 3)
    last = nn.Conv2d(8, 6, 3).to(memory_format=torch.channels_last)
    for net in (plain, last):
        apply(net, {"weight": "xavier_uniform", "bias": "zeros"})
    assert torch.equal(plain.weight, last.weight)
    assert last.weight.is_contiguous(memory_format=torch.channels_last)


def test_one_generator_a_name() -> None:
    a = torch.rand(5, generator=generator_for(0, "a"))
    assert torch.equal(a, torch.rand(5, generator=generator_for(0, "a")))
    assert not torch.equal(a, torch.rand(5, generator=generator_for(0, "b")))
    assert not torch.equal(a, torch.rand(5, generator=generator_for(1, "a")))
    # Pinned: an initialization can be repeated with a later version.
    first = torch.empty(1 << 5, dtype=torch.int32).random_(generator=generator_for(0, "a"))[0].item()
    assert first == PINNED


PINNED = 954643205


def test_truncated_normals_keep_inside_in_half_precision() -> None:
    net = nn.Linear(300, 200).bfloat16()
    rule = functools.partial(truncated_normal_, std=1.0, low=-1.0, high=1.0, std_of="parent")
    apply(net, {"weight": rule})
    assert net.weight.abs().max() < 1


def test_the_number_of_threads_makes_no_difference() -> None:
    nets = [nn.Sequential(*(nn.Linear(40 + i, 40 + i) for i in range(12))) for _ in range(2)]
    rules = {"[0-5]*.weight": "orthogonal", "[6-9]*.weight": "he_normal", "*.bias": lambda b: b.normal_()}
    apply(nets[0], rules)
    torch.set_num_threads(4)
    apply(nets[1], rules)
    assert equal(values(nets[0]), values(nets[1]))


def test_a_generator_of_the_callers_is_used_in_the_order_of_the_parameters() -> None:
    nets = [mlp() for _ in range(2)]
    for net, threads in zip(nets, (1, 4), strict=True):
        torch.set_num_threads(threads)
        apply(net, {"*.weight": functools.partial(normal_, generator=torch.Generator().manual_seed(3))})
    assert equal(values(nets[0]) | dict.fromkeys(BIASES, ZERO), values(nets[1]) | dict.fromkeys(BIASES, ZERO))
    first = torch.empty(30, 40).normal_(generator=torch.Generator().manual_seed(3))
    assert torch.equal(nets[0]["l0"].weight, first)


BIASES, ZERO = ("l0.bias", "l1.bias", "l2.bias"), torch.zeros(1)


@pytest.mark.parametrize("size", [1, 15, 16, 63, 64, 65, 79, 80, 127, 128, 143, 144, 1001])
def test_large_half_precision_tensors_are_drawn_in_pieces_of_one_stream(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """torch draws in blocks of 16, the last one anew where it is not full."""
    monkeypatch.setattr("musigma.init.schemes._draw._CHUNK", 64)
    for scheme in (normal_, uniform_):
        whole = scheme(torch.empty(size), generator=generator_for(0, "a"))
        pieces = scheme(torch.empty(size, dtype=torch.bfloat16), generator=generator_for(0, "a"))
        assert torch.equal(pieces, whole.bfloat16())
