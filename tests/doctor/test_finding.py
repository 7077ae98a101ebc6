"""Reports are data in a stable order and schema; names are shown as they are, whatever they look like."""

from __future__ import annotations

import io
from collections import OrderedDict

import torch
from nets import normal
from rich.console import Console
from torch import nn

from musigma.doctor import examine


def test_report_renders_names_as_they_are() -> None:
    net = nn.Sequential(OrderedDict({"[red]<b>": nn.Linear(8, 2)}))
    report = examine(net, normal(64, 8) * 50, name="[bold]net")
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(report)
    text = console.export_text()
    assert "[red]<b>" in text
    assert text.startswith("[bold]net: 1 warning")
    assert text.splitlines()[0] == str(report).splitlines()[0]


def test_reports_are_sorted_iterable_and_stable() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
    x = normal(64, 8) * 30
    x[:, 0] = 1.0
    x[3, 3] = float("inf")
    report = examine(net, x)
    assert [f.severity for f in report] == sorted(
        (f.severity for f in report), key=["error", "warning", "info"].index
    )
    assert list(report) == list(report.findings)
    assert report.by_code("INP103")[0].severity == "error"
    data = report.to_dict()
    assert data["schema"] == 1
    assert data["counts"]["error"] == sum(f.severity == "error" for f in report)
    assert set(data["findings"][0]) == {
        "code", "name", "severity", "where", "message", "evidence", "fix", "treatment",
    }  # fmt: skip
