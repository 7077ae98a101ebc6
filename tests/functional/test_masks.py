"""What a mask drops is in no statistic, whatever stands there."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.testing import assert_close

import musigma as ms

f = ms.functional


@pytest.mark.parametrize("kind", ["boolean", "weights"])
def test_masked_values_do_not_enter_the_statistics(kind: str) -> None:
    lengths = torch.tensor([5, 3, 1])
    keep = (torch.arange(5) < lengths[:, None]).unsqueeze(1)  # (n, 1, length)
    x = torch.randn(3, 4, 5, requires_grad=True)
    padded = torch.where(keep, x, torch.tensor(float("nan")) if kind == "boolean" else torch.tensor(1e3))
    running, count = (torch.zeros(4), torch.ones(4)), torch.tensor(0)
    mask = keep if kind == "boolean" else keep.float()
    y = f.batch_norm(padded, *running, training=True, num_batches_tracked=count, mask=mask)

    kept = torch.cat([x[i, :, :n] for i, n in enumerate(lengths)], -1).T  # (9, 4): the real values
    expected_running = torch.zeros(4), torch.ones(4)
    expected = F.batch_norm(kept, *expected_running, training=True)
    got = torch.cat([y[i, :, :n] for i, n in enumerate(lengths)], -1).T
    assert_close(got, expected)
    assert_close(running, expected_running)
    assert count.item() == 1
    g = torch.randn(9, 4)
    (dx,) = torch.autograd.grad(got, x, g, retain_graph=True)
    (expected_dx,) = torch.autograd.grad(expected, x, g)
    assert_close(dx, expected_dx)


def test_a_mask_that_keeps_too_little_is_refused_by_channel_and_changes_nothing() -> None:
    running, count = (torch.zeros(4), torch.ones(4)), torch.tensor(0)
    keep = torch.ones(3, 4, dtype=torch.bool)
    keep[1:, 2] = False
    with pytest.raises(ValueError, match=r"Expected more than 1 value per channel.*channels \[2\]"):
        f.batch_norm(torch.randn(3, 4), *running, training=True, num_batches_tracked=count, mask=keep)
    assert torch.equal(running[0], torch.zeros(4))
    assert count.item() == 0


MASKED: dict[str, Callable[..., Tensor]] = {
    # (n, c, length) under an (n, 1, length) mask, as the same function of the values that are kept
    "instance_norm": lambda t, **k: f.instance_norm(
        t, weight=WEIGHT[: t.shape[1]], bias=BIAS[: t.shape[1]], **k
    ),
    "group_norm": lambda t, **k: f.group_norm(t, 2, WEIGHT[: t.shape[1]], BIAS[: t.shape[1]], **k),
    "layer_norm": lambda t, **k: f.layer_norm(t, t.shape[-1:], **k),
    "rms_norm": lambda t, **k: f.rms_norm(t, t.shape[-1:], **k),
}

TOLERANCES = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.bfloat16: {"rtol": 0.016, "atol": 1e-3}}

WEIGHT, BIAS = torch.linspace(0.5, 2.0, 4), torch.linspace(-1.0, 1.0, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MASKED)
def test_each_examples_padding_does_not_enter_its_statistics(name: str, dtype: torch.dtype) -> None:
    lengths = torch.tensor([5, 3, 2])
    keep = (torch.arange(5) < lengths[:, None]).unsqueeze(1)
    x = torch.randn(3, 4, 5).to(dtype).requires_grad_()
    y = MASKED[name](torch.where(keep, x, float("nan")), mask=keep, activation="silu")
    assert y.dtype == dtype
    assert y.isfinite().all()
    g = torch.randn(3, 4, 5).to(dtype) * keep
    (dx,) = torch.autograd.grad(y, x, g)
    for i, n in enumerate(lengths.tolist()):
        alone = x[i : i + 1, :, :n].detach().double().requires_grad_()
        expected = MASKED[name](alone, activation="silu")
        assert_close(y[i, :, :n], expected[0], check_dtype=False, **TOLERANCES[dtype])
        (expected_dx,) = torch.autograd.grad(expected, alone, g[i : i + 1, :, :n].double())
        # bfloat16: dx is a sum of parts that were rounded one by one
        loose = TOLERANCES[torch.float32] if dtype is torch.float32 else {"rtol": 0.02, "atol": 0.05}
        assert_close(dx[i, :, :n], expected_dx[0], check_dtype=False, **loose)
        assert not dx[i, :, n:].any()


def test_a_row_of_which_nothing_is_kept_stays_finite() -> None:
    x = torch.randn(2, 4, 5, requires_grad=True)
    keep = torch.tensor([True, False])[:, None, None]
    for name in MASKED:
        y = MASKED[name](x, mask=keep)
        assert y.isfinite().all(), name
        assert torch.autograd.grad(y.sum(), x)[0].isfinite().all(), name


def test_running_statistics_of_masked_instances_are_those_of_the_kept_values() -> None:
    keep = (torch.arange(6) < torch.tensor([6, 4])[:, None]).unsqueeze(1)
    x = torch.randn(2, 3, 6)
    running = torch.zeros(3), torch.ones(3)
    f.instance_norm(x, *running, momentum=0.5, mask=keep)
    parts = [ms.moments(x[0], -1), ms.moments(x[1, :, :4], -1)]
    assert_close(running[0].double(), sum(0.25 * m.mean for m in parts))
    assert_close(running[1].double(), 0.5 + sum(0.25 * m.var(correction=1) for m in parts))


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16, None], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["layer_norm", "group_norm", "rms_norm"])
def test_a_mask_that_keeps_all_changes_nothing(
    name: str, dtype: torch.dtype, weights: torch.dtype | None
) -> None:
    """Every combination of dtypes, weight or bias alone, and channels last: as without a mask."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 4, 5, 6, generator=generator).to(dtype).to(memory_format=torch.channels_last)
    size = 4 if name == "group_norm" else 6
    vectors = [
        None if weights is None else torch.rand(size, generator=generator).to(weights) for _ in range(2)
    ]
    for weight, bias in ((0, 1), (0, None), (None, 1)) if weights else ((None, None),):
        w, b = (None if k is None else vectors[k] for k in (weight, bias))
        call = {
            "layer_norm": partial(f.layer_norm, x, (6,), w, b),
            "group_norm": partial(f.group_norm, x, 2, w, b),
            "rms_norm": partial(f.rms_norm, x, (6,), w),
        }[name]
        got, want = call(mask=torch.ones(3, 1, 5, 1) > 0, activation="silu"), call(activation="silu")
        assert got.dtype == want.dtype
        assert got.stride() == want.stride()
        unit = torch.finfo(dtype).eps
        assert_close(got.double(), want.double(), rtol=2 * unit, atol=4 * unit)
