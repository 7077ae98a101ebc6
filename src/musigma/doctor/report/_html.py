"""The small pieces of a page. Whatever comes from a model or its data is escaped here and nowhere else."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

__all__ = ["definitions", "element", "script_json", "shown", "table"]


def element(tag: str, *inner: str, **attributes: str) -> str:
    """`<tag attributes>inner</tag>`; inner is HTML already, attributes are escaped."""
    written = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(v)}"' for name, v in attributes.items()
    )
    return f"<{tag}{written}>{''.join(inner)}</{tag}>"


def shown(value: Any) -> str:
    """A value as escaped text: numbers to four digits, None as a dash."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return "; ".join(f"{escape(str(k))}: {shown(v)}" for k, v in value.items())
    if isinstance(value, list | tuple):
        # Evidence may carry a number per feature; its beginning tells the kind
        head = ", ".join(shown(v) for v in value[:8])
        return f"{head}, … ({len(value)} in all)" if len(value) > 8 else head
    return escape(str(value))


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def table(caption: str, headers: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table with a caption; a column of numbers is aligned to the right."""
    rows = [tuple(row) for row in rows]
    numeric = [bool(rows) and all(_is_number(row[i]) for row in rows) for i in range(len(headers))]
    kinds: list[dict[str, str]] = [{"class_": "number"} if n else {} for n in numeric]
    head = "".join(element("th", escape(h), scope="col", **k) for h, k in zip(headers, kinds, strict=True))
    body = "".join(
        element("tr", *(element("td", shown(v), **k) for v, k in zip(row, kinds, strict=True)))
        for row in rows
    )
    parts = (
        element("caption", escape(caption)) + element("thead", element("tr", head)) + element("tbody", body)
    )
    return element("table", parts)


def definitions(pairs: Mapping[str, Any]) -> str:
    """Names and values as a two-column table."""
    rows = (
        element("tr", element("th", escape(str(k)), scope="row"), element("td", shown(v)))
        for k, v in pairs.items()
    )
    return element("table", element("tbody", *rows))


def script_json(id: str, value: Any) -> str:
    """Data for the page's script; without any `<`, so that no text in it can end the element."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json" id="{escape(id)}">{text}</script>'
