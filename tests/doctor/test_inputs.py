"""Rules about the data: sampling error is forgiven in batches of every size, and raw images are found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
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
