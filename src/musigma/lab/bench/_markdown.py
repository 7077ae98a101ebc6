"""The numbers as markdown, and the pages that hold them between two marks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from musigma.lab.bench._cell import Cell
from musigma.lab.bench._grid import EARLY, MATRICES, MIDDLE
from musigma.lab.bench._row import AS_IT_COMES, REUSED, ModelRow, Row, Run, Times
from musigma.lab.bench._summary import PEERS, Bar, bars, means

# What the short form shows of the table, on the most threads: each op at a size that models have
_SHOWN = (
    Cell("layer_norm", MATRICES[0], backward=True),
    Cell("add_rms_norm", MATRICES[0], "bfloat16", backward=True),
    Cell("batch_norm", EARLY, activation="relu", backward=True),
    Cell("group_norm", MIDDLE, "bfloat16", channels_last=True, activation="silu", backward=True),
)


def short(run: Run) -> str:
    """Means, how many rows are slower, and a few rows: for the README."""
    lines = ["| forward and backward | torch | torch.compile | musigma |", "|---|---|---|---|"]
    lines += [_shown(row) for row in _examples(run)]
    lines += ["", f"{_means(run)} {_slower(run)}", "", _where(run)]
    return "\n".join(lines)


def long(run: Run) -> str:
    """Everything: the machine, the means, every bar with all that misses it, the models and the table."""
    lines = [
        _where(run),
        "",
        "| geometric mean | rows | asked for | measured |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| times as fast as {_PEERS[mean.over]}, {mean.allocator} | {mean.cells} | {PEERS[mean.over]:g} | "
        f"{mean.value:.2f}{'' if mean.met else ' (missed)'} |"
        for mean in means(run)
    ]
    for bar in bars(run):
        lines += ["", *_bar(bar)]
    lines += ["", "### Training steps", "", *_models(run)]
    lines += ["", "### Every row", "", *_table(run)]
    return "\n".join(lines)


def write_into(path: Path, run: Run) -> None:
    """Replace what stands between ``<!-- bench: short -->`` (or long) and ``<!-- /bench -->`` in a page.

    Raises:
        ValueError: the page has no such marks.
    """
    text = path.read_text(encoding="utf-8")
    check_marks(path)
    path.write_text(_MARKED.sub(lambda found: _filled(found, run), text), encoding="utf-8")


def check_marks(path: Path) -> None:
    """Raise unless the page has a place to write into."""
    if not _MARKED.search(path.read_text(encoding="utf-8")):
        raise ValueError(
            f"{path} must hold <!-- bench: short --> or <!-- bench: long -->, and below <!-- /bench -->"
        )


_MARKED = re.compile(r"(<!-- bench: (short|long) -->\n).*?(<!-- /bench -->)", re.DOTALL)
_FORMS: dict[str, Callable[[Run], str]] = {"short": short, "long": long}


def _filled(found: re.Match[str], run: Run) -> str:
    return f"{found[1]}\n{_FORMS[found[2]](run)}\n\n{found[3]}"


def _where(run: Run) -> str:
    told = [run.machine["cpu"]] if "cpu" in run.machine else []
    told += [f"{k} {run.machine[k]}" for k in ("torch", "python", "musigma") if k in run.machine]
    medians = "medians of one thread's work" if run.settings.get("clock") == "cpu" else "medians"
    return f"Measured by `make bench` on {', '.join(told)}; {medians} ± interquartile range."


def _means(run: Run) -> str:
    told = [
        f"{mean.value:.1f} times as fast as {_PEERS[mean.over]} over {mean.cells} rows"
        for mean in means(run)
        if mean.allocator == AS_IT_COMES
    ]
    return f"Geometric mean: {', '.join(told)}."


_PEERS = {"eager": "torch", "compiled": "torch.compile"}


def _slower(run: Run) -> str:
    told = []
    for bar in bars(run):
        if bar.title.startswith("no slower") and bar.title.endswith(AS_IT_COMES):
            peer = _PEERS["eager" if "eager" in bar.title else "compiled"]
            worst = f", {bar.missed[0].value:.2f} times as fast at worst" if bar.missed else ""
            told.append(f"{len(bar.missed)} of {len(bar.judged)} rows are slower than {peer}{worst}")
    return "; ".join(told) + ("." if told else "")


def _examples(run: Run) -> Iterator[Row | ModelRow]:
    most = max((row.cell.threads for row in run.rows), default=0)
    for wanted in _SHOWN:
        yield from (
            row for row in run.rows if row.cell == Cell(**(vars(wanted) | {"threads": most})) and row.times
        )
    for model in run.models:
        if model.times:
            yield model


def _shown(row: Row | ModelRow) -> str:
    times = row.times[AS_IT_COMES]
    name = f"{row.cell.title} {row.cell.what}" if isinstance(row, Row) else row.name
    cells = [
        name.replace(" forward+backward", ""),
        *(_time(times, who) for who in ("eager", "compiled", "ours")),
    ]
    return f"| {' | '.join(cells)} |"


def _time(times: Times, who: str) -> str:
    if who not in times:
        return ""
    t = times[who]
    unit, scale = ("ms", 1e3) if t.median >= 1e-3 else ("µs", 1e6)
    return f"{t.median * scale:.3g} {unit} ±{t.iqr:.0%}"


def _bar(bar: Bar) -> Iterator[str]:
    met = len(bar.judged) - len(bar.missed)
    yield f"**{bar.title[:1].upper()}{bar.title[1:]}**: {met} of {len(bar.judged)} rows."
    if bar.missed:
        yield from ("", "| row | measured | bar |", "|---|---|---|")
        for judged in bar.missed:
            yield f"| {judged.name} | {judged.value:.2f} | {judged.limit:g} |"


def _models(run: Run) -> Iterator[str]:
    yield "| model | threads | torch | musigma | times as fast | kept for backward, musigma over torch |"
    yield "|---|---|---|---|---|---|"
    for row in run.models:
        times = row.times.get(AS_IT_COMES, {})
        speedup = row.speedup("eager") or float("nan")
        saved = "" if row.saved is None else f"{row.saved.ours / row.saved.torchs:.2f}"
        cells = [row.model, str(row.threads), _time(times, "eager"), _time(times, "ours"), f"{speedup:.2f}"]
        yield f"| {' | '.join([*cells, saved])} |"


def _table(run: Run) -> Iterator[str]:
    yield "Times as memory comes; ratios there and, after the stroke, where buffers are reused."
    yield ""
    yield "| row | copy | torch | torch.compile | musigma | over torch | over compile | copies |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in run.rows:
        times = row.times.get(AS_IT_COMES, {})
        cells = [row.cell.name, *(_time(times, who) for who in ("copy", "eager", "compiled", "ours"))]
        for peer in PEERS:
            ratios = [row.speedup(peer, allocator) for allocator in (AS_IT_COMES, REUSED)]
            cells.append(" / ".join(f"{r:.2f}" for r in ratios if r is not None))
        copies = row.copies()
        yield f"| {' | '.join([*cells, '' if copies is None else f'{copies:.2f}'])} |"
