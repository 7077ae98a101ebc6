"""What is written can be read: as JSON by this program, as SVG by a browser, as markdown by a person."""

from __future__ import annotations

import json
import math
from pathlib import Path
from xml.etree import ElementTree

import pytest

from musigma.lab import bench
from musigma.lab.bench import AS_IT_COMES, REUSED

SVG = "{http://www.w3.org/2000/svg}"


def times(**seconds: float) -> dict[str, bench.Spread]:
    # four digits are what is written
    return {
        name: bench.Spread(s, *(float(f"{s * share:.4g}") for share in (0.98, 1.03)), 7)
        for name, s in seconds.items()
    }


@pytest.fixture
def run() -> bench.Run:
    """One fast row, one slower than its peer, one wrong, and a model."""
    fast = bench.Row(
        cell=bench.Cell("batch_norm", (32, 64, 56, 56), "bfloat16", True, True, "relu", True, 2),
        errors=(bench.Error("y", 0.5, 70.0), bench.Error("dx", 0.75, math.inf)),
        saved=bench.Saved(1000, 2000, 900),
        times={
            AS_IT_COMES: times(copy=1e-3, eager=9e-3, compiled=4e-3, ours=3e-3, backward=2e-3),
            REUSED: times(copy=1e-3, eager=8e-3, compiled=3e-3, ours=2.5e-3, backward=1e-3),
        },
    )
    slow = bench.Row(
        cell=bench.Cell("layer_norm", (64, 768), threads=2),
        errors=(bench.Error("y", 0.5, 0.5),),
        times={AS_IT_COMES: times(copy=1e-6, eager=3e-5, ours=6e-5)},
    )
    wrong = bench.Row(cell=bench.Cell("rms_norm", (64, 768)), errors=(bench.Error("y", math.inf, 1.0),))
    model = bench.ModelRow(
        model="CNN <&>",
        threads=2,
        errors=(bench.Error("loss", 1.0, 1.0),),
        saved=bench.Saved(50, 100, 0),
        times={AS_IT_COMES: times(eager=0.2, ours=0.1)},
    )
    machine = {"cpu": "A & B", "torch": "2.13.0", "musigma": "0.1.0", "python": "3.11", "platform": "Linux"}
    return bench.Run((fast, slow, wrong), (model,), machine, {"seconds": 0.1, "clock": "real"})


def test_json_comes_back_as_it_was(run: bench.Run, tmp_path: Path) -> None:
    run.write(tmp_path / "bench.json")
    assert bench.Run.read(tmp_path / "bench.json") == run


def test_json_is_strict_and_says_machine_versions_and_settings(run: bench.Run, tmp_path: Path) -> None:
    run.write(tmp_path / "bench.json")
    text = (tmp_path / "bench.json").read_text()

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    told = json.loads(text, parse_constant=refuse)
    assert list(told) == ["schema", "machine", "settings", "rows", "models"]
    assert (told["schema"], told["machine"]["cpu"], told["settings"]["clock"]) == (1, "A & B", "real")
    assert set(told["rows"][0]) == {"cell", "errors", "saved", "times"}
    assert set(told["rows"][0]["times"][AS_IT_COMES]["ours"]) == {"median", "low", "high", "samples"}
    assert told["rows"][0]["errors"] == {"y": [0.5, 70.0], "dx": [0.75, "inf"]}
    # a row a line, for whoever compares two runs
    assert sum(line.startswith("    {") for line in text.splitlines()) == 4


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "is not what musigma bench --json writes"),
        ("{", "is not what musigma bench --json writes"),
        ('{"rows": []}', "is not what musigma bench --json writes"),
        ('{"schema": 99}', "is of schema 99, and this reads 1; run the bench again"),
    ],
)
def test_another_file_is_refused(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ValueError, match=said):
        bench.Run.read(tmp_path / "x.json")


def test_the_picture_has_a_dot_for_every_row_and_peer(run: bench.Run) -> None:
    drawn = ElementTree.fromstring(bench.picture(run))
    titles = [t.text for t in drawn.iterfind(f".//{SVG}circle/{SVG}title")]
    fast, slow, _ = (row.name for row in run.rows)
    # LayerNorm's lane lies above BatchNorm's, and the panel of torch.compile right of torch's
    assert titles == [f"{slow}: 0.50×", f"{fast}: 3.00×", f"{fast}: 1.33×"]


def test_a_row_below_the_bar_is_hollow(run: bench.Run) -> None:
    drawn = ElementTree.fromstring(bench.picture(run))
    hollow = {
        c.findtext(f"{SVG}title")
        for c in drawn.iterfind(f".//{SVG}circle")
        if c.get("fill") == "none" and c.find(f"{SVG}title") is not None
    }
    assert hollow == {f"{run.rows[1].name}: 0.50×"}


def test_the_picture_names_the_machine_and_follows_light_and_dark(run: bench.Run) -> None:
    text = bench.picture(run)
    assert "A &amp; B, 1 and 2 threads, torch 2.13.0, musigma 0.1.0, memory as it comes, 3 rows" in text
    assert "@media (prefers-color-scheme: dark)" in text
    assert "1.2 times as fast as torch and 1.3 times as fast as torch.compile" in text


def test_every_mark_lies_inside_the_picture(run: bench.Run) -> None:
    drawn = ElementTree.fromstring(bench.picture(run))
    width, height = (float(drawn.get(k) or "nan") for k in ("width", "height"))
    for mark in drawn.iter(f"{SVG}circle"):
        assert 0 < float(mark.get("cx") or "nan") < width
        assert 0 < float(mark.get("cy") or "nan") < height


def test_nothing_measured_still_draws(run: bench.Run) -> None:
    drawn = ElementTree.fromstring(bench.picture(bench.Run(run.rows[2:])))
    assert "Nothing was measured" in "".join(drawn.itertext())


def test_the_short_form_has_the_means_and_how_many_are_slower(run: bench.Run) -> None:
    told = bench.short(run)
    assert (
        "Geometric mean: 1.2 times as fast as torch over 2 rows, 1.3 times as fast as torch.compile" in told
    )
    assert "1 of 2 rows are slower than torch, 0.50 times as fast at worst" in told
    assert "| step of CNN <&>, 2 threads | 200 ms ±5% |  | 100 ms ±5% |" in told


def test_the_long_form_lists_every_miss(run: bench.Run) -> None:
    told = bench.long(run)
    for bar in bench.bars(run):
        for judged in bar.missed:
            assert f"| {judged.name} | {judged.value:.2f} | {judged.limit:g} |" in told
    assert "| CNN <&> | 2 | 200 ms ±5% | 100 ms ±5% | 2.00 | 0.50 |" in told
    assert (
        sum(
            line.startswith(("| batch_norm+add+relu", "| layer_norm", "| rms_norm"))
            for line in told.splitlines()
        )
        >= 3
    )


def test_a_page_keeps_all_that_is_not_between_its_marks(run: bench.Run, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- bench: short -->\nold\n<!-- /bench -->\nafter\n")
    bench.write_into(page, run)
    text = page.read_text()
    assert text.startswith("before\n<!-- bench: short -->\n\n| ")
    assert text.endswith("\n\n<!-- /bench -->\nafter\n")
    assert "old" not in text
    bench.write_into(page, run)
    assert page.read_text() == text


def test_a_page_without_marks_is_left_as_it_is(run: bench.Run, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- bench: short -->\n")
    with pytest.raises(ValueError, match="must hold <!-- bench: short -->"):
        bench.write_into(page, run)
    assert page.read_text() == "<!-- bench: short -->\n"
