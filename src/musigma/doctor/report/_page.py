"""One self-contained page: styles, script, plots and data inside; nothing is fetched when it is opened."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from html import escape
from importlib import resources
from pathlib import Path

from musigma._version import __version__
from musigma.doctor._finding import Finding, Report
from musigma.doctor._treat import Given, Record
from musigma.doctor.report import _html
from musigma.doctor.report._figures import Figure
from musigma.doctor.report._measured import measured_figures
from musigma.doctor.report._plotly import packed_script
from musigma.doctor.report._training import Trained, comparison_rows, trained_figures, trials

__all__ = ["to_html", "write_html"]

# The page says it itself: no address is ever contacted, whatever a name inside it may look like.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath("assets", name).read_text(encoding="utf-8")


def _finding(f: Finding) -> str:
    where = ", ".join(f"<code>{escape(w) or '(model)'}</code>" for w in f.where[:12])
    more = f" and {len(f.where) - 12} more" if len(f.where) > 12 else ""
    parts = [
        _html.element("h3", f'<span class="severity">{f.severity}</span> {escape(f.code)} {escape(f.name)}'),
        _html.element("p", where + more, class_="quiet") if f.where else "",
        _html.element("p", escape(f.message)),
        _html.element("p", f"<strong>Fix:</strong> {escape(f.fix)}"),
    ]
    if f.evidence:
        table = _html.element("div", _html.definitions(f.evidence), class_="scroll", tabindex="0")
        parts.append(_html.element("details", "<summary>Measured evidence</summary>", table))
    return _html.element("article", *parts, class_=f"finding {f.severity}")


def _findings(report: Report) -> str:
    parts = [_finding(f) for f in report] or ["<p>Nothing was found.</p>"]
    if report.skipped:
        rows = sorted(report.skipped.items())
        table = _html.table("Rules that could not be asked", ("rule", "why"), rows)
        parts.append(
            _html.element("details", f"<summary>Rules that stayed silent: {len(rows)}</summary>", table)
        )
    return _html.element("section", '<h2 id="findings">Findings</h2>', *parts, aria_labelledby="findings")


def _figure(f: Figure) -> str:
    plot = _html.element("div", id=f.id, class_="plot", role="img", aria_label=f"{f.title}. {f.caption}")
    numbers = _html.element("div", _html.table(f.title, f.headers, f.rows), class_="scroll", tabindex="0")
    details = _html.element("details", "<summary>The numbers</summary>", numbers)
    caption = _html.element("figcaption", escape(f.caption))
    return _html.element(
        "figure",
        _html.element("h3", escape(f.title)),
        caption,
        plot,
        details,
        class_="wide" if f.wide else "",
    )


def _plots(figures: Sequence[Figure]) -> str:
    return _html.element("div", *map(_figure, figures), class_="plots")


def _statistics(figures: Sequence[Figure]) -> str:
    if not figures:
        return ""
    heading = '<h2 id="statistics">Statistics by layer</h2>'
    return _html.element("section", heading, _plots(figures), aria_labelledby="statistics")


def _given(given: Given) -> str:
    what = given.done if given.kept else f"not done: {given.reason}"
    codes = ", ".join(f"{c} mended" if c in given.mended else c for c in given.codes)
    inner = f"<strong>{escape(given.treatment)}</strong> ({escape(codes)}): {escape(what)}"
    return _html.element("li", inner)


def _treatment(record: Record | None) -> str:
    if record is None or not (record.given or record.untreated):
        return ""
    parts = ['<h2 id="treatment">Treatment</h2>']
    if record.given:
        parts.append(_html.element("ol", *map(_given, record.given)))
    if record.untreated:
        rows = [(f.code, ", ".join(f.where[:4]) or "(model)", why) for f, why in record.untreated]
        table = _html.element("div", _html.table("Why nothing mended it", ("rule", "where", "why"), rows))
        said = f"<summary>{len(rows)} finding{'s' if len(rows) > 1 else ''} left</summary>"
        parts.append(_html.element("details", said, table))
    return _html.element("section", *parts, aria_labelledby="treatment")


def _header(report: Report) -> str:
    counts = [(n, s) for s in ("error", "warning", "info") if (n := sum(f.severity == s for f in report))]
    said = ", ".join(f"{n} {s}{'s' if n > 1 and s != 'info' else ''}" for n, s in counts) or "nothing found"
    loss = report.measurements.get("loss")
    parts = [f"<h1>{escape(report.name or 'model')}</h1>", f"<p><strong>{said}</strong></p>"]
    if isinstance(loss, float) and report.measurements.get("loss_source") in ("given", "own"):
        parts.append(f'<p class="quiet">loss on the examined batch: {_html.shown(loss)}</p>')
    return _html.element("header", *parts)


def _notice() -> str:
    needs = "The plots need scripts switched on and a browser that can unpack gzip (any since 2023)"
    notice = f"{needs}; their numbers are in the tables below each."
    return (
        f'<p id="no-plots" class="notice" role="status" hidden>{notice}</p>'
        f'<noscript><p class="notice">{notice}</p></noscript>'
    )


def _comparison(comparison: Trained | None, figures: Sequence[Figure]) -> str:
    if comparison is None:
        return ""
    runs = len(trials(comparison))
    head = "".join(_html.element("th", h, scope="col") for h in ("measure", "original", "treated", "better"))
    body = ""
    for row in comparison_rows(comparison):
        cells = [_html.element("th", escape(row.name), scope="row")]
        for which in ("original", "treated"):
            best = " better" if row.better == which else ""
            cells.append(_html.element("td", escape(row.shown(which)), class_=f"number{best}"))
        cells.append(_html.element("td", escape(row.verdict(runs=runs))))
        body += _html.element("tr", *cells)
    parts = ['<h2 id="comparison">Original and treated</h2>']
    if runs > 1:
        parts.append(f'<p class="quiet">Medians of {runs} runs, each with its own seed.</p>')
    thead = _html.element("thead", _html.element("tr", head))
    parts.append(_html.element("table", thead, _html.element("tbody", body)))
    parts.append(_plots(figures))
    return _html.element("section", *parts, aria_labelledby="comparison")


def _footer(report: Report) -> str:
    codes = ", ".join(report.codes)
    how = f"musigma explain {report.codes[0]}" if report.codes else "musigma explain CODE"
    more = (
        f"{escape(codes)}: <code>{escape(how)}</code> tells what a rule looks for and why. " if codes else ""
    )
    return _html.element("footer", f"<p>{more}Made by musigma {escape(__version__)}.</p>", class_="quiet")


def to_html(
    report: Report,
    *,
    record: Record | None = None,
    comparison: Trained | None = None,
) -> str:
    """Draw a report as one HTML page that opens offline.

    Args:
        report: of the original model.
        record: from `treat`: what was done, what could not be, and the treated model's layers beside these.
        comparison: from `compare`: how the two trained; of several, with different seeds, the medians.

    Returns:
        The page. The same arguments give the same text.

    Raises:
        ImportError: plotly, which the page carries inside, is not installed.

    Example:
        >>> import torch
        >>> from musigma.doctor import examine
        >>> page = to_html(examine(torch.nn.Linear(4, 2), torch.eye(4), name="<b>small</b>"))
        >>> "<b>small" in page, "&lt;b&gt;small&lt;/b&gt;" in page
        (False, True)
    """
    reports = {"original": report} | ({"treated": record.after} if record is not None else {})
    trained = trained_figures(comparison) if comparison is not None else []
    measured = measured_figures(reports)
    main = [
        _header(report),
        _notice(),
        _comparison(comparison, trained),
        _treatment(record),
        _findings(report),
        _statistics(measured),
        _footer(report),
    ]
    title = escape(f"musigma: {report.name or 'model'}")
    head = f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    head += '<meta name="viewport" content="width=device-width, initial-scale=1">'
    head += f"<title>{title}</title><style>{_asset('page.css')}</style>"
    data = _html.script_json("figures", [f.drawn() for f in (*trained, *measured)])
    data += f'<script type="text/plain" id="plotly">{packed_script()}</script>'
    body = f"<main>{''.join(main)}</main>{data}<script>{_asset('page.js')}</script>"
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{body}</body></html>\n'


def write_html(
    path: str | os.PathLike[str],
    report: Report,
    *,
    record: Record | None = None,
    comparison: Trained | None = None,
) -> Path:
    """Write `to_html` to a file, whole or not at all.

    Args:
        path: of the page; a file that is there is replaced once the new one is complete.
        report: see `to_html`.
        record: see `to_html`.
        comparison: see `to_html`.

    Returns:
        The path.

    Raises:
        ImportError: plotly is not installed.
        OSError: the folder can't be written to.

    Example:
        >>> import tempfile, torch
        >>> from musigma.doctor import examine
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = write_html(f"{folder}/report.html", examine(torch.nn.Linear(4, 2), torch.eye(4)))
        ...     path.read_text()[:15]
        '<!doctype html>'
    """
    path = Path(path)
    page = to_html(report, record=record, comparison=comparison)
    # Beside the target, since a rename is atomic only within one file system
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(page)
        # mkstemp makes it private; a page is as readable as any new file
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return path
