"""Two bars that show both models train."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from musigma.cli import _console


@contextmanager
def bars() -> Iterator[Callable[[str, int, int, float], None]]:
    """What `musigma.doctor.compare` calls after each step; drawn on standard error."""
    columns = (
        TextColumn("{task.description:<8}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
    )
    with Progress(*columns, console=_console.err()) as progress:
        tasks: dict[str, TaskID] = {}

        def advance(name: str, step: int, total: int, loss: float) -> None:
            if name not in tasks:
                tasks[name] = progress.add_task(name, total=total, loss="")
            progress.update(tasks[name], completed=step, total=total, loss=f"loss {loss:.3f}")

        yield advance
