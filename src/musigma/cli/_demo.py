"""`musigma demo`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import torch
import typer

from musigma.cli import _console, _examined, _exit
from musigma.doctor import demo as _demo
from musigma.doctor import treat
from musigma.doctor.report import comparison_table

# Five passes over the digits
STEPS = 110
# One run's luck with its batches is as large as what is to be shown
RUNS = 5


def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="Where the HTML report is written.")] = Path(
        "report.html"
    ),
) -> None:
    """Examine, treat and train a small network on scikit-learn's handwritten digits."""
    if not out.parent.is_dir():
        _exit.fail(f"--out: there is no folder {out.parent}")
    start = time.perf_counter()
    console = _console.out()
    # More threads than one cost more than they save on matrices of this size
    torch.set_num_threads(1)
    try:
        case = _demo.case()
    except ImportError as error:
        _exit.fail(str(error))
    report = _examined.examine(case)
    console.print(report)
    treated, record = treat(case.model, report, data=case.loader)
    console.print("", record, "", sep="\n")
    runs = [_examined.train(case, treated, steps=STEPS, every=2, seed=seed) for seed in range(RUNS)]
    console.print(comparison_table(runs))
    try:
        _examined.Examined(report, record, runs).write(out)
    except ImportError as error:
        _exit.fail(str(error))
    console.print(f"\n{out} shows it all. This took {time.perf_counter() - start:.0f} s.", soft_wrap=True)
