"""The plots as data: what plotly draws, and the same numbers as a table for those who can't see it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from html import escape
from itertools import pairwise
from typing import Any

__all__ = ["Figure", "Mark", "Series", "histograms", "profile", "progress"]

# Small multiples beyond this are unreadable; the table under the plot has them all.
MAX_PANELS = 12
PANELS_A_ROW = 4
# Labels that fit side by side, aslant
MAX_TICKS = 24
_ASLANT = {"tickangle": -40, "ticklabeloverflow": "allow"}

# Told apart without colour too: by dash, by symbol and by place.
_LOOKS: tuple[dict[str, Any], ...] = (
    {
        "line": {"color": "--before", "dash": "dash", "width": 2},
        "marker": {"color": "--before", "symbol": "circle"},
    },
    {
        "line": {"color": "--after", "dash": "solid", "width": 2},
        "marker": {"color": "--after", "symbol": "diamond"},
    },
)


@dataclass(frozen=True)
class Series:
    """One line of a plot.

    Args:
        name: what the legend calls it.
        x: names of layers, or steps.
        y: one number for each x; None, and one that isn't finite, leaves a gap.
    """

    name: str
    x: Sequence[Any]
    y: Sequence[float | None]


@dataclass(frozen=True)
class Figure:
    """A plot, its words and its numbers.

    Args:
        id: of the element it is drawn in.
        title: what is shown.
        caption: how to read it.
        traces: plotly's `data`; a string that begins with `--` is a colour of the page.
        layout: plotly's `layout`.
        headers: of the table.
        rows: the numbers.
        wide: whether it takes the full width.
    """

    id: str
    title: str
    caption: str
    traces: list[dict[str, Any]]
    layout: dict[str, Any]
    headers: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    wide: bool = False

    def drawn(self) -> dict[str, Any]:
        """What the page's script needs."""
        return {"id": self.id, "traces": self.traces, "layout": self.layout}


@dataclass(frozen=True)
class Mark:
    """A value worth comparing with, drawn as a horizontal line."""

    value: float
    label: str


