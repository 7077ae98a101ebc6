"""How findings look as JSON, as plain text and through rich; no number is computed here."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

__all__ = ["jsonable", "plain", "rich"]

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
