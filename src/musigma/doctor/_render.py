"""How findings look as JSON, as plain text and through rich; no number is computed here."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

__all__ = ["jsonable", "place", "plain", "plain_record", "rich", "rich_record"]

_STYLE = {"error": "bold red", "warning": "bold yellow", "info": "bold cyan"}


def jsonable(value: Any) -> Any:
    """The value as plain JSON types; numbers that JSON lacks become "nan", "inf" and "-inf"."""
    if isinstance(value, torch.Tensor):
        return jsonable(value.detach().cpu().tolist())
    if isinstance(value, bool) or value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(k): jsonable(v) for k, v in value.items()}
    if isinstance(value, Iterable):
        return [jsonable(v) for v in value]
    return str(value)


def place(where: tuple[str, ...], *, limit: int = 3) -> str:
    """The first few places of a finding, and how many more there are."""
    shown = ", ".join(w or "(model)" for w in where[:limit])
    rest = len(where) - limit
    return f"{shown} and {rest} more" if rest > 0 else shown


def headline(report: Any) -> str:
    """One line: how many findings of each severity."""
    counts = [(s, sum(f.severity == s for f in report)) for s in ("error", "warning", "info")]
    said = ", ".join(f"{n} {s}{'s' if n > 1 and s != 'info' else ''}" for s, n in counts if n)
    return f"{report.name or 'model'}: {said or 'nothing found'}"


def plain(report: Any) -> str:
    """The report as text without colour, one paragraph a finding."""
    lines = [headline(report)]
    for f in report:
        lines += [
            "",
            f"{f.code} {f.name} [{f.severity}] at {place(f.where)}",
            f"  {f.message}",
            f"  fix: {f.fix}",
        ]
    return "\n".join(lines)


def rich(report: Any) -> Any:
    """The report as a rich renderable; names are data and never read as markup."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    parts: list[Any] = [Text(headline(report), style="bold")]
    for f in report:
        title = Text.assemble((f"{f.code} ", _STYLE[f.severity]), (f.name, "bold"), f"  {place(f.where)}")
        parts += [Text(), title, Padding(Text(f.message), (0, 0, 0, 2))]
        parts.append(Padding(Text.assemble(("fix: ", "green"), f.fix), (0, 0, 0, 2)))
    return Group(*parts)


def _sentences(record: Any) -> list[tuple[str, str, str]]:
    """(mark, treatment, sentence) of everything that was tried, then of what is left."""
    told = []
    for g in record.given:
        codes = ", ".join(g.codes)
        said = g.done if g.kept else f"{g.done} — {g.reason}" if g.done else g.reason
        told.append(("kept" if g.kept else "not kept", f"{g.treatment} ({codes})", said))
    told += [("left", f.code, reason) for f, reason in record.untreated]
    return told


def plain_record(record: Any) -> str:
    """What was done, as text without colour."""
    lines = [f"{mark:>8}  {what}: {said}" for mark, what, said in _sentences(record)]
    mended = ", ".join(record.mended) or "nothing"
    return "\n".join([f"mended: {mended}", *lines])


def rich_record(record: Any) -> Any:
    """What was done, as a rich renderable; names are data and never read as markup."""
    from rich.console import Group
    from rich.text import Text

    style = {"kept": "green", "not kept": "yellow", "left": "dim"}
    parts = [Text.assemble(("mended: ", "bold"), ", ".join(record.mended) or "nothing")]
    for mark, what, said in _sentences(record):
        parts.append(Text.assemble((f"{mark:>8}  ", style[mark]), (what, "bold"), f": {said}"))
    return Group(*parts)
