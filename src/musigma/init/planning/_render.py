"""A plan as a table, as JSON and as HTML."""

from __future__ import annotations

import html
import json
import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from musigma.init.planning._entry import Entry
    from musigma.init.planning._plan import Plan

_WIDTH = 80


def table(plan: Plan) -> str:
    """One line a tensor, with the reason below where it is a new one."""
    lines = [_head(plan)]
    rows = [(entry.tensor, _law(entry), _follows(entry)) for entry in plan.entries]
    law = max((len(row[1]) for row in rows), default=0)
    follows = min(max((len(row[2]) for row in rows), default=0), 22)
    name = max(_WIDTH - law - follows - 4, 20)
    for entry, row in zip(plan.entries, rows, strict=True):
        lines.append(f"{_short(row[0], name):{name}}  {row[1]:{law}}  {_short(row[2], follows)}".rstrip())
        lines.append(f"  {entry.reason}")
    for tensor, reason in plan.skipped.items():
        lines.append(f"{tensor}: left as it is, {reason}")
    lines += [f"note: {note}" for note in plan.notes]
    if plan.verification is not None:
        lines += ["", str(plan.verification)]
    return "\n".join(lines)


def _head(plan: Plan) -> str:
    return (
        f"{plan.scheme} initialization, seed {plan.seed}: {len(plan.entries)} tensors written, "
        f"{len(plan.skipped)} left as they are"
    )


def _law(entry: Entry) -> str:
    if entry.scheme in ("zeros", "ones"):
        return entry.scheme
    return f"{entry.scheme} {entry.std:.3g}" if entry.std else f"{entry.scheme} {entry.mean:.3g}"


def _follows(entry: Entry) -> str:
    if entry.branch is not None:
        return f"branch {entry.branch[0]}/{entry.branch[1]}"
    if entry.norm is not None:
        return f"norm {entry.norm}"
    return entry.activation or ""


def _short(text: str, width: int) -> str:
    return text if len(text) <= width else f"…{text[len(text) - width + 1 :]}"


def to_dict(plan: Plan) -> dict[str, Any]:
    """The plan in plain data."""
    return {
        "scheme": plan.scheme,
        "seed": plan.seed,
        "entries": [_plain(entry) for entry in plan.entries],
        "layers": [_plain(layer) for layer in plan.layers],
        "skipped": plan.skipped,
        "notes": list(plan.notes),
        "verification": plan.verification.to_dict() if plan.verification is not None else None,
    }


def _plain(value: Any) -> Any:
    if hasattr(value, "__dataclass_fields__"):
        return {name: _plain(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, str | int | bool | type(None)) else str(value)


def to_json(plan: Plan) -> str:
    """JSON with numbers that every reader takes: nan is null."""
    return json.dumps(to_dict(plan), indent=2, ensure_ascii=False)


def fragment(plan: Plan) -> str:
    """The table as HTML, for a notebook."""
    rows = "".join(
        f"<tr><td><code>{html.escape(e.tensor)}</code></td><td>{html.escape(_law(e))}</td>"
        f"<td>{html.escape(_follows(e))}</td><td>{html.escape(e.reason)}</td></tr>"
        for e in plan.entries
    )
    kept = "".join(
        f"<li><code>{html.escape(n)}</code>: {html.escape(r)}</li>" for n, r in plan.skipped.items()
    )
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in plan.notes)
    proof = plan.verification.fragment() if plan.verification is not None else ""
    return (
        f"<p>{html.escape(_head(plan))}</p><table><thead><tr><th>tensor</th><th>law</th><th>what follows</th>"
        f"<th>why</th></tr></thead><tbody>{rows}</tbody></table>"
        + (f"<p>Left as they are:</p><ul>{kept}</ul>" if kept else "")
        + (f"<p>Notes:</p><ul>{notes}</ul>" if notes else "")
        + proof
    )


_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:75rem;padding:0 1rem;color:#222}"
    "table{border-collapse:collapse}td,th{text-align:left;padding:.2rem .8rem;border-bottom:1px solid #ddd;"
    "vertical-align:top}"
)


def to_html(plan: Plan) -> str:
    """One page, with its style in it."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Initialization</title>'
        f"<style>{_STYLE}</style></head><body><h1>Initialization</h1>{fragment(plan)}</body></html>"
    )