def number(value: Any) -> float | None:
    """The value for plotly, which draws a gap for what isn't finite."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _line(
    name: str, x: Sequence[Any], y: Sequence[Any], look: dict[str, Any], *, log: bool
) -> dict[str, Any]:
    numbers = [number(v) for v in y]
    # A logarithmic axis has no place for 0; plotly would drop the point without a word.
    numbers = [None if log and v is not None and v <= 0 else v for v in numbers]
    return {"type": "scatter", "name": escape(name), "x": list(x), "y": numbers, **look}


def _marked(layout: dict[str, Any], mark: Mark | None) -> dict[str, Any]:
    if mark is None:
        return layout
    line = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": mark.value, "y1": mark.value}
    line |= {"line": {"color": "--mark", "width": 1, "dash": "dot"}}
    on_axis = math.log10(mark.value) if layout["yaxis"].get("type") == "log" else mark.value
    text = {
        "xref": "paper",
        "x": 1,
        "y": on_axis,
        "xanchor": "right",
        "yanchor": "bottom",
        "showarrow": False,
    }
    text |= {"text": escape(mark.label), "font": {"color": "--mark", "size": 12}}
    return layout | {"shapes": [line], "annotations": [text]}


def merged(first: Sequence[str], second: Sequence[str]) -> list[str]:
    """Every name once, in an order that keeps both: a treatment may add a layer or take one away."""
    matcher = SequenceMatcher(a=first, b=second, autojunk=False)
    pieces = [[*first[a0:a1], *second[b0:b1]] for _, a0, a1, b0, b1 in matcher.get_opcodes()]
    return list(dict.fromkeys(name for piece in pieces for name in piece))


def profile(
    id: str,
    title: str,
    caption: str,
    series: Sequence[Series],
    *,
    unit: str,
    log: bool = False,
    wide: bool = False,
    mark: Mark | None = None,
) -> Figure:
    """One number per layer, from the input to the output."""
    names = merged(series[0].x, series[-1].x)
    place = {name: i for i, name in enumerate(names)}
    traces = []
    for one, look in zip(series, _LOOKS, strict=False):
        trace = _line(one.name, [place[x] for x in one.x], one.y, look, log=log)
        hover = {"text": [escape(x) for x in one.x], "hovertemplate": "%{text}<br>%{y:.4g}"}
        traces.append(trace | hover | {"mode": "lines+markers"})
    every = math.ceil(len(names) / MAX_TICKS) or 1
    ticks = {"tickvals": list(range(0, len(names), every)), "ticktext": [_short(n) for n in names[::every]]}
    yaxis: dict[str, Any] = {"title": {"text": escape(unit)}}
    if log:
        yaxis |= {"type": "log", "exponentformat": "power", "dtick": 1 if _decades(series) > 2 else "D2"}
    by_name = [dict(zip(one.x, one.y, strict=True)) for one in series]
    return Figure(
        id,
        title,
        caption,
        traces,
        _marked(
            {"xaxis": ticks | _ASLANT, "yaxis": yaxis, "margin": {"l": 96, "r": 16, "t": 8, "b": 48}}, mark
        ),
        ("layer", *(f"{unit}, {one.name}" for one in series)),
        [(name, *(values.get(name) for values in by_name)) for name in names],
        wide,
    )


def _decades(series: Sequence[Series]) -> float:
    positive = [v for one in series for y in one.y if (v := number(y)) is not None and v > 0]
    return math.log10(max(positive) / min(positive)) if positive else 0.0


def _short(name: str, *, limit: int = 26) -> str:
    """The end of a long name, which tells layers apart better than its beginning."""
    return escape(name if len(name) <= limit else "…" + name[1 - limit :])


def progress(
    id: str,
    title: str,
    caption: str,
    series: Sequence[Series],
    *,
    unit: str,
    percent: bool = False,
    mark: Mark | None = None,
) -> Figure:
    """One number per training step."""
    yaxis: dict[str, Any] = {"title": {"text": escape(unit)}, "rangemode": "tozero"}
    if percent:
        yaxis |= {"tickformat": ".0%"}
    layout = _marked({"xaxis": {"title": {"text": "step"}}, "yaxis": yaxis}, mark)
    steps = sorted({x for one in series for x in one.x})
    by_step = [dict(zip(one.x, one.y, strict=True)) for one in series]
    headers = ("step", *(f"{unit}, {one.name}" for one in series))
    rows = [(step, *(values.get(step) for values in by_step)) for step in steps]
    lines = [
        _line(one.name, one.x, one.y, look, log=False) | {"mode": "lines"}
        for one, look in zip(series, _LOOKS, strict=False)
    ]
    return Figure(id, title, caption, lines, layout, headers, rows)


def histograms(
    id: str,
    title: str,
    caption: str,
    weights: Sequence[tuple[str, Mapping[str, tuple[list[float], list[float]]]]],
) -> Figure:
    """The distribution of every weight: (name, {series: (edges, counts)}) each, as small multiples."""
    traces: list[dict[str, Any]] = []
    layout: dict[str, Any] = {"annotations": [], "barmode": "overlay", "showlegend": True}
    shown = weights[:MAX_PANELS]
    rows = math.ceil(len(shown) / PANELS_A_ROW) or 1
    columns = min(PANELS_A_ROW, len(shown)) or 1
    seen: set[str] = set()
    for panel, (name, by_series) in enumerate(shown):
        suffix = "" if panel == 0 else str(panel + 1)
        layout |= _panel(suffix, *divmod(panel, columns), rows, columns)
        layout["annotations"].append(_heading(suffix, name))
        for (label, (edges, counts)), look in zip(by_series.items(), _LOOKS, strict=False):
            traces.append(_outline(label, edges, counts, suffix, look, legend=label not in seen))
            seen.add(label)
    table = [
        (name, label, sum(counts), edges[0], edges[-1])
        for name, by_series in weights
        for label, (edges, counts) in by_series.items()
        if counts
    ]
    headers = ("weight", "model", "values", "smallest", "largest")
    if len(weights) > len(shown):
        caption += f" The first {len(shown)} of {len(weights)} weights are drawn."
    return Figure(id, title, caption, traces, layout, headers, table, wide=True)


def _panel(suffix: str, row: int, column: int, rows: int, columns: int) -> dict[str, Any]:
    # Gaps as a share of a panel: room for tick labels beside and for a heading above.
    width, height = 1 / columns, 1 / rows
    left, bottom = column * width, 1 - (row + 1) * height
    return {
        f"xaxis{suffix}": {"domain": [left, left + 0.86 * width], "anchor": f"y{suffix}", "nticks": 4},
        f"yaxis{suffix}": {
            "domain": [bottom + 0.12 * height, bottom + 0.88 * height],
            "anchor": f"x{suffix}",
            "showticklabels": False,
            "rangemode": "tozero",
        },
    }


def _heading(suffix: str, name: str) -> dict[str, Any]:
    place = {"xref": f"x{suffix} domain", "yref": f"y{suffix} domain", "x": 0, "y": 1.02}
    return place | {
        "xanchor": "left",
        "yanchor": "bottom",
        "text": _short(name, limit=28),
        "showarrow": False,
        "font": {"size": 12},
    }


def _outline(
    label: str,
    edges: Sequence[float],
    counts: Sequence[float],
    suffix: str,
    look: dict[str, Any],
    *,
    legend: bool,
) -> dict[str, Any]:
    """A histogram as a step line, scaled to its own peak: of two very different widths both stay visible."""
    widths = [b - a for a, b in pairwise(edges)]
    density = [c / w if w > 0 else float(c) for c, w in zip(counts, widths, strict=True)]
    peak = max(density, default=0.0) or 1.0
    y = [0.0, *(d / peak for d in density), 0.0] if edges else []
    filled = {"fill": "tozeroy"} if look is _LOOKS[0] else {}
    return {
        "type": "scatter",
        "mode": "lines",
        "name": escape(label),
        "legendgroup": escape(label),
        "showlegend": legend,
        "x": [number(v) for v in (edges[0], *edges)] if edges else [],
        "y": y,
        "line": {"color": look["line"]["color"], "width": 1.5, "shape": "hv"},
        "xaxis": f"x{suffix}",
        "yaxis": f"y{suffix}",
        **filled,
    }
