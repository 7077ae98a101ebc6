"""`musigma bench` as a user types it, on the smallest cells there are."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from musigma import functional
from musigma.cli._app import app
from musigma.lab import bench

RUNNER = CliRunner()
TWO = ["bench", "--only", "layer_norm 1x768 float32", "--threads", "1", "--no-compile", "--seconds", "0.001"]


def test_two_cells_in_seconds_written_everywhere(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Title\n<!-- bench: long -->\n<!-- /bench -->\n")
    written, drawn = tmp_path / "bench.json", tmp_path / "bench.svg"
    done = RUNNER.invoke(app, [*TWO, "--json", str(written), "--picture", str(drawn), "--into", str(page)])
    assert done.exit_code == 0, done.output
    names = [cell.name for cell in bench.select(bench.everything([1]), ["layer_norm 1×768 float32"])]
    assert len(names) == 2
    told = json.loads(written.read_text())
    assert [set(row["times"]) for row in told["rows"]] == [{bench.AS_IT_COMES, bench.REUSED}] * 2
    assert [set(row["times"][bench.REUSED]) for row in told["rows"]] == [{"copy", "eager", "ours"}] * 2
    assert {"torch", "cpu", "musigma"} <= set(told["machine"])
    assert {"seconds", "clock", "seed", "took"} <= set(told["settings"])
    assert len(list(ElementTree.parse(drawn).iter())) > 10
    assert all(f"| {name} | " in page.read_text() for name in names)
    assert "geometric mean, as it comes" in done.stdout
    again = RUNNER.invoke(app, ["bench", "--from", str(written), "--markdown"])
    assert again.exit_code == 0
    assert again.stdout.startswith(done.stdout)
    assert bench.long(bench.Run.read(written)) in again.stdout


def test_a_wrong_kernel_is_not_timed_and_exits_1(monkeypatch: pytest.MonkeyPatch) -> None:
    right = functional.layer_norm

    def wrong(x: Tensor, *args: object, **kwargs: object) -> Tensor:
        return right(x, *args, **kwargs) * 1.01  # type: ignore[arg-type]

    monkeypatch.setattr(functional, "layer_norm", wrong)
    done = RUNNER.invoke(app, [*TWO, "--no-reused"])
    assert done.exit_code == 1
    assert done.stdout.count("WRONG: ") == 2
    assert "wrong, and so not timed: 2" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--only", "no_such_norm"],
            "--only: no cell is called 'no_such_norm'; a name looks like 'layer_norm",
        ),
        (["--threads", "two"], "--threads must be whole numbers from 1 on, with commas between; got 'two'"),
        (["--threads", "0"], "--threads must be whole numbers from 1 on"),
        (["--clock", "cpu", "--threads", "2"], "--clock cpu counts the work of one thread"),
        (["--json", "nowhere/x.json"], "--json: there is no folder nowhere"),
        (["--picture", "nowhere/x.svg"], "--picture: there is no folder nowhere"),
        (["--into", "nowhere.md"], "--into: there is no file nowhere.md"),
        (["--into", "plain.md"], "--into: plain.md must hold <!-- bench: short -->"),
        (["--from", "plain.md"], "--from: plain.md is not what musigma bench --json writes"),
        (["--from", "nowhere.json"], "--from: "),
    ],
)
def test_bad_usage_exits_2_before_anything_is_measured(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain.md").write_text("text\n")
    done = RUNNER.invoke(app, ["bench", *arguments])
    assert done.exit_code == 2
    assert said in " ".join(done.stderr.split())
    assert done.stdout == ""


def test_the_threads_of_the_process_are_given_back() -> None:
    torch.set_num_threads(1)
    RUNNER.invoke(app, [*TWO[:3], "--threads", "2", *TWO[5:], "--no-reused"])
    assert torch.get_num_threads() == 1


@pytest.mark.compile
def test_torch_compile_is_timed_where_it_is_asked_for() -> None:
    cells = bench.select(bench.full([1]), ["layer_norm 64×768 float32 forward,"])
    run = bench.run(
        cells, compiled=bench.compiled(cells), settings=bench.Settings(seconds=0.001, reused=False)
    )
    assert set(run.rows[0].times[bench.AS_IT_COMES]) == {"copy", "eager", "compiled", "ours"}
