"""Figures show the functions' own numbers, and say what to install without plotly."""

from __future__ import annotations

import sys

import pytest

from musigma.init.meanfield import (
    correlation_map,
    critical,
    plot_correlation_map,
    plot_critical,
    plot_variance_map,
    plot_width_interval,
    variance_map,
    width_interval,
)

pytest.importorskip("plotly")


def test_variance_map() -> None:
    figure = plot_variance_map("tanh", weight_var=2.0, bias_var=0.1)
    line, _, rest = figure.data
    for q, after in zip(line.x[::20], line.y[::20], strict=True):
        assert after == variance_map("tanh", q, weight_var=2.0, bias_var=0.1)
    assert rest.x == rest.y
    assert len(plot_variance_map("relu", weight_var=1.0).data) == 2  # it dies out: no point to mark


def test_correlation_map() -> None:
    line = plot_correlation_map("gelu", var=4.0, weight_var=2.0).data[0]
    assert line.y[7] == correlation_map("gelu", line.x[7], var=4.0, weight_var=2.0)


def test_critical_marks_its_choice() -> None:
    figure = plot_critical("gelu")
    slopes = dict(zip(figure.data[0].x, figure.data[0].y, strict=True))
    assert slopes[1.0] == critical("gelu", std=1.0).slope
    marks = [shape.x0 for shape in figure.layout.shapes if shape.x0 == shape.x1]
    assert marks == [critical("gelu").std]


def test_width_interval_widens() -> None:
    upper, lower, target = plot_width_interval("relu", width=256, depth=6).data
    assert (lower.y[5], upper.y[5]) == width_interval("relu", width=256, depth=6).std
    assert upper.y[5] / lower.y[5] > upper.y[0] / lower.y[0]
    assert set(target.y) == {1.0}


def test_without_plotly_the_install_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    with pytest.raises(ImportError, match=r"pip install 'musigma\[report\]'"):
        plot_variance_map("relu", weight_var=2.0)
