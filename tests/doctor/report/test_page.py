"""The HTML page: no name and no number can break it, and a browser draws it without a network."""

from __future__ import annotations

import html
import json
import math
import re
import shutil
import stat
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from torch import nn

from musigma.doctor import Comparison, Finding, Given, Record, Report, Run, examine
from musigma.doctor.report import to_html, write_html
from musigma.doctor.report._figures import Series, histograms, merged, profile
from musigma.doctor.report._html import script_json
from musigma.doctor.report._training import comparison_rows

NASTY = "</script><script>throw 1</script><!--<img src=x onerror=alert(1)>\"'&\u2028"


def finding(**kwargs: object) -> Finding:
    given = {"code": "INP101", "name": "unstandardized-input", "severity": "warning", "where": ("x",)}
    given |= {"message": "said", "evidence": {"mean": 3.0}, "fix": "standardize"} | kwargs
    return Finding(**given)  # type: ignore[arg-type]


def layer(module: str, std: float, op: str = "linear") -> dict[str, object]:
    keys = {
        "index": 0,
        "module_type": "Linear",
        "shape": (4, 2),
        "mean": 0.1,
        "between_std": 1.0,
        "zeros": 0.0,
    }
    return keys | {"op": op, "module": module, "std": std, "gradient_std": 1.0}


def parameter(name: str, norm: float | None) -> dict[str, object]:
    bars = {"edges": [-1.0, 0.0, 1.0], "counts": [3, 5]}
    return {"name": name, "shape": (4, 2), "mean": 0.0, "std": 1.0, "gradient_norm": norm, "histogram": bars}


def made(name: str = "net", *findings: Finding, module: str = "0") -> Report:
    measured = {
        "loss": 2.0,
        "loss_source": "given",
        "inputs": [],
        "layers": [layer(module, 1.0), layer(module, math.nan, "relu"), layer(module, 0.0, "relu")],
        "parameters": [parameter(module + ".weight", 0.5), parameter(module + ".other", None)],
    }
    return Report(findings, measured, {"NRM319": "needs mask"}, name)


def trained() -> Comparison:
    original = Run([2.5, 2.0, 1.0], [(1, 0.2), (3, 0.9)], 2.0)
    treated = Run([2.3, 1.0, 0.5], [(1, 0.5), (3, 0.96)], 2.5)
    return Comparison(original, treated, math.log(10), 0.95)


def recorded(after: Report, *, name: str = "standardize") -> Record:
    kept = Given(name, ("INP101",), name, True)
    undone = Given(name, ("NRM301",), "", False, name)
    return Record((kept, undone), ((finding(code="INP102", where=(name,)), name),), made(), after)


