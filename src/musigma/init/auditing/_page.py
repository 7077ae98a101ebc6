"""An audit as HTML, without scripts and without anything fetched."""

from html import escape
from typing import TYPE_CHECKING

from musigma.init.auditing._table import headline

if TYPE_CHECKING:
    from musigma.init.auditing._report import Audit, TensorAudit

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem;
color-scheme:light dark}
.audit table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
.audit th,.audit td{padding:.2rem .6rem;text-align:left;border-bottom:1px solid #8884}
.audit td.n,.audit th.n{text-align:right}.audit code{font-size:.92em}
.audit .found{border-left:3px solid #c0392b;padding:.1rem .8rem;margin:.8rem 0}
"""


def page(audit: "Audit") -> str:
    """A whole page.

    Args:
        audit: what to show.

    Returns:
        HTML.
    """
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>musigma: initialization audit</title></head><body>{body(audit)}</body></html>\n"
    )


def body(audit: "Audit") -> str:
    """The part inside a page, with its style: what a notebook shows.

    Args:
        audit: what to show.

    Returns:
        HTML.
    """
    found = "".join(
        f'<div class="found"><p><strong>{escape(f.code)}</strong> <code>{escape(f.tensor)}</code><br>'
        f"{escape(f.problem.partition(': ')[2])}<br><em>{escape(f.remedy)}</em></p></div>"
        for f in audit.findings
    )
    notes = "".join(f"<li>{escape(note)}</li>" for note in audit.notes)
    rows = "".join(_row(line) for line in audit.tensors)
    head = "".join(
        f"<th{css}>{title}</th>"
        for title, css in (
            ("tensor", ""),
            ("shape", ""),
            ("mean", ' class="n"'),
            ("std", ' class="n"'),
            ("expected", ' class="n"'),
            ("interval", ' class="n"'),
            ("law", ""),
            ("verdict", ""),
        )
    )
    return (
        f'<style>{_STYLE}</style><section class="audit"><h2>{escape(headline(audit))}</h2>{found}'
        f"{f'<ul>{notes}</ul>' if notes else ''}"
        f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></section>"
    )


def _row(line: "TensorAudit") -> str:
    name = line.name + (f" = {', '.join(line.tied)}" if line.tied else "")
    interval = "" if line.interval is None else f"{line.interval[0]:.4g} … {line.interval[1]:.4g}"
    law = line.law or ""
    if line.others:
        law += f" (or {', '.join(line.others[:3])}{', …' if len(line.others) > 3 else ''})"
    numbers = "".join(
        f'<td class="n">{"" if value is None else f"{value:.4g}"}</td>'
        for value in (line.mean, line.std, line.expected)
    )
    return (
        f"<tr><td><code>{escape(name)}</code></td><td>{escape('×'.join(map(str, line.shape)))}</td>{numbers}"
        f'<td class="n">{interval}</td><td>{escape(law)}</td><td>{escape(line.verdict)}</td></tr>'
    )
