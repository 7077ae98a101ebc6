"""A long run outlives what goes wrong in one cell, and keeps what it has when it is interrupted."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from musigma._errors import MusigmaWarning
from musigma.lab import bench
from musigma.lab.bench import _measure, _worker

CELLS = bench.select(bench.everything([1]), ["layer_norm 1×768 float32"])
HOW = bench.How(0.001, least=2)


def test_an_exception_in_one_cell_is_told_and_the_next_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    right = _measure.times

    def fails(cell: bench.Cell, *args: object, **kwargs: object) -> object:
        if not cell.backward:
            raise RuntimeError("a kernel\nand its stack")
        return right(cell, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(_measure, "times", fails)
    run = bench.run(CELLS, settings=bench.Settings(seconds=0.001, reused=False))
    assert [row.right for row in run.rows] == [False, True]
    assert "WRONG: RuntimeError: a kernel is off" in bench.line(run.rows[0])
    assert not run.rows[0].times
    assert run.rows[1].times


def test_an_interrupt_keeps_what_is_there(tmp_path: Path) -> None:
    def interrupt(row: bench.Measured) -> None:
        raise KeyboardInterrupt

    run = bench.run(CELLS, settings=bench.Settings(seconds=0.001, reused=False), done=interrupt)
    assert [row.cell for row in run.rows] == CELLS[:1]
    assert run.settings["interrupted"]
    run.write(tmp_path / "part.json")
    assert json.loads((tmp_path / "part.json").read_text())["settings"]["interrupted"] is True


def test_a_torch_compile_that_fails_costs_its_column_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler(*args: object, **kwargs: object) -> object:
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr("torch.compile", no_compiler)
    with pytest.warns(MusigmaWarning, match=r"torch.compile fails on layer_norm .*: no C\+\+ compiler"):
        times = _measure.times(CELLS[0], HOW, compiled=True)
    assert set(times) == {"copy", "eager", "ours"}


@pytest.mark.skipif(not bench.CAN_REUSE, reason="the thresholds are glibc's")
def test_the_other_process_is_replaced_when_it_ends() -> None:
    with _worker.Worker() as worker:
        first = worker._process
        assert set(worker.times(CELLS[0], HOW, compiled=False)) == {"copy", "eager", "ours"}
        first.send_signal(signal.SIGINT)  # not meant for it
        assert set(worker.times(CELLS[1], HOW, compiled=False)) == {"copy", "eager", "ours"}
        first.kill()
        with pytest.raises(RuntimeError, match="ended with -9"):
            worker.times(CELLS[0], HOW, compiled=False)
        assert set(worker.times(CELLS[0], HOW, compiled=False)) == {"copy", "eager", "ours"}
        second = worker._process
    assert second is not first
    assert second.returncode == 0


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_forward_alone_records_nothing(cell: bench.Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = {}

    def call_once(runs: dict[str, Callable[[], object]], how: bench.How) -> dict[str, bench.Spread]:
        recorded.update({name: torch.is_grad_enabled() for name, run in runs.items() if run() is not None})
        return {}

    monkeypatch.setattr(_measure, "interleave", call_once)
    _measure.times(cell, HOW)
    assert recorded == dict.fromkeys(("copy", "eager", "ours"), cell.backward)
    assert torch.is_grad_enabled()