class Tags(HTMLParser):
    """The elements of a page with their attributes, and whether they nest."""

    VOID = frozenset({"meta", "img", "br", "hr", "link", "input"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def figures(page: str) -> list[dict[str, object]]:
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_names_and_messages_can_not_leave_their_place() -> None:
    nasty = finding(where=(NASTY,), message=NASTY, fix=NASTY, evidence={NASTY: [NASTY, 1.0]})
    record = recorded(made(NASTY, module=NASTY), name=NASTY)
    page = to_html(made(NASTY, nasty, module=NASTY), record=record, comparison=trained())
    tags = Tags(page)
    assert tags.open == []
    assert [t for t, _ in tags.seen if t == "img"] == []
    # figures, plotly, and the page's own: no script came in with a name
    assert len([t for t, _ in tags.seen if t == "script"]) == 3
    assert not any(name.startswith("on") for _, attributes in tags.seen for name in attributes)
    assert html.escape(NASTY) in page


def test_nothing_is_fetched() -> None:
    tags = Tags(to_html(made("net", finding()), comparison=trained()))
    assert not [a for _, a in tags.seen if {"src", "href"} & a.keys()]
    policy = next(a["content"] for t, a in tags.seen if t == "meta" and "http-equiv" in a)
    assert policy is not None
    assert policy.startswith("default-src 'none'")


def test_numbers_that_json_lacks_become_gaps() -> None:
    std = next(f for f in figures(to_html(made())) if f["id"] == "activation-std")
    # NaN is a gap; 0 has no place on a logarithmic axis
    assert std["traces"][0]["y"] == [1.0, None, None]  # type: ignore[index]


def test_the_same_report_gives_the_same_bytes() -> None:
    assert to_html(made("net", finding())) == to_html(made("net", finding()))


def test_every_plot_has_words_and_a_table() -> None:
    page = to_html(made("net", finding()), record=recorded(made()), comparison=trained())
    tags = Tags(page)
    drawn = {f["id"] for f in figures(page)}
    assert drawn == {"loss", "accuracy", "activation-std", "activation-mean", "gradient-norm", "weights"}
    described = {a["id"] for t, a in tags.seen if a.get("role") == "img" and a.get("aria-label")}
    assert described == drawn
    # each plot's numbers, the evidence, the silent rules, and what nothing mended
    assert sum(t == "details" for t, _ in tags.seen) == len(drawn) + 3
    assert next(a for t, a in tags.seen if t == "html") == {"lang": "en"}


def test_the_worse_is_shown_as_worse() -> None:
    rows = {row.name.split(" (")[0]: row for row in comparison_rows(trained())}
    assert rows["loss at the start"].better == "treated"
    assert rows["steps to 95% test accuracy"].shown("original") == "not reached"
    assert rows["steps to 95% test accuracy"].better == "treated"
    assert rows["time to train"].better == ""
    swapped = replace(trained(), original=trained().treated, treated=trained().original)
    assert {r.better for r in comparison_rows(swapped)} == {"original", ""}


def test_a_loss_that_diverged_is_the_worse_one() -> None:
    both = trained()
    both.treated.losses[-1] = math.nan
    row = next(r for r in comparison_rows(both) if r.name == "loss at the end")
    assert (row.better, row.shown("treated")) == ("original", "nan")


def test_several_runs_are_judged_by_their_medians() -> None:
    lucky = replace(trained(), original=Run([2.5, 0.1, 0.1], [(1, 0.96), (3, 0.97)], 1.0))
    several = [trained(), lucky, trained()]
    row = next(r for r in comparison_rows(several) if r.name.startswith("steps"))
    # The original reached the goal once, at step 1; the treated each time, at step 3
    assert (row.original, row.treated, row.wins) == (None, 3, (1, 2))
    assert row.verdict(runs=3) == "treated, 2 of 3"
    assert "Medians of 3 runs" in to_html(made(), comparison=several)


def test_no_run_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="got an empty one"):
        to_html(made(), comparison=[])


def test_a_standardized_models_layers_are_drawn_over_the_originals() -> None:
    page = to_html(made(module="0"), record=recorded(made(module="model.0")))
    std = next(f for f in figures(page) if f["id"] == "activation-std")
    assert [t["x"] for t in std["traces"]] == [[0, 1, 2], [0, 1, 2]]  # type: ignore[attr-defined]


def test_a_standardize_layer_is_one_point_whatever_it_computes() -> None:
    inside = [
        layer("standardize.x", std, op) | {"module_type": "Standardize"}
        for op, std in (("sub", 9), ("div", 1))
    ]
    report = Report((), {**made().measurements, "layers": [*inside, layer("model.0", 2.0)]}, {}, "net")
    std = next(f for f in figures(to_html(report)) if f["id"] == "activation-std")
    assert [t["y"] for t in std["traces"]] == [[1, 2.0]]  # type: ignore[attr-defined]


def test_what_was_not_mended_is_told_with_the_reason() -> None:
    page = to_html(made(), record=recorded(made()))
    assert "INP101 mended" in page
    assert "not done: standardize" in page
    assert "1 finding left" in page


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("abc", "abc", "abc"),
        ("abc", "sabc", "sabc"),
        ("abc", "axc", "abxc"),
        ("ab", "ba", "ba"),
        ("", "ab", "ab"),
    ],
)
def test_layers_of_both_models_keep_their_order(first: str, second: str, expected: str) -> None:
    assert sorted(merged(first, second)) == sorted(expected)
    if expected != "ba":
        assert "".join(merged(first, second)) == expected


