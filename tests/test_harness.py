"""The promises of `conftest.py` themselves."""

from __future__ import annotations

import os
import warnings

import pytest
import torch

import musigma

typechecked = pytest.mark.skipif(
    os.environ.get("MUSIGMA_TYPECHECK") == "off", reason="the type checker is switched off"
)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_fresh_memory_is_poisoned(dtype: torch.dtype) -> None:
    x = torch.ones(3, dtype=dtype)
    fresh = [
        torch.empty(100, dtype=dtype),
        torch.empty_like(x),
        x.new_empty(5),
        torch.empty_strided((2, 2), (1, 2), dtype=dtype),
    ]
    for t in fresh:
        assert t.isnan().all()


def test_warnings_are_errors() -> None:
    with pytest.raises(UserWarning, match="heard"):
        warnings.warn("heard", stacklevel=1)


def test_one_thread() -> None:
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize("run", [1, 2])
def test_every_test_starts_from_the_same_seed(run: int) -> None:
    torch.testing.assert_close(
        torch.rand(1).item(), torch.rand(1, generator=torch.Generator().manual_seed(0)).item()
    )


@typechecked
def test_annotations_are_enforced() -> None:
    with pytest.raises(Exception, match=r"Type-check|type hint"):
        musigma.moments("not a tensor", 0)  # type: ignore[arg-type]
