"""Rules about the data: sampling error is forgiven in batches of every size, and raw images are found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from musigma.doctor import Report, examine


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def judged(x: Any, *, model: nn.Module | None = None) -> Report:
    if model is None:
        model = nn.Conv2d(x.shape[1], 4, 3) if x.ndim == 4 else nn.Linear(x.shape[-1], 4)
    return examine(model, x, select=["INP"])


# ---------------------------------------------------------------- INP101


@pytest.mark.parametrize(
    "shape", [(16,), (256,), (9, 16), (3, 8, 8)], ids=["few", "many", "tokens", "images"]
)
@pytest.mark.parametrize("examples", [1, 2, 3, 5, 63])
def test_standard_normal_inputs_in_small_batches_are_fine(examples: int, shape: tuple[int, ...]) -> None:
    for seed in range(4):
        assert judged(normal(examples, *shape, seed=seed)).codes == ()


@pytest.mark.parametrize("kind", ["uniform", "binary", "exponential"])
@pytest.mark.parametrize("examples", [2, 3, 4, 8])
def test_other_standardized_inputs_in_small_batches_are_fine(kind: str, examples: int) -> None:
    for seed in range(4):
        u = torch.rand(examples, 64, generator=torch.Generator().manual_seed(seed)).clamp_min(1e-6)
        x = {"uniform": (u - 0.5) * 12**0.5, "binary": (u > 0.5) * 2.0 - 1, "exponential": -u.log() - 1}[kind]
        assert "INP101" not in judged(x).codes


@pytest.mark.parametrize("examples", [2, 3, 4, 8, 63])
@pytest.mark.parametrize(("mean", "std"), [(100.0, 1.0), (0.0, 1e4), (1000.0, 300.0)])
def test_inputs_far_from_standard_are_found_in_small_batches(examples: int, mean: float, std: float) -> None:
    """Whatever σ explains a mean of 100 by chance is itself far from 1."""
    assert "INP101" in judged(normal(examples, 32) * std + mean).codes


def test_a_layer_named_by_a_number_is_quoted() -> None:
    net = nn.Sequential(nn.Linear(20, 4), nn.ReLU())
    (finding,) = judged(normal(64, 20) + 50, model=net).by_code("INP101")
    assert "reach '0' far from" in finding.message


# ---------------------------------------------------------------- INP102


@pytest.mark.parametrize("examples", [1, 2, 3, 4])
def test_features_that_are_equal_in_a_few_examples_are_chance(examples: int) -> None:
    x = normal(examples, 8)
    x[:, 2] = 0.5
    assert judged(x).codes == ()


@pytest.mark.parametrize("count", [8, 100])
def test_flags_are_not_constant_because_a_few_examples_share_them(count: int) -> None:
    for examples in (2, 4, 8, 16):
        found = 0
        for seed in range(4):
            x = torch.randint(2, (examples, count), generator=torch.Generator().manual_seed(seed)) * 2.0 - 1
            found += "INP102" in judged(x).codes
        # Four batches with a chance of a tenth at most: more than two four times in a thousand.
        assert found <= 2


def test_a_constant_feature_of_a_usual_batch_is_found() -> None:
    x = normal(16, 8)
    x[:, 2] = 0.5
    assert judged(x).by_code("INP102")[0].evidence["constant"] == [2]


# ---------------------------------------------------------------- INP104


def photo(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(256, shape, generator=torch.Generator().manual_seed(seed)).float()


def resized(mode: str) -> Tensor:
    blocks = photo(8, 3, 3, 3).repeat_interleave(4, 2).repeat_interleave(4, 3)
    return F.interpolate(blocks, size=(9, 9), mode=mode)


RAW: dict[str, tuple[Tensor, nn.Module]] = {
    "whole": (photo(4, 3, 8, 8), nn.Conv2d(3, 4, 3)),
    "one image": (photo(1, 3, 8, 8), nn.Conv2d(3, 4, 3)),
    "bilinear": (resized("bilinear"), nn.Conv2d(3, 4, 3)),
    "bicubic": (resized("bicubic"), nn.Conv2d(3, 4, 3)),
    "uniform": (torch.rand(8, 1, 8, 8, generator=torch.Generator().manual_seed(0)) * 255, nn.Conv2d(1, 4, 3)),
    "video": (photo(4, 3, 5, 8, 8) * 0.99, nn.Conv3d(3, 4, 3)),
    "flattened": (resized("bilinear"), nn.Sequential(nn.Flatten(), nn.Linear(243, 4))),
    "channels last": (resized("bilinear").permute(0, 2, 3, 1), nn.Linear(3, 4)),
    "whole rows": (photo(8, 64), nn.Linear(64, 4)),
}


@pytest.mark.parametrize("name", RAW)
def test_images_in_the_range_of_bytes_are_found(name: str) -> None:
    x, model = RAW[name]
    (finding,) = judged(x, model=model).by_code("INP104")
    assert finding.evidence["high"] == pytest.approx(float(x.max()))


OTHER: dict[str, tuple[Tensor, nn.Module]] = {
    "unit range": (photo(8, 3, 8, 8) / 255, nn.Conv2d(3, 4, 3)),
    "wide noise": (normal(8, 3, 8, 8) * 60, nn.Conv2d(3, 4, 3)),
    "feature maps": (normal(8, 16, 8, 8).abs() * 60, nn.Conv2d(16, 4, 3)),
    "beyond bytes": (normal(8, 3, 8, 8).abs() * 400, nn.Conv2d(3, 4, 3)),
    "magnitudes": (normal(8, 1, 8, 8).abs() * 10, nn.Conv2d(1, 4, 3)),
    "a table": (torch.rand(64, 64, generator=torch.Generator().manual_seed(0)) * 255, nn.Linear(64, 4)),
    "sequences": (torch.rand(8, 9, 3, generator=torch.Generator().manual_seed(0)) * 255, nn.Linear(3, 4)),
    "divided inside": (photo(8, 3, 8, 8), nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3))),
}


@pytest.mark.parametrize("name", OTHER)
def test_other_data_are_no_images(name: str) -> None:
    x, model = OTHER[name]
    assert "INP104" not in judged(x, model=model).codes
