"""`musigma bench`."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from musigma.cli import _console, _exit
from musigma.cli._env import facts
from musigma.lab import bench as _bench

# Of all functions together: quick has two minutes in all, and setting out and compiling take the rest of them
QUICK = {"seconds": 0.1, "minutes": 1.2}
# 25 minutes in all; whole models and the slowest peers don't keep to a share exactly
FULL = {"seconds": 0.25, "minutes": 23.0}


class Clock(StrEnum):
    """What time is."""

    real = "real"
    cpu = "cpu"


@dataclass(frozen=True)
class _Written:
    """Where a run goes, besides the terminal; looked at before anything is measured."""

    json: Path | None
    picture: Path | None
    into: list[Path]
    markdown: bool

    def check(self) -> None:
        for option, path in (("--json", self.json), ("--picture", self.picture)):
            if path is not None and not path.parent.is_dir():
                _exit.fail(f"{option}: there is no folder {path.parent}")
        for path in self.into:
            if not path.is_file():
                _exit.fail(f"--into: there is no file {path}")
            try:
                _bench.check_marks(path)
            except ValueError as error:
                _exit.fail(f"--into: {error}")

    def write(self, run: _bench.Run) -> None:
        if self.json is not None:
            run.write(self.json)
        if self.picture is not None:
            self.picture.write_text(_bench.picture(run), encoding="utf-8")
        for path in self.into:
            _bench.write_into(path, run)
        if self.markdown:
            sys.stdout.write(f"\n{_bench.long(run)}\n")


def bench(
    quick: Annotated[bool, typer.Option("--quick", help="About forty cells, in two minutes.")] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Cells whose name begins so (a shell pattern), out of all there could be; repeatable.",
        ),
    ] = None,
    threads: Annotated[
        str | None, typer.Option(metavar="N,…", help="Numbers of threads; 1,2 if not quick.")
    ] = None,
    compile: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Time torch.compile too, in some forty cells.")
    ] = True,
    models: Annotated[
        bool, typer.Option("--models/--no-models", help="Time a training step of whole models too.")
    ] = True,
    reused: Annotated[
        bool,
        typer.Option(
            "--reused/--no-reused", help="Time all again where memory that was freed is used again."
        ),
    ] = True,
    seconds: Annotated[float | None, typer.Option(min=0.001, help="How long each function is timed.")] = None,
    clock: Annotated[
        Clock, typer.Option(help="The real one, or one thread's work, for a busy machine.")
    ] = Clock.real,
    seed: Annotated[int, typer.Option(help="Where all random numbers start.")] = 0,
    json: Annotated[Path | None, typer.Option(help="Write everything to this file.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw it, as SVG, into this file.")] = None,
    into: Annotated[
        list[Path] | None,
        typer.Option(help="Write the numbers into this page, between its marks; repeatable."),
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print everything as markdown too.")] = False,
    read: Annotated[
        Path | None, typer.Option("--from", help="Measure nothing: show what --json wrote before.")
    ] = None,
) -> None:
    """Time musigma's ops against torch's, eager and compiled, and against a copy of the same bytes.

    Every cell is first compared with float64; the exit code is 1 where one is wrong, else 0, fast or slow.
    """
    written = _Written(json, picture, into or [], markdown)
    written.check()
    console = _console.out()
    if read is not None:
        run = _read(read)
        lines = [_bench.line(row) for row in (*run.rows, *run.models)]
        console.print(_bench.HEAD, *lines, sep="\n", soft_wrap=True)
    else:
        limits = QUICK if quick else FULL
        settings = _bench.Settings(
            seconds=seconds or limits["seconds"],
            minutes=limits["minutes"],
            clock=clock.value,
            reused=reused and _bench.CAN_REUSE,
            seed=seed,
        )
        numbers = _threads(threads, quick, clock)
        cells = _cells(only, numbers, quick)
        # Every other one: still one of each kind
        whole = _bench.MODELS[:: 2 if quick else 1] if models and only is None else ()
        run = _bench.run(
            cells,
            [(model, max(numbers)) for model in whole],
            compiled=_bench.compiled(cells, quick=quick and only is None) if compile else frozenset(),
            settings=settings,
            machine=facts(),
            begun=lambda: console.print(_bench.HEAD, soft_wrap=True),
            done=lambda row: console.print(_bench.line(row), soft_wrap=True),
        )
    console.print("", *_bench.summary(run), sep="\n", soft_wrap=True)
    written.write(run)
    if run.settings.get("interrupted"):
        raise typer.Exit(_exit.INTERRUPTED)
    raise typer.Exit(_exit.NOTHING_FOUND if run.right else _exit.FINDINGS)


def _read(path: Path) -> _bench.Run:
    try:
        return _bench.Run.read(path)
    except (OSError, ValueError) as error:
        _exit.fail(f"--from: {error}")


def _threads(text: str | None, quick: bool, clock: Clock) -> list[int]:
    if text is None:
        found = [1] if clock is Clock.cpu else [2] if quick else [1, 2]
        return [n for n in found if n <= (os.cpu_count() or 1)] or [1]
    try:
        found = sorted({int(n) for n in text.split(",")})
    except ValueError:
        found = [0]
    if found[0] < 1:
        _exit.fail(f"--threads must be whole numbers from 1 on, with commas between; got {text!r}")
    if clock is Clock.cpu and found != [1]:
        _exit.fail("--clock cpu counts the work of one thread; --threads 1 goes with it")
    return found


def _cells(only: list[str] | None, numbers: list[int], quick: bool) -> list[_bench.Cell]:
    if only is None:
        return _bench.quick(numbers) if quick else _bench.full(numbers)
    try:
        return _bench.select(_bench.everything(numbers), only)
    except ValueError as error:
        _exit.fail(f"--only: {error}")
