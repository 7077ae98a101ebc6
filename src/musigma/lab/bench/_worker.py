"""A second process in which memory that was freed is used again, whoever frees it: peers and ours alike.

By default glibc hands a block of more than some megabytes back to the system, and every new one is mapped and
page-faulted anew, which costs more than the arithmetic. Raised thresholds keep it; they are read once, when a
process starts, so that the other state needs a process of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from types import TracebackType
from typing import Any

from musigma.lab.bench._cell import Cell
from musigma.lab.bench._measure import times
from musigma.lab.bench._models import MODELS, Model
from musigma.lab.bench._row import Times, times_from_dict, times_to_dict
from musigma.lab.bench._steps import step_times
from musigma.lab.bench._timing import How, warm_up

# More than any tensor here takes; what is held in advance need only be most of a cell's tensors.
ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 32),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
    "MALLOC_TOP_PAD_": str(1 << 28),
}
"""How buffers come to be reused: glibc's thresholds, for everyone in the process."""

CAN_REUSE = sys.platform == "linux"
"""Whether there is a glibc to read them."""


class Worker:
    """The other process; it waits, without using a core, until it is asked to measure something.

    One that has ended, whatever ended it, is replaced when the next question comes.
    """

    def __init__(self) -> None:
        self._process = _started()

    def times(self, cell: Cell, how: How, *, compiled: bool) -> Times:
        """`_measure.times` over there."""
        return self._ask({"cell": cell.to_dict(), "how": vars(how), "options": {"compiled": compiled}})

    def step_times(self, model: Model, how: How, *, n_threads: int) -> Times:
        """`_steps.step_times` over there."""
        return self._ask({"model": model.name, "how": vars(how), "options": {"n_threads": n_threads}})

    def _ask(self, question: dict[str, Any]) -> Times:
        if self._process.poll() is not None:
            _close(self._process)
            self._process = _started()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            answer = ""
        else:
            answer = self._process.stdout.readline()
        if not answer:
            code = self._process.wait()
            raise RuntimeError(f"the process that reuses buffers ended with {code}")
        return times_from_dict(json.loads(answer))

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._process.kill()
        _close(self._process)


def _started() -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "musigma.lab.bench"]
    environment = os.environ | ENVIRONMENT
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )


def _close(process: subprocess.Popen[str]) -> None:
    """Ask no more, and wait for the end."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdout.close()
    with contextlib.suppress(BrokenPipeError):  # a question that was never read
        process.stdin.close()
    process.wait()


def serve() -> None:
    """Answer questions, a line each, until there are no more."""
    # An interrupt is meant for the process that asks, which ends this one
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What a compiler or a library prints must not be taken for an answer
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    warm_up()
    models = {model.name: model for model in MODELS}
    for line in sys.stdin:
        question = json.loads(line)
        how, options = How(**question["how"]), question["options"]
        if "cell" in question:
            found = times(Cell.from_dict(question["cell"]), how, **options)
        else:
            found = step_times(models[question["model"]], how, **options)
        try:
            answers.write(json.dumps(times_to_dict(found)).encode() + b"\n")
        except BrokenPipeError:  # nobody waits for it any more
            return
