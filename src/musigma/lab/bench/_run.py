"""Runs the grid: the gate, then every cell in both states of the allocator, within a given time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from musigma.lab.bench import _measure, _steps
from musigma.lab.bench._cell import Cell
from musigma.lab.bench._gate import Error, gate, raised
from musigma.lab.bench._models import Model
from musigma.lab.bench._row import AS_IT_COMES, REUSED, ModelRow, Row, Run, Saved, Times
from musigma.lab.bench._timing import How, warm_up
from musigma.lab.bench._worker import CAN_REUSE, ENVIRONMENT, Worker

# A cell's peers, the copy and ours, in two processes
RUNS_A_CELL = 3 * 2
# A step of a model takes a tenth of a second, as long as hundreds of calls of most cells
LONGER = 8


@dataclass(frozen=True)
class Settings:
    """How to measure.

    Args:
        seconds: how long each function is timed, where there is time.
        minutes: within which all is to be done; behind schedule, the rest is timed for less.
        clock: one of `CLOCKS`.
        reused: whether everything is timed again where buffers are reused.
        seed: what all random numbers start from.
    """

    seconds: float = 0.25
    minutes: float = 24.0
    clock: str = "real"
    reused: bool = CAN_REUSE
    seed: int = 0


def run(
    cells: Sequence[Cell],
    models: Sequence[tuple[Model, int]] = (),
    *,
    compiled: frozenset[Cell] = frozenset(),
    settings: Settings = Settings(),
    machine: Mapping[str, str] | None = None,
    begun: Callable[[], None] = lambda: None,
    done: Callable[[Row | ModelRow], None] = lambda row: None,
) -> Run:
    """Measure all of it.

    Args:
        cells: see `full`, `quick` and `select`.
        models: whole models, each with a number of threads.
        compiled: the cells that torch.compile is timed on too.
        settings: how to measure.
        machine: what to write down about it.
        begun: called when all is ready to measure.
        done: called with every row as soon as it is there.

    Returns:
        the rows, in the order of the cells. One that the gate refuses has no times. An interrupt ends the
        run with what is there, and `settings` says so.
    """
    start = time.monotonic()
    measured = _Measured(settings, start + settings.minutes * 60)
    rows: list[Row] = []
    model_rows: list[ModelRow] = []
    interrupted = False
    with contextlib.ExitStack() as stack:
        worker = stack.enter_context(Worker()) if settings.reused else None
        try:
            warm_up()
            begun()
            for i, cell in enumerate(cells):
                left = len(cells) - i + LONGER * len(models)
                rows.append(measured.cell(cell, cell in compiled, left, worker))
                done(rows[-1])
            for i, (model, threads) in enumerate(models):
                model_rows.append(measured.model(model, threads, LONGER * (len(models) - i), worker))
                done(model_rows[-1])
        except KeyboardInterrupt:
            interrupted = True
    told = asdict(settings) | {
        "took": round(time.monotonic() - start),
        "interrupted": interrupted,
        "buffers reused by": ENVIRONMENT if settings.reused else {},
    }
    return Run(tuple(rows), tuple(model_rows), machine or {}, told)


class _Measured:
    """What is shared by the rows of a run: the time that is left, and results that threads don't change."""

    def __init__(self, settings: Settings, stop: float) -> None:
        self._settings = settings
        self._stop = stop
        self._errors: dict[Cell, tuple[Error, ...]] = {}
        self._saved: dict[Cell, Saved] = {}
        self._steps: dict[str, tuple[tuple[Error, ...], Saved]] = {}

    def _how(self, left: int, *, times: float = 1.0) -> How:
        """How to time one function when `left` cells remain: `times` as long as the settings ask, or less."""
        settings = self._settings
        share = (self._stop - time.monotonic()) / left / RUNS_A_CELL
        how = How(times * min(settings.seconds, max(share, 0.0)), settings.clock, settings.seed)
        # Where even that is too much, on a machine that others keep busy, a median has to do
        return how if share > settings.seconds / 4 else replace(how, least=3)

    def cell(self, cell: Cell, compiled: bool, left: int, worker: Worker | None) -> Row:
        seed = self._settings.seed
        plain = replace(cell, threads=1, backward=False)
        if plain not in self._errors:
            self._errors[plain] = gate(plain, seed=seed)
        if cell.backward and plain not in self._saved:
            self._saved[plain] = _measure.saved(plain, seed=seed)
        saved = self._saved[plain] if cell.backward else None
        row = Row(cell=cell, errors=self._errors[plain], saved=saved)
        if not row.right:
            return row
        how = self._how(left)
        times: dict[str, Times] = {}
        try:
            times[AS_IT_COMES] = _measure.times(cell, how, compiled=compiled)
            if worker is not None:
                times[REUSED] = worker.times(cell, how, compiled=compiled)
        except Exception as error:
            return replace(row, errors=(*row.errors, raised(error)))
        return replace(row, times=times)

    def model(self, model: Model, threads: int, left: int, worker: Worker | None) -> ModelRow:
        seed = self._settings.seed
        if model.name not in self._steps:
            self._steps[model.name] = (
                _steps.step_errors(model, seed=seed),
                _steps.step_saved(model, seed=seed),
            )
        errors, saved = self._steps[model.name]
        row = ModelRow(model=model.name, threads=threads, errors=errors, saved=saved)
        if not row.right:
            return row
        how = self._how(left, times=LONGER)
        times: dict[str, Times] = {}
        try:
            times[AS_IT_COMES] = _steps.step_times(model, how, n_threads=threads)
            if worker is not None:
                times[REUSED] = worker.step_times(model, how, n_threads=threads)
        except Exception as error:
            return replace(row, errors=(*row.errors, raised(error)))
        return replace(row, times=times)