def test_a_layer_that_only_one_model_has_is_not_shifted() -> None:
    both = [Series("original", ["a", "c"], [1.0, 3.0]), Series("treated", ["a", "b", "c"], [1.0, 2.0, 3.0])]
    figure = profile("id", "t", "c", both, unit="std")
    assert [t["x"] for t in figure.traces] == [[0, 2], [0, 1, 2]]
    assert figure.rows == [("a", 1.0, 1.0), ("b", None, 2.0), ("c", 3.0, 3.0)]


def test_a_hundred_layers_stay_readable() -> None:
    names = [f"blocks.{i}.attention.projection.weight" for i in range(100)]
    figure = profile("id", "t", "c", [Series("original", names, [1.0] * 100)], unit="std")
    assert len(figure.layout["xaxis"]["ticktext"]) <= 25
    assert max(map(len, figure.layout["xaxis"]["ticktext"])) <= 26
    assert len(figure.rows) == 100


def test_every_weight_is_counted_where_not_every_one_is_drawn() -> None:
    weights = [(f"w{i}", {"original": ([0.0, 1.0, 2.0], [1.0, 3.0])}) for i in range(30)]
    figure = histograms("id", "t", "c.", weights)
    assert len(figure.traces) == 12
    assert "The first 12 of 30" in figure.caption
    assert len(figure.rows) == 30


@pytest.mark.parametrize("edges", [[], [2.0, 2.0]])
def test_a_weight_of_no_or_one_value_has_a_histogram(edges: list[float]) -> None:
    counts = [7.0] if edges else []
    figure = histograms("id", "t", "c", [("w", {"original": (edges, counts)})])
    assert all(v is not None and math.isfinite(v) for v in figure.traces[0]["y"])


def test_a_model_that_raised_has_a_page_without_plots() -> None:
    page = to_html(Report((finding(severity="error"),), {}, {}, "net"))
    assert figures(page) == []


def test_a_report_without_findings_says_so() -> None:
    page = to_html(Report((), {}, {}, "net"))
    assert "nothing found" in page
    assert "Nothing was found." in page


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.html"
    path.write_text("before")
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_html(path, made())
    assert path.read_text() == "before"
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]


def test_the_file_is_as_readable_as_any_new_file(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.touch()
    assert stat.S_IMODE(write_html(tmp_path / "r.html", made()).stat().st_mode) == stat.S_IMODE(
        plain.stat().st_mode
    )


def test_without_plotly_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(ImportError, match=r"pip install 'musigma\[report\]'"):
        to_html(made())


class Net(nn.Module):
    """A net whose layer is called as no layer should be."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module("<b>&amp;", nn.Linear(6, 4))
        self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self._modules["<b>&amp;"](x)).relu())  # type: ignore[misc]


chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-sync",
    "--disable-background-networking",
    "--no-first-run",
    "--enable-logging=stderr",
    "--virtual-time-budget=20000",
    "--window-size=1200,3000",
)


@pytest.mark.skipif(chromium is None, reason="no chromium")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_draws_every_plot_without_complaint(tmp_path: Path, scheme: str) -> None:
    x, y = torch.randn(64, 6) * 4 + 2, torch.randint(3, (64,))
    report = examine(Net(), x, y, loss=nn.functional.cross_entropy, name=NASTY)
    record = recorded(examine(Net(), x / 4, y, loss=nn.functional.cross_entropy))
    page = write_html(tmp_path / "report.html", report, record=record, comparison=trained())
    colours = f"--blink-settings=preferredColorScheme={int(scheme == 'light')}"
    command = [
        str(chromium),
        *FLAGS,
        colours,
        f"--user-data-dir={tmp_path}/profile",
        "--dump-dom",
        page.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert said == []
    dom = done.stdout
    assert 'data-plots="6"' in dom
    # Each plot holds lines that were drawn, not just axes
    assert len(re.findall(r'class="main-svg"', dom)) >= 6
    assert len(re.findall(r'<path class="js-line"', dom)) >= 10
    assert re.search(r'id="no-plots"[^>]*hidden', dom)
    assert "&lt;b&gt;&amp;amp;" in dom


def test_data_for_the_script_can_not_end_it() -> None:
    written = script_json("data", {"name": NASTY})
    body = written.removeprefix('<script type="application/json" id="data">').removesuffix("</script>")
    assert "<" not in body
    assert json.loads(body) == {"name": NASTY}
