"""Rounds, medians and shares of time, by a clock that only the timed functions move."""

from __future__ import annotations

import gc

import pytest
import torch

from musigma.lab import bench
from musigma.lab.bench import _timing


class Clock:
    """A time that stands still unless it is moved."""

    def __init__(self) -> None:
        self.time = 0.0
        self.calls: list[str] = []

    def __call__(self) -> float:
        return self.time

    def runs(self, **seconds: float) -> dict[str, object]:
        def run(name: str) -> None:
            self.calls.append(name)
            self.time += seconds[name]

        return {name: (lambda name=name: run(name)) for name in seconds}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setitem(_timing.CLOCKS, "test", clock)
    return clock


def test_a_call_costs_what_it_takes_however_many_fill_a_sample(clock: Clock) -> None:
    found = bench.interleave(clock.runs(fast=1e-6, slow=1e-2), bench.How(0.1, "test"))
    assert found["fast"].median == pytest.approx(1e-6, rel=1e-6)
    assert found["slow"].median == pytest.approx(1e-2, rel=1e-6)
    assert found["slow"].iqr == pytest.approx(0, abs=1e-6)


def test_every_round_starts_with_another(clock: Clock) -> None:
    bench.interleave(clock.runs(a=1e-3, b=1e-3, c=1e-3), bench.How(5.5e-3, "test"))
    # The first calls of each warm it up and count its calls
    rounds = "".join(clock.calls[-18:])
    assert rounds == "abcbcacababcbcacab"


def test_the_slow_one_stops_when_its_time_is_up_and_the_others_go_on(clock: Clock) -> None:
    found = bench.interleave(clock.runs(slow=1.0, fast=1e-3), bench.How(0.5, "test", least=3))
    assert found["slow"].samples == 3
    assert found["fast"].samples >= 500


def test_garbage_is_collected_again_afterwards(clock: Clock) -> None:
    def fails() -> None:
        assert not gc.isenabled()
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        bench.interleave({"a": fails}, bench.How(0.1, "test"))
    assert gc.isenabled()


def test_quartiles_are_of_the_samples() -> None:
    assert bench.Spread.of([4.0, 1.0, 3.0, 2.0, 5.0]) == bench.Spread(3.0, 2.0, 4.0, 5)
    assert bench.Spread.of([7.0]) == bench.Spread(7.0, 7.0, 7.0, 1)
    assert bench.Spread(2.0, 1.0, 4.0, 9).iqr == 1.5


def test_the_number_of_threads_is_given_back() -> None:
    with _timing.threads(2):
        assert torch.get_num_threads() == 2
    assert torch.get_num_threads() == 1
