"""From the measurements of one or two examinations to the plots of the page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from musigma.doctor._finding import Report
from musigma.doctor.report._figures import Figure, Mark, Series, histograms, profile

__all__ = ["measured_figures"]

_Table = Mapping[str, Mapping[str, Any]]
# What the treatment "standardize" calls the model that it wraps.
_INNER = "model."


def measured_figures(reports: Mapping[str, Report]) -> list[Figure]:
    """The spread and the mean of every layer, the gradient of every weight, the distribution of every weight.

    Args:
        reports: by the name that the legend gives them, the original first.
    """
    found = {name: r.measurements for name, r in reports.items() if r.measurements}
    if not found:
        return []
    layers = _aligned({name: _layers(m) for name, m in found.items()})
    parameters = _aligned({name: _parameters(m) for name, m in found.items()})
    return [
        profile(
            "activation-std",
            "Activations: standard deviation by layer",
            "From the input to the output. A steady rise or fall explodes or vanishes with depth.",
            _series(layers, "std"),
            unit="std",
            log=True,
            mark=Mark(1.0, "1"),
        ),
        profile(
            "activation-mean",
            "Activations: mean by layer",
            "Far from 0 a layer spends its weights on undoing the offset.",
            _series(layers, "mean"),
            unit="mean",
            mark=Mark(0.0, "0"),
        ),
        profile(
            "gradient-norm",
            "Gradient norm by parameter",
            "What one backward pass sends to each parameter. Exactly 0 is a gap in the line.",
            _series(parameters, "gradient_norm"),
            unit="gradient norm",
            log=True,
            wide=True,
        ),
        histograms(
            "weights",
            "Weights: distribution by parameter",
            "How the values are distributed, each curve scaled to its own peak; biases are left out.",
            _weights(parameters),
        ),
    ]


def _numbered(names: Iterable[str]) -> list[str]:
    """The names, told apart where one occurs more than once: a module may be called several times."""
    names = list(names)
    often = Counter(names)
    seen: Counter[str] = Counter()
    told = []
    for name in names:
        seen[name] += 1
        told.append(f"{name} #{seen[name]}" if often[name] > 1 else name)
    return told


def _layers(measured: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    rows = _points(measured.get("layers", ()))
    return dict(zip(_numbered(name for name, _ in rows), (row for _, row in rows), strict=True))


def _points(rows: Iterable[Mapping[str, Any]]) -> list[tuple[str, Mapping[str, Any]]]:
    """One point for each op, and one for a whole Standardize layer: what it gives, not how it gets there."""
    points: list[tuple[str, Mapping[str, Any]]] = []
    for row in rows:
        whole = row["module_type"] == "Standardize"
        name = row["module"] if whole else f"{row['module'] or '(model)'} {row['op']}"
        if whole and points and points[-1][0] == name:
            points.pop()
        points.append((name, row))
    return points


def _parameters(measured: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {row["name"]: row for row in measured.get("parameters", ())}


def _aligned(tables: Mapping[str, _Table]) -> dict[str, _Table]:
    """One name for one layer: a model that was given a Standardize layer holds the original as `model`."""
    known = next(iter(tables.values()))
    return {
        series: {
            n if n in known or n.removeprefix(_INNER) not in known else n.removeprefix(_INNER): row
            for n, row in t.items()
        }
        for series, t in tables.items()
    }


def _series(tables: Mapping[str, _Table], key: str) -> list[Series]:
    return [Series(name, list(rows), [row[key] for row in rows.values()]) for name, rows in tables.items()]


def _weights(tables: Mapping[str, _Table]) -> list[tuple[str, dict[str, tuple[list[float], list[float]]]]]:
    by_weight: dict[str, dict[str, tuple[list[float], list[float]]]] = {}
    for series, rows in tables.items():
        for name, row in rows.items():
            if len(row["shape"]) >= 2 and row["histogram"]["edges"]:
                bars = row["histogram"]
                by_weight.setdefault(name, {})[series] = (list(bars["edges"]), list(bars["counts"]))
    return list(by_weight.items())
