"""The reference pages, written from the source whenever the documentation is built."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import musigma as ms

FLOORS = ("statistics", "ops", "graph", "functional", "nn", "inputs", "init", "surgery", "doctor", "lab")
# The public submodules that a floor doesn't re-export.
INSIDE = ("init.meanfield", "doctor.report", "lab.bench")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page per floor and per rule, the table of schemes and the help of every command."""
    from plotly.offline import get_plotlyjs

    for path, text in pages():
        files.append(File.generated(config, path, content=text))
    files.append(File.generated(config, "assets/plotly.min.js", content=get_plotlyjs()))
    return files


def pages() -> Iterator[tuple[str, str]]:
    """Path and markdown of every generated page."""
    yield from _api()
    yield from _rules()
    yield "schemes.md", _schemes()
    yield "results.md", _results()
    yield "cli.md", _cli()


def _first_line(doc: str | None) -> str:
    return inspect.cleandoc(doc or "").partition("\n\n")[0].replace("\n", " ")


def _api() -> Iterator[tuple[str, str]]:
    rows = []
    for name in (*FLOORS, *INSIDE):
        module = importlib.import_module(f"musigma.{name}")
        public = list(getattr(module, "__all__", []))
        rows.append(f"| [`musigma.{name}`]({name}.md) | {_first_line(module.__doc__)} |")
        listed = "\n".join(
            f"::: musigma.{name}.{n}\n    options: {{show_root_heading: true}}\n" for n in public
        )
        yield f"api/{name}.md", f"# musigma.{name}\n\n{_first_line(module.__doc__)}\n\n{listed}"
    head = "# API\n\n| module | what it holds |\n|---|---|\n"
    yield "api/index.md", head + "\n".join(rows) + "\n"


def _rules() -> Iterator[tuple[str, str]]:
    rows = []
    for rule in ms.doctor.list_rules():
        path = f"{rule.code}.md"
        said = rule.text.partition("\n")[0].partition(": ")[2]
        rows.append(f"| [{rule.code}]({path}) | {rule.name} | {rule.severity} | {said} |")
        needs = f"Stays silent without: {', '.join(rule.needs)}.\n\n" if rule.needs else ""
        body = rule.text.partition("\n")[2].strip()
        title = f"# {rule.code} {rule.name}\n\n{said[:1].upper()}{said[1:]}\n\n"
        yield f"rules/{path}", f"{title}Severity: **{rule.severity}**. {needs}\n\n{body}\n"
    head = "# Rules\n\n| code | name | severity | what it says |\n|---|---|---|---|\n"
    yield "rules/index.md", head + "\n".join(rows) + "\n"


def _schemes() -> str:
    schemes = getattr(ms.init, "SCHEMES", {})
    head = "# Schemes\n\nEvery scheme is a function that fills a tensor in place; a generic test samples\n"
    head += "each and checks the law below within its sampling error.\n\n"
    head += "| function | law | from |\n|---|---|---|\n"
    return head + "\n".join(_scheme(s) for s in schemes.values()) + "\n"


def _scheme(scheme: Any) -> str:
    formula, source = (text.replace("|", "\\|") for text in (scheme.formula, scheme.source))
    return f"| [`{scheme.name}_`][musigma.init.{scheme.name}_] | {formula} | {source} |"


def _results() -> str:
    """Every result of the lab, reproduced now, with its figure."""
    parts = [
        "# Results\n",
        "Published results, reproduced when this page was built. Each has a prediction, a measurement and a\n"
        "tolerance with its reason; `musigma.lab.run(name)` does it again.\n",
        '<script src="assets/plotly.min.js"></script>\n',
    ]
    for result in ms.lab.results():
        outcome = result.run()
        verdict = "holds" if outcome.holds else "does not hold"
        parts += [f"## {outcome.name}\n", f"{outcome.claim}: **{verdict}**. Source: {outcome.source}.\n"]
        parts += ["| quantity | predicted | measured | tolerance | why |", "|---|---|---|---|---|"]
        for q in outcome.quantities:
            parts.append(
                f"| {q.name} | {q.predicted:.4g} | {q.measured:.4g} | {q.tolerance:.0%} | {q.reason} |"
            )
        figure = outcome.figure().update_layout(title=None, height=380)
        parts += ["", figure.to_html(full_html=False, include_plotlyjs=False), ""]
    return "\n".join(parts)


def _cli() -> str:
    from typer.main import get_command

    from musigma.cli._app import app

    group: Any = get_command(app)
    parts = ["# Command line\n", f"{_plain(group.help)}\n", f"{group.epilog}\n"]
    for name, command in group.commands.items():
        parts += [
            f"## musigma {name}\n",
            f"{_plain(command.help)}\n",
            "| argument | what it does |\n|---|---|",
        ]
        for parameter in command.params:
            told = (
                " ".join((*parameter.opts, *parameter.secondary_opts))
                if parameter.param_type_name == "option"
                else parameter.name.upper()
            )
            parts.append(f"| `{told}` | {_plain(parameter.help)} |")
        parts.append("")
    return "\n".join(parts)


def _plain(text: str | None) -> str:
    return inspect.cleandoc(text or "").replace("|", "\\|").replace("\n\n", "<br>").replace("\n", " ")
