"""Times functions side by side: a round runs each of them once, and the next starts with another."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

CLOCKS: dict[str, Callable[[], float]] = {"real": time.perf_counter, "cpu": time.thread_time}
"""``"real"`` is what a user waits, ``"cpu"`` what one thread works: a busy machine does not lengthen it."""

# Reading either clock costs up to half a microsecond, so a sample is this long at least, or a call.
SAMPLE = 200e-6


@dataclass(frozen=True)
class How:
    """How to time.

    Args:
        seconds: how long each function is timed.
        clock: one of `CLOCKS`.
        seed: what the inputs start from.
        least: samples of each, whatever they take.
    """

    seconds: float = 0.25
    clock: str = "real"
    seed: int = 0
    # Quartiles need a handful; the slowest peers take a second a call, and their ratio is not in doubt
    least: int = 5


@dataclass(frozen=True)
class Spread:
    """The times of one call, in seconds: median, quartiles, number of samples."""

    median: float
    low: float
    high: float
    samples: int

    @classmethod
    def of(cls, times: list[float]) -> Spread:
        """The spread of these samples; a single one is its own quartiles."""
        if len(times) < 2:
            return cls(times[0], times[0], times[0], 1)
        low, median, high = statistics.quantiles(times, n=4, method="inclusive")
        return cls(median, low, high, len(times))

    @property
    def iqr(self) -> float:
        """The interquartile range over the median."""
        return (self.high - self.low) / self.median

    def to_dict(self) -> dict[str, float]:
        """Its fields for JSON, to four digits: more are noise."""
        return {name: float(f"{value:.4g}") for name, value in vars(self).items()} | {"samples": self.samples}


def interleave(runs: Mapping[str, Callable[[], object]], how: How) -> dict[str, Spread]:
    """Time every function.

    Args:
        runs: what to call; a result is dropped within the time it is charged with.
        how: for how long (one whose time is up sits out the later rounds) and by which clock.

    Returns:
        the spread of one call's time, by name.
    """
    now = CLOCKS[how.clock]
    with _undisturbed():
        calls = {name: _calls_a_sample(run, now) for name, run in runs.items()}
        times: dict[str, list[float]] = {name: [] for name in runs}
        left = dict.fromkeys(runs, how.seconds)
        names = list(runs)
        while names:
            for name in names:
                sample = _sample(runs[name], calls[name], now)
                times[name].append(sample / calls[name])
                left[name] -= sample
            names = [n for n in names[1:] + names[:1] if left[n] > 0 or len(times[n]) < how.least]
    return {name: Spread.of(kept) for name, kept in times.items()}


def _sample(run: Callable[[], object], calls: int, now: Callable[[], float]) -> float:
    start = now()
    for _ in range(calls):
        run()
    return now() - start


def _calls_a_sample(run: Callable[[], object], now: Callable[[], float]) -> int:
    """How many calls fill a sample; finding out warms the function up."""
    run()  # compiles, allocates, reads the input for the first time
    calls = 1
    while (taken := _sample(run, calls, now)) < SAMPLE / 2:
        calls *= 2
    return max(1, math.ceil(calls * SAMPLE / taken))


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Python's garbage is collected before and after, not in between."""
    was = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@contextmanager
def threads(n: int) -> Iterator[None]:
    """Run torch on n threads, and on as many as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def warm_up(seconds: float = 1.0) -> None:
    """Keep the cores busy until their clocks have risen."""
    a = torch.ones(512, 512)
    stop = time.perf_counter() + seconds
    while time.perf_counter() < stop:
        a @ a
