"""The same three parts for a terminal: findings, treatment, and how both models trained."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from musigma.doctor._finding import Report
from musigma.doctor._treat import Record
from musigma.doctor.report._training import Trained, comparison_rows, trials

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["comparison_table", "to_rich"]


def to_rich(
    report: Report, *, record: Record | None = None, comparison: Trained | None = None
) -> RenderableType:
    """Make a report printable by rich; names are data and never read as markup.

    Args:
        report: of the original model.
        record: from `treat`.
        comparison: from `compare`.

    Returns:
        What `rich.console.Console.print` takes.

    Example:
        >>> from rich.console import Console
        >>> from musigma.doctor import Report
        >>> Console(width=80).print(to_rich(Report((), name="net")))
        net: nothing found
    """
    from rich.console import Group

    parts: list[Any] = [report]
    if record is not None and (record.given or record.untreated):
        parts += ["", record]
    if comparison is not None:
        parts += ["", comparison_table(comparison)]
    return Group(*parts)


def comparison_table(comparison: Trained) -> RenderableType:
    """How both models trained, measure by measure, with the better of each pair named.

    Args:
        comparison: from `compare`; of several, with different seeds, the medians.

    Returns:
        A table for `rich.console.Console.print`.

    Example:
        >>> from rich.console import Console
        >>> from musigma.doctor import Comparison, Run
        >>> runs = Run(losses=[2.0, 1.0], seconds=0.5), Run(losses=[2.0, 0.5], seconds=0.5)
        >>> Console(width=80).print(comparison_table(Comparison(*runs, expected_loss=None, goal=0.95)))
        trained on the same batches
                            original   treated   better
        loss at the start      2.000     2.000   -
        loss at the end        1.000     0.500   treated
        time to train          0.5 s     0.5 s   -
    """
    from rich.table import Table

    runs = len(trials(comparison))
    title = "trained on the same batches" + (f", medians of {runs} runs" if runs > 1 else "")
    table = Table(title=title, title_justify="left", box=None, padding=(0, 3, 0, 0))
    table.add_column("", no_wrap=True)
    for name in ("original", "treated"):
        table.add_column(name, justify="right", header_style="bold")
    table.add_column("better", header_style="bold")
    for row in comparison_rows(comparison):
        table.add_row(row.name, row.shown("original"), row.shown("treated"), row.verdict(runs=runs))
    return table
