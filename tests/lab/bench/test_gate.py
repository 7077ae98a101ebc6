"""A kernel that computes something else is caught before anyone is told how fast it is."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from musigma.lab import bench
from musigma.lab.bench import _calls, _measure

SMALL = {2: (6, 10), 4: (3, 64, 4, 5), 5: (2, 32, 2, 3, 2)}


def small(cell: bench.Cell) -> bench.Cell:
    shape = (6, 64) if cell.op in bench.CHANNELS and len(cell.shape) == 2 else SMALL[len(cell.shape)]
    return bench.Cell(cell.op, shape, cell.dtype, cell.channels_last, cell.add, cell.activation)


KINDS = list(dict.fromkeys(small(cell) for cell in bench.full((1,))))


@pytest.mark.parametrize("cell", KINDS, ids=lambda cell: cell.name)
def test_ours_passes_in_every_kind_of_cell(cell: bench.Cell) -> None:
    errors = bench.gate(cell)
    assert all(error.right for error in errors), errors
    names = [error.result for error in errors]
    assert {"y", "dx", "dweight"} <= set(names)
    assert ("sum" in names) == cell.op.startswith("add_")
    assert ("dresidual" in names) == cell.residual
    assert ("running_var" in names) == cell.op.startswith("batch_norm")


def wrong(change: Callable[..., tuple[Tensor, ...]], cell: bench.Cell) -> list[str]:
    """The results that the gate refuses when `change` is done to what ours returns."""
    ours = _calls.function(cell, "ours")
    changed = _calls.Function(lambda *leaves: change(leaves, *ours.call(*leaves)), ours.running)
    return [error.result for error in bench.gate(cell, ours=changed) if not error.right]


LAYER = bench.Cell("layer_norm", (64, 96), activation="gelu")


def test_a_result_off_by_a_thousandth_is_caught() -> None:
    assert "y" in wrong(lambda leaves, y: (y * 1.001,), LAYER)


def test_a_single_wrong_value_is_caught() -> None:
    bump = torch.zeros(64, 96)
    bump[-1, -1] = 1e-3
    assert wrong(lambda leaves, y: (y + bump,), LAYER) == ["y"]


def test_a_bias_without_its_gradient_is_caught() -> None:
    assert wrong(lambda leaves, y: (y + 0.5 * (leaves[2] - leaves[2].detach()),), LAYER) == ["dbias"]


def test_a_gradient_of_one_residual_alone_is_caught() -> None:
    cell = bench.Cell("add_rms_norm", (8, 96))
    assert wrong(lambda leaves, y, s: (y, s + (leaves[1] - leaves[1].detach())), cell) == ["dresidual"]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_caught(value: float) -> None:
    assert "y" in wrong(lambda leaves, y: (torch.where(y == y.max(), value, y),), LAYER)


def test_running_statistics_that_stand_still_are_caught() -> None:
    cell = bench.Cell("batch_norm", (16, 64))
    ours = _calls.function(cell, "ours")
    frozen = _calls.Function(ours.call, tuple(t.clone() for t in ours.running))
    assert [e.result for e in bench.gate(cell, ours=frozen) if not e.right] == ["running_mean", "running_var"]


def test_an_exception_is_a_wrong_result_with_its_message() -> None:
    def fails(*leaves: Tensor) -> tuple[Tensor, ...]:
        raise RuntimeError("no kernel")

    (error,) = bench.gate(LAYER, ours=_calls.Function(fails))
    assert not error.right
    assert error.result == "RuntimeError: no kernel"


def test_both_libraries_compute_on_the_same_inputs_and_leave_them_alone() -> None:
    cell = bench.Cell("batch_norm", (4, 8, 3, 3), "bfloat16", True, True, "relu")
    given, again = _calls.inputs(cell), _calls.inputs(cell)
    bench.gate(cell)
    for library in ("ours", "torch"):
        _calls.runner(_calls.function(cell, library).call, given, backward=True)()
    assert all(torch.equal(a, b) for a, b in zip(given.leaves, again.leaves, strict=True))
    assert given.x.is_contiguous(memory_format=torch.channels_last)


def test_kept_for_backward_counts_each_storage_once_and_no_parameters() -> None:
    x, w = torch.randn(8, 4, requires_grad=True), torch.randn(4, requires_grad=True)
    # x·w keeps x and w; its sigmoid keeps its result, which the product with itself keeps twice more
    assert _measure.kept(lambda: x * w, [w]) == x.nbytes
    assert _measure.kept(lambda: (y := (x * w).sigmoid()) * y, [w]) == 2 * x.nbytes
    assert _measure.saved(bench.Cell("add_layer_norm", (8, 64))).inputs == 2 * 8 * 64 * 4
