"""Means and bars, on rows whose times are made up."""

from __future__ import annotations

import math
import re

import pytest

from musigma.lab import bench
from musigma.lab.bench import AS_IT_COMES, REUSED


def spread(seconds: float) -> bench.Spread:
    return bench.Spread(seconds, seconds, seconds, 5)


def row(cell: bench.Cell, *, saved: bench.Saved | None = None, **seconds: float) -> bench.Row:
    times = {name: spread(s) for name, s in seconds.items()}
    return bench.Row(cell=cell, saved=saved, times={AS_IT_COMES: times, REUSED: times})


def missed(*rows: bench.Row) -> dict[str, list[float]]:
    return {bar.title: [round(j.value, 4) for j in bar.missed] for bar in bench.bars(bench.Run(rows))}


CELL = bench.Cell("layer_norm", (64, 768))
LARGE = bench.Cell("layer_norm", (4096, 1024))


def test_the_geometric_mean_is_that_of_the_ratios() -> None:
    assert bench.geometric_mean([2.0, 8.0]) == pytest.approx(4.0)
    assert bench.geometric_mean([0.5, 2.0]) == pytest.approx(1.0)
    assert math.isnan(bench.geometric_mean([]))


def test_a_mean_takes_in_every_row_that_has_the_peer() -> None:
    run = bench.Run(
        (
            row(CELL, eager=4.0, compiled=3.0, ours=1.0),
            row(CELL, eager=1.0, ours=1.0),
            bench.Row(cell=CELL, times={AS_IT_COMES: {"eager": spread(2.0), "ours": spread(1.0)}}),
        )
    )
    told = {(m.over, m.allocator): (m.cells, round(m.value, 6), m.met) for m in bench.means(run)}
    assert told == {
        ("eager", AS_IT_COMES): (3, 2.0, False),
        ("eager", REUSED): (2, 2.0, False),
        ("compiled", AS_IT_COMES): (1, 3.0, True),
        ("compiled", REUSED): (1, 3.0, True),
    }


@pytest.mark.parametrize(
    ("peer", "ratio", "right"),
    [(21e-6, 0.98, True), (21e-6, 0.96, False), (19e-6, 0.91, True), (19e-6, 0.89, False)],
)
def test_a_small_peer_leaves_a_larger_margin(peer: float, ratio: float, right: bool) -> None:
    found = missed(row(CELL, eager=peer, ours=peer / ratio))
    assert found[f"no slower than eager, {AS_IT_COMES}"] == ([] if right else [ratio])
    assert found[f"no slower than eager, {REUSED}"] == ([] if right else [ratio])


@pytest.mark.parametrize(
    ("op", "direction", "limit"),
    [
        ("layer_norm", "forward", 1.2),
        ("batch_norm", "forward", 1.7),
        ("batch_norm_eval", "forward", 1.2),
        ("layer_norm", "backward", 2.0),
        ("batch_norm", "backward", 2.8),
        ("batch_norm_eval", "backward", 2.0),
    ],
)
@pytest.mark.parametrize("above", [False, True])
def test_a_large_cell_is_held_against_a_copy(op: str, direction: str, limit: float, above: bool) -> None:
    cell = bench.Cell(op, (32, 64, 56, 56), backward=direction == "backward")
    copies = round(limit + (0.01 if above else -0.01), 4)
    who = "backward" if cell.backward else "ours"
    found = missed(row(cell, **({"copy": 1.0, "ours": 9.0} | {who: copies})))
    assert found[f"{direction} of large cells over a copy, buffers reused"] == ([copies] if above else [])


def test_a_small_cell_is_not() -> None:
    assert not any("copy" in title for title in missed(row(CELL, copy=1.0, ours=9.0, eager=9.0)))


def test_more_tensors_than_a_plain_norm_moves_are_allowed_for() -> None:
    # twice the bytes, so twice the time
    cell = bench.Cell("add_rms_norm", (4096, 1024))
    title = "forward of large cells over a copy, buffers reused"
    assert missed(row(cell, copy=1.0, ours=2.39))[title] == []
    assert missed(row(cell, copy=1.0, ours=2.41))[title] == [1.205]


def test_saved_is_held_against_the_inputs_and_two_accumulators_a_row() -> None:
    cell = bench.Cell("layer_norm", (64, 768), backward=True)
    title, inputs = "saved for backward over the inputs", 64 * 768 * 4
    accumulators = 64 * 2 * 8
    for more, found in ((0, []), (inputs // 10, [1.1])):
        saved = bench.Saved(inputs + accumulators + more, 0, inputs)
        assert missed(row(cell, saved=saved, ours=1.0))[title] == pytest.approx(found, abs=1e-3)


def test_saved_is_judged_once_for_all_numbers_of_threads() -> None:
    rows = [
        row(
            bench.Cell("layer_norm", (64, 768), backward=True, threads=n),
            saved=bench.Saved(9, 9, 9),
            ours=1.0,
        )
        for n in (1, 2)
    ]
    (bar,) = (bar for bar in bench.bars(bench.Run(tuple(rows))) if "saved" in bar.title)
    assert len(bar.judged) == 1


def test_the_worst_miss_is_told_first_and_none_is_hidden() -> None:
    rows = [row(CELL, eager=ratio, ours=1.0) for ratio in (0.9, 0.5, 1.5, 0.7)]
    lines = list(bench.summary(bench.Run(tuple(rows))))
    assert lines[0] == "geometric mean, as it comes: 0.83 times eager over 4 rows, which misses 3"
    title = lines.index("no slower than eager, as it comes: 1 of 4")
    told = lines[title + 1 : title + 4]
    assert [re.findall(r"[\d.]+", line)[0] for line in told] == ["0.50", "0.70", "0.90"]
    assert all("(at least 0.97)  layer_norm 64×768 float32 forward, 1 thread" in line for line in told)
    short = list(bench.summary(bench.Run(tuple(rows)), shown=1))
    assert "    and 2 more" in short


def test_a_wrong_row_has_no_times_and_says_by_how_much() -> None:
    wrong = bench.Row(cell=CELL, errors=(bench.Error("y", 1.0, 1.0), bench.Error("dx", 1e6, 2.0)))
    run = bench.Run((wrong,))
    assert not run.right
    assert "WRONG: dx is off by 1e+06, torch's by 2" in bench.line(wrong)
    assert list(bench.summary(run)) == ["wrong, and so not timed: 1"]
    assert bench.bars(run) == ()


def test_a_line_shows_times_spreads_and_ratios() -> None:
    told = row(
        bench.Cell("rms_norm", (64, 768), "bfloat16", backward=True, threads=2),
        copy=1e-6,
        eager=3e-4,
        ours=5e-5,
    )
    assert re.split(r"\s{2,}", bench.line(told)) == [
        "rms_norm 64×768 bf16 fwd+bwd, 2t",
        "1.0",
        "300 ±0%",
        "50.0 ±0%",
        "6.00×",
        "6.00×",
        "50.00",
    ]
