"""An audit on a terminal, 80 columns wide."""

import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from musigma.init.auditing._report import Audit, TensorAudit

_WIDTH = 80


def text(audit: "Audit") -> str:
    """The findings, the notes, and a table of all tensors.

    Args:
        audit: what to print.

    Returns:
        Lines of at most 80 columns.
    """
    parts = [headline(audit), paragraphs(audit), _notes(audit), _table(audit)]
    return "\n\n".join(part for part in parts if part)


def headline(audit: "Audit") -> str:
    """How many findings there are.

    Args:
        audit: what to count.

    Returns:
        One line.
    """
    count = len(audit)
    said = f"{count or 'no'} finding{'' if count == 1 else 's'} in {len(audit.tensors)} tensors"
    return said + (" (trained: laws not judged)" if audit.trained else "")


def paragraphs(audit: "Audit") -> str:
    """Findings of one kind together: the first with its sentence, the others by name.

    Args:
        audit: what to print.

    Returns:
        One paragraph a kind; empty if there are no findings.
    """
    kinds: dict[str, list[int]] = {}
    for i, finding in enumerate(audit.findings):
        kinds.setdefault(finding.code, []).append(i)
    lines: list[str] = []
    for code, places in kinds.items():
        first = audit.findings[places[0]]
        lines.append(_wrapped(f"{code}  {first.tensor}", "", "  "))
        lines.append(_wrapped(first.problem.partition(": ")[2], "  "))
        if len(places) > 1:
            names = ", ".join(audit.findings[i].tensor for i in places[1:])
            lines.append(_wrapped(f"the same of {textwrap.shorten(names, 300, placeholder=' …')}", "  "))
        lines.append(_wrapped(f"remedy: {first.remedy}", "  ", "    "))
    return "\n".join(lines)


def _notes(audit: "Audit") -> str:
    return "\n".join(_wrapped(f"note: {note}", "", "  ") for note in audit.notes)


def _table(audit: "Audit") -> str:
    if not audit.tensors:
        return ""
    rows = [_row(line) for line in audit.tensors]
    name = min(max(len(row[0]) for row in [("tensor",), *rows]), 34)
    head = f"{'tensor':{name}} {'std':>8} {'expected':>8}  law"
    return "\n".join([head.rstrip(), *(_line(row, name) for row in rows)])


def _row(line: "TensorAudit") -> tuple[str, str, str, str]:
    law = line.law or line.verdict
    if line.verdict == "as planned":
        law = f"{law}, as planned"
    return line.name, _number(line.std), _number(line.expected), law


def _line(row: tuple[str, str, str, str], width: int) -> str:
    name, std, expected, law = row
    if len(name) > width:
        name = "…" + name[len(name) - width + 1 :]
    return f"{name:{width}} {std:>8} {expected:>8}  {law}"[:_WIDTH].rstrip()


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _wrapped(said: str, first: str, then: str | None = None) -> str:
    return textwrap.fill(
        said,
        _WIDTH,
        initial_indent=first,
        subsequent_indent=first if then is None else then,
        break_on_hyphens=False,
    )
