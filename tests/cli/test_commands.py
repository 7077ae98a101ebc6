"""The commands as a shell sees them: output at width 80 without colour, exit codes, quiet endings."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
from typer.testing import CliRunner, Result

import musigma
from musigma.cli._app import app

HEALTHY = """
    import torch
    from torch import nn
    from musigma.doctor import Case

    def case():
        x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
        return Case(nn.BatchNorm1d(8), x)
"""
SICK = """
    import torch
    from torch import nn
    from musigma.doctor import Case

    def case():
        x = torch.tensor([[1.0, 2.0], [float("nan"), 3.0], [5.0, 7.0], [6.0, 1.0]])
        return Case(nn.BatchNorm1d(2), x, name="a net [bold]with a bracket[/bold]")

    def wrong_shape():
        return Case(nn.Sequential(nn.Linear(3, 2)), torch.zeros(4, 7))

    def wrong_loss():
        loss = lambda output, target: output @ target
        return Case(nn.Linear(7, 2), torch.randn(4, 7), torch.zeros(4), loss=loss)

    def no_examples():
        return Case(nn.Linear(7, 2), torch.zeros(0, 7))

    def raises():
        return 1 / 0

    def trained():
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(64, 4, generator=generator) * 9 + 30
        y = (x[:, 0] > 30).long()
        model = nn.Linear(4, 2)
        loader = [(x[:32], y[:32]), (x[32:], y[32:])]
        optimizer = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
        loss = nn.functional.cross_entropy
        return Case(model, x, y, loss=loss, optimizer=optimizer, loader=loader, test=(x, y))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "healthy.py").write_text(dedent(HEALTHY))
    (tmp_path / "sick.py").write_text(dedent(SICK))
    return tmp_path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_nothing_found_exits_0(folder: Path) -> None:
    done = run("doctor", "healthy.py:case", "--select", "INP")
    assert (done.exit_code, done.stdout.strip()) == (0, "BatchNorm1d: nothing found")


def test_findings_exit_1_and_names_are_no_markup(folder: Path) -> None:
    done = run("doctor", "sick.py:case", "--select", "INP103")
    assert done.exit_code == 1
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    assert lines[0] == "a net [bold]with a bracket[/bold]: 1 error"
    assert lines[2].startswith("INP103 non-finite-input")
    assert max(map(len, lines)) <= 80
    assert "\x1b" not in done.stdout


def test_json_is_the_report_and_nothing_else(folder: Path) -> None:
    done = run("doctor", "sick.py:case", "--select", "INP103", "--format", "json")
    assert done.exit_code == 1
    told = json.loads(done.stdout)
    assert [f["code"] for f in told["findings"]] == ["INP103"]


def test_html_is_written_beside_what_is_printed(folder: Path) -> None:
    done = run("doctor", "sick.py:case", "--select", "INP103", "--out", "report.html")
    assert done.exit_code == 1
    assert "INP103" in done.stdout
    assert (folder / "report.html").read_text().startswith("<!doctype html>")


def test_html_can_be_printed(folder: Path) -> None:
    done = run("doctor", "healthy.py:case", "--select", "INP", "--format", "html")
    assert done.exit_code == 0
    assert done.stdout.startswith("<!doctype html>")


def test_a_case_with_a_loader_is_treated_and_both_models_trained(folder: Path) -> None:
    done = run("doctor", "sick.py:trained", "--steps", "6")
    assert done.exit_code == 1
    assert "mended: " in done.stdout
    assert "INP101" in done.stdout
    assert "trained on the same batches" in done.stdout
    assert "final test accuracy" in done.stdout
    # The bars are no result
    assert "6/6" in done.stderr
    assert "6/6" not in done.stdout
    assert max(len(line.rstrip()) for line in done.stdout.splitlines()) <= 80


def test_json_holds_the_treatment_and_the_curves(folder: Path) -> None:
    done = run("doctor", "sick.py:trained", "--steps", "6", "--format", "json")
    told = json.loads(done.stdout)
    assert "INP101" in {code for given in told["treatment"]["given"] for code in given["codes"]}
    assert [len(c["treated"]["losses"]) for c in told["comparisons"]] == [6]


def test_no_train_only_treats(folder: Path) -> None:
    done = run("doctor", "sick.py:trained", "--no-train")
    assert "mended: " in done.stdout
    assert "trained on the same batches" not in done.stdout


