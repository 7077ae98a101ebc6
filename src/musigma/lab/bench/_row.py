"""What was measured, as data: rows, models, and the run they belong to; written to JSON and read back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from musigma.lab.bench._cell import Cell
from musigma.lab.bench._gate import Error
from musigma.lab.bench._timing import Spread

# A value of ReLU that rounds to the other side of 0 moves a net's gradient by a thousandth (torch's too,
# measured over seeds). Kernels are judged cell by cell; this finds out whether both nets are the same.
FLIPPED = 1e-2

SCHEMA = 1
"""Raised when a field changes its meaning."""

AS_IT_COMES = "as it comes"
"""The allocator as a process starts with it: what a user sees."""

REUSED = "buffers reused"
"""Every large block is kept and used again, the peers' too."""

Times = Mapping[str, Spread]


@dataclass(frozen=True)
class Saved:
    """Bytes that autograd keeps for the backward, parameters aside.

    Args:
        ours: musigma's.
        torchs: torch's, eager.
        inputs: the size of the inputs that are as large as the first; 0 for a model.
    """

    ours: int
    torchs: int
    inputs: int


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a cell and a model have in common.

    Args:
        errors: by the gate; it is timed only where all are right.
        saved: for backward; None where there is none.
        times: by state of the allocator, then by who ran: ``copy`` (of the input), ``eager``, ``compiled``,
            ``ours``, and ``backward`` (ours alone) in large cells.
    """

    errors: tuple[Error, ...] = ()
    saved: Saved | None = None
    times: Mapping[str, Times] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What the tables call it."""
        raise NotImplementedError

    @property
    def right(self) -> bool:
        """Whether the gate let it pass."""
        return all(error.right for error in self.errors)

    def speedup(self, over: str, allocator: str = AS_IT_COMES) -> float | None:
        """How many times faster ours is than a peer; None where one was not timed."""
        times = self.times.get(allocator, {})
        return times[over].median / times["ours"].median if {over, "ours"} <= times.keys() else None


@dataclass(frozen=True, kw_only=True)
class Row(Measured):
    """One cell, measured."""

    cell: Cell

    @property
    def name(self) -> str:
        """The cell's."""
        return self.cell.name

    def copies(self, of: str = "ours", allocator: str = REUSED) -> float | None:
        """A time in copies of the input, divided by `Cell.traffic`; forward+backward is a sum of both."""
        times = self.times.get(allocator, {})
        if not {of, "copy"} <= times.keys():
            return None
        copies = times[of].median / times["copy"].median
        forward, backward = self.cell.traffic("forward"), self.cell.traffic("backward")
        if of == "backward":
            return copies / backward
        # forward moves two tensors, backward three
        return copies / ((2 * forward + 3 * backward) / 5 if self.cell.backward else forward)


@dataclass(frozen=True, kw_only=True)
class ModelRow(Measured):
    """A training step of a whole model, measured.

    Its errors are those of the loss and of all gradients together, relative.
    """

    model: str
    threads: int

    @property
    def name(self) -> str:
        """The model's, and on how many threads."""
        return f"step of {self.model}, {self.threads} thread{'' if self.threads == 1 else 's'}"

    @property
    def right(self) -> bool:
        """Whether ours is near float64, or about as near as torch: a deep net amplifies bfloat16's errors."""
        return all(error.ours <= max(FLIPPED, 3 * error.torchs) for error in self.errors)


@dataclass(frozen=True)
class Run:
    """A whole run.

    Args:
        rows: the cells.
        models: the models.
        machine: what it ran on and which versions.
        settings: how it was measured.
    """

    rows: tuple[Row, ...]
    models: tuple[ModelRow, ...] = ()
    machine: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def all(self) -> tuple[Measured, ...]:
        """Rows and models."""
        return (*self.rows, *self.models)

    @property
    def right(self) -> bool:
        """Whether everything passed the gate."""
        return all(row.right for row in self.all)

    def write(self, path: Path) -> None:
        """Write it as JSON, a row a line, so that two runs can be compared line by line."""
        head = {"schema": SCHEMA, "machine": dict(self.machine), "settings": dict(self.settings)}
        parts = [f"  {json.dumps(k)}: {json.dumps(v, ensure_ascii=False)}" for k, v in head.items()]
        for name, rows in (("rows", self.rows), ("models", self.models)):
            lines = ",\n".join(f"    {json.dumps(_told(row), ensure_ascii=False)}" for row in rows)
            parts.append(f'  "{name}": [\n{lines}\n  ]')
        path.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Run:
        """Read what `write` wrote.

        Raises:
            ValueError: it is no such file, or of another schema.
        """
        try:
            told = json.loads(path.read_text(encoding="utf-8"))
            schema = told["schema"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is not what musigma bench --json writes: {error!r}") from error
        if schema != SCHEMA:
            raise ValueError(f"{path} is of schema {schema}, and this reads {SCHEMA}; run the bench again")
        return cls(
            tuple(_row(row) for row in told["rows"]),
            tuple(_model(row) for row in told["models"]),
            told["machine"],
            told["settings"],
        )


def times_to_dict(times: Times) -> dict[str, dict[str, float]]:
    """Times for JSON."""
    return {name: spread.to_dict() for name, spread in times.items()}


def times_from_dict(told: Mapping[str, Mapping[str, Any]]) -> Times:
    """The times `times_to_dict` wrote."""
    return {name: Spread(**spread) for name, spread in told.items()}


def _told(row: Row | ModelRow) -> dict[str, Any]:
    errors = {e.result: [_short(e.ours), _short(e.torchs)] for e in row.errors}
    times = {allocator: times_to_dict(times) for allocator, times in row.times.items()}
    saved = None if row.saved is None else vars(row.saved)
    what = (
        {"cell": row.cell.to_dict()} if isinstance(row, Row) else {"model": row.model, "threads": row.threads}
    )
    return {**what, "errors": errors, "saved": saved, "times": times}


def _short(error: float) -> float | str:
    # JSON has no infinity
    return float(f"{error:.3g}") if error - error == 0 else str(error)


def _measured(told: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that both kinds of row have."""
    return {
        "errors": tuple(Error(k, float(ours), float(torchs)) for k, (ours, torchs) in told["errors"].items()),
        "saved": None if told["saved"] is None else Saved(**told["saved"]),
        "times": {allocator: times_from_dict(times) for allocator, times in told["times"].items()},
    }


def _row(told: Mapping[str, Any]) -> Row:
    return Row(cell=Cell.from_dict(told["cell"]), **_measured(told))


def _model(told: Mapping[str, Any]) -> ModelRow:
    return ModelRow(model=told["model"], threads=told["threads"], **_measured(told))
