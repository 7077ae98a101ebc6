"""What a run comes to: means over its cells, and every bar with the cells that miss it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from musigma.lab.bench._row import AS_IT_COMES, REUSED, Row, Run

PEERS = {"eager": 3.0, "compiled": 1.5}
"""The peers, and how many times faster ours is to be in the geometric mean."""

# Identical code measures 0.94 to 1.00 of itself, 0.97 in the middle; below 20 µs a call's own overhead and
# the clock's steps are a tenth of what is measured.
SLOWEST, SLOWEST_SMALL, SMALL = 0.97, 0.9, 20e-6

# In copies of the input. A forward that reads memory once is 1.0, BatchNorm's (twice: its channels do not fit
# in cache) 1.5; a backward that reads x and dy and writes dx is 1.5, BatchNorm's 2.5.
FORWARD, FORWARD_BATCH = 1.2, 1.7
BACKWARD, BACKWARD_BATCH = 2.0, 2.8

# Over the inputs' bytes, beside two float64 accumulators a row, group or channel.
SAVED = 1.05
ACCUMULATORS = 2 * 8


@dataclass(frozen=True)
class Judged:
    """One cell before one bar."""

    name: str
    value: float
    limit: float
    met: bool


@dataclass(frozen=True)
class Bar:
    """One bar and every cell it applies to.

    Args:
        title: what is asked.
        unit: what a value counts, ``"×"`` or ``"copies"``.
        judged: the cells.
    """

    title: str
    unit: str
    judged: tuple[Judged, ...]

    @property
    def missed(self) -> tuple[Judged, ...]:
        """The cells that miss it, the worst first."""
        return tuple(
            sorted((j for j in self.judged if not j.met), key=lambda j: -abs(math.log(j.value / j.limit)))
        )


@dataclass(frozen=True)
class Mean:
    """The geometric mean of how many times faster ours is."""

    over: str
    allocator: str
    cells: int
    value: float

    @property
    def met(self) -> bool:
        """Whether it reaches its bar."""
        return self.value >= PEERS[self.over]


def geometric_mean(values: Iterable[float]) -> float:
    """exp(mean(log v)); NaN of nothing.

    Example:
        >>> from musigma.lab import bench
        >>> round(bench.geometric_mean([1.0, 4.0]), 6)
        2.0
    """
    logs = [math.log(value) for value in values]
    return math.exp(math.fsum(logs) / len(logs)) if logs else math.nan


def allocators(run: Run) -> list[str]:
    """The states of the allocator that the run was measured in, in order."""
    return [name for name in (AS_IT_COMES, REUSED) if any(name in row.times for row in run.all)]


def means(run: Run) -> tuple[Mean, ...]:
    """The geometric means over every cell that has the peer."""
    found = []
    for allocator in allocators(run):
        for peer in PEERS:
            speedups = [s for row in run.rows if (s := row.speedup(peer, allocator)) is not None]
            if speedups:
                found.append(Mean(peer, allocator, len(speedups), geometric_mean(speedups)))
    return tuple(found)


def bars(run: Run) -> tuple[Bar, ...]:
    """Every bar that some cell of the run stands before."""
    found = [
        Bar(f"no slower than {peer}, {allocator}", "×", tuple(_no_slower(run.rows, peer, allocator)))
        for allocator in allocators(run)
        for peer in PEERS
    ]
    found += [
        Bar(
            "forward of large cells over a copy, buffers reused",
            "copies",
            tuple(_over_copy(run.rows, "ours")),
        ),
        Bar(
            "backward of large cells over a copy, buffers reused",
            "copies",
            tuple(_over_copy(run.rows, "backward")),
        ),
        Bar("saved for backward over the inputs", "×", tuple(_saved(run.rows))),
    ]
    return tuple(bar for bar in found if bar.judged)


def judged_against(row: Row, peer: str, allocator: str) -> Judged | None:
    """Whether a row is no slower than a peer; None where one of the two was not timed."""
    speedup = row.speedup(peer, allocator)
    if speedup is None:
        return None
    limit = SLOWEST if row.times[allocator][peer].median > SMALL else SLOWEST_SMALL
    return Judged(row.cell.name, speedup, limit, speedup >= limit)


def _no_slower(rows: Iterable[Row], peer: str, allocator: str) -> Iterable[Judged]:
    return [judged for row in rows if (judged := judged_against(row, peer, allocator)) is not None]


def _over_copy(rows: Iterable[Row], of: str) -> Iterable[Judged]:
    for row in rows:
        if not row.cell.large or row.cell.backward != (of == "backward"):
            continue
        copies = row.copies(of)
        if copies is not None:
            batch = row.cell.op == "batch_norm"
            limit = {"ours": (FORWARD, FORWARD_BATCH), "backward": (BACKWARD, BACKWARD_BATCH)}[of][batch]
            yield Judged(row.cell.name, copies, limit, copies <= limit)


def _saved(rows: Iterable[Row]) -> Iterable[Judged]:
    seen = set()
    for row in rows:
        # The number of threads makes no difference
        alike = row.cell.variant, row.cell.what.partition(",")[0]
        if row.saved is not None and alike not in seen:
            seen.add(alike)
            accumulators = ACCUMULATORS * row.cell.statistics
            value = max(0, row.saved.ours - accumulators) / row.saved.inputs
            yield Judged(" ".join(alike), value, SAVED, value <= SAVED)