def test_the_same_seed_gives_the_same_output(folder: Path) -> None:
    def told(seed: str) -> dict[str, object]:
        done = run("doctor", "sick.py:trained", "--steps", "6", "--format", "json", "--seed", seed)
        whole = json.loads(done.stdout)
        for run_ in whole["comparisons"]:
            run_["original"]["seconds"] = run_["treated"]["seconds"] = 0
        return whole

    assert told("3") == told("3")
    assert told("3") != told("4")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["doctor"], "Missing argument"),
        (["doctor", "nothing.py:case"], "there is no file nothing.py"),
        (["doctor", "healthy.py:case", "--format", "xml"], "is not one of"),
        (["doctor", "healthy.py:case", "--select", "INX"], "no rule has a code that begins with 'INX'"),
        (["doctor", "healthy.py:case", "--out", "nowhere/report.html"], "--out: there is no folder nowhere"),
        (["doctor", "sick.py:no_examples"], "inputs must hold at least one example"),
        (["explain", "INP999"], "no rule is called 'INP999'"),
        (["exlain"], "Did you mean 'explain'?"),
        (["doctor", "healthy.py:case", "--no-such-option"], "No such option"),
    ],
)
def test_bad_usage_exits_2(folder: Path, arguments: list[str], said: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2
    assert said in " ".join(done.stderr.split())
    assert done.stdout == ""
    assert "Traceback" not in done.stderr


def test_a_factory_that_raises_shows_its_traceback(folder: Path) -> None:
    done = run("doctor", "sick.py:raises")
    assert done.exit_code == 2
    assert "return 1 / 0" in done.stderr
    assert "error: sick.py:raises raised ZeroDivisionError: division by zero" in done.stderr


def test_wrong_shapes_show_the_models_traceback_and_what_to_pass(folder: Path) -> None:
    done = run("doctor", "sick.py:wrong_shape")
    assert done.exit_code == 2
    assert "return F.linear(input, self.weight, self.bias)" in done.stderr
    assert "Sequential can't run on Case.inputs: RuntimeError: mat1 and mat2 shapes" in done.stderr
    assert "Case.inputs is what the model takes" in done.stderr


def test_a_loss_that_raises_is_not_blamed_on_the_model(folder: Path) -> None:
    done = run("doctor", "sick.py:wrong_loss")
    assert done.exit_code == 2
    assert "output @ target" in done.stderr
    assert "error: the loss raised RuntimeError" in done.stderr


def test_explain_prints_the_rules_own_text() -> None:
    done = run("explain", "inp103")
    assert done.exit_code == 0
    assert done.stdout.startswith("INP103 non-finite-input")
    for section in ("What it does", "Why it hurts", "Example", "Use instead", "Fix safety", "References"):
        assert section in done.stdout
    assert max(len(line.rstrip()) for line in done.stdout.splitlines()) <= 80


def test_explain_completes_codes() -> None:
    typed = {"COMP_WORDS": "musigma explain INP10", "COMP_CWORD": "2", "_MUSIGMA_COMPLETE": "complete_bash"}
    script = Path(sys.executable).parent / "musigma"
    done = subprocess.run([script], capture_output=True, text=True, check=True, env=os.environ | typed)
    assert done.stdout.split()[:2] == ["INP101", "INP102"]


def test_env_tells_what_runs_and_why() -> None:
    done = run("env")
    assert done.exit_code == 0
    told = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines() if line.split()}
    assert told["musigma"] == [musigma.__version__]
    assert {"python", "torch", "numpy", "cpu", "threads", "row_norm", "moments"} <= told.keys()


def test_version() -> None:
    assert run("--version").stdout == f"musigma {musigma.__version__}\n"


def test_every_command_has_a_line_of_help() -> None:
    done = run("--help")
    assert done.exit_code == 0
    for command in ("doctor", "explain", "env", "demo", "bench"):
        assert f"│ {command}" in done.stdout


@pytest.mark.skipif(os.name != "posix", reason="signals are POSIX")
def test_an_interrupt_is_quiet_and_exits_130(folder: Path) -> None:
    (folder / "slow.py").write_text(
        "import time\ndef case():\n    print('started', flush=True)\n    time.sleep(60)\n"
    )
    command = [sys.executable, "-m", "musigma.cli", "doctor", "slow.py:case"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said == ""


@pytest.mark.skipif(os.name != "posix", reason="pipes are POSIX")
def test_a_reader_that_leaves_early_is_no_fault(folder: Path) -> None:
    command = f"{sys.executable} -m musigma.cli explain INP101 | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True, timeout=120)
    assert done.stderr == ""
    assert done.stdout.strip() in {"0", "141"}


def test_a_fault_of_ours_is_never_exit_1(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from musigma.cli import main

    monkeypatch.setattr("musigma.cli._env.facts", lambda: 1 / 0)
    monkeypatch.setattr(sys, "argv", ["musigma", "env"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
