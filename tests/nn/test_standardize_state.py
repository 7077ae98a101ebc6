"""What Standardize holds: its own statistics, saved, loaded and copied whole or not at all."""

from __future__ import annotations

import copy
import io
from pathlib import Path

import pytest
import torch
from torch import Tensor

from musigma.inputs import Standardizer
from musigma.nn import Standardize


def test_the_layer_owns_its_statistics() -> None:
    mean, scale = torch.zeros(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    layer = Standardize(mean, scale)
    mean.fill_(7)
    scale.fill_(7)
    assert layer(torch.ones(1, 2)).tolist() == [[1.0, 1.0]]
    inverse = layer.inverse()
    layer.mean.fill_(3)
    assert inverse.mean.tolist() == [0.0, 0.0]


def test_state_dict_round_trip_without_unpickling() -> None:
    x = torch.randn(100, 3) + 1e6  # a mean that needs its second part
    layer = Standardizer().fit(x).layer()
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    fresh = Standardize([0.0] * 3, [1.0] * 3)
    fresh.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(fresh(x), layer(x))
    assert sorted(layer.state_dict()) == ["mean", "mean_tail", "scale"]


def test_safetensors_round_trip(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    layer = Standardize([1e6, 2.0], [1e-9, 3.0])
    save_file(layer.state_dict(), tmp_path / "s.safetensors")
    fresh = Standardize([0.0] * 2, [1.0] * 2)
    fresh.load_state_dict(load_file(tmp_path / "s.safetensors"))
    assert fresh.scale.tolist() == [1e-9, 3.0]


def test_a_state_dict_of_mean_and_scale_alone_is_complete() -> None:
    layer = Standardize([1.0], [2.0], mean_tail=torch.tensor([1e-17]))
    layer.load_state_dict({"mean": torch.tensor([5.0]), "scale": torch.tensor([4.0])})
    assert layer.mean_tail.tolist() == [0.0]
    assert layer(torch.tensor([[9.0]])).tolist() == [[1.0]]


@pytest.mark.parametrize(
    "bad", [{"scale": torch.tensor([1.0, 0.0])}, {"mean": torch.tensor([float("nan"), 0.0])}]
)
@pytest.mark.parametrize("strict", [True, False])
def test_bad_statistics_are_not_loaded(bad: dict[str, Tensor], strict: bool) -> None:
    model = torch.nn.Sequential(Standardize([1.0, 2.0], [3.0, 4.0]))
    state = {f"0.{k}": v for k, v in ({**model[0].state_dict(), **bad}).items()}
    with pytest.raises(RuntimeError, match=r"0\.: (scale|mean) must be"):
        model.load_state_dict(state, strict=strict)
    assert model[0].mean.tolist() == [1.0, 2.0]
    assert model[0].scale.tolist() == [3.0, 4.0]


@pytest.mark.parametrize("strict", [True, False])
def test_missing_statistics_are_named(strict: bool) -> None:
    layer = Standardize([1.0], [2.0])
    if strict:
        with pytest.raises(RuntimeError, match=r"Missing key.*mean"):
            layer.load_state_dict({})
    else:
        assert set(layer.load_state_dict({}, strict=False).missing_keys) == {"mean", "mean_tail", "scale"}
    assert layer.mean.tolist() == [1.0]


def test_meta_device_then_load() -> None:
    with torch.device("meta"):
        layer = Standardize([0.0] * 2, [1.0] * 2)
    assert layer.mean.is_meta
    assert layer(torch.empty(3, 2, device="meta")).shape == (3, 2)
    layer = layer.to_empty(device="cpu")
    layer.load_state_dict(Standardize([1.0, 2.0], [3.0, 4.0]).state_dict())
    assert layer(torch.tensor([[4.0, 6.0]])).tolist() == [[1.0, 1.0]]


def test_assigned_state_of_another_dtype_is_used_as_it_is() -> None:
    layer = Standardize([0.0], [1.0])
    state = {"mean": torch.tensor([3.0]), "mean_tail": torch.tensor([0.0]), "scale": torch.tensor([2.0])}
    layer.load_state_dict(state, assign=True)
    assert layer(torch.tensor([[5.0]])).tolist() == [[1.0]]
    assert layer(torch.tensor([[5.0]], dtype=torch.float64)).tolist() == [[1.0]]


def test_deepcopy_and_pickle_are_independent() -> None:
    layer = Standardize([1.0], [2.0], clip=3.0).half()
    twin = copy.deepcopy(layer)
    twin.mean.fill_(0)
    assert layer.mean.tolist() == [1.0]
    assert twin(torch.tensor([[9]])).dtype == torch.float16
