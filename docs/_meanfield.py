"""The figures of the guide to mean-field theory, drawn by the library whenever the documentation is built."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

import musigma as ms

mf = ms.init.meanfield
FIGURES: dict[str, Callable[[], Any]] = {
    "critical": lambda: mf.plot_critical("gelu"),
    "width": lambda: mf.plot_width_interval("gelu", width=512, depth=50, samples=32),
    "variance": lambda: mf.plot_variance_map("tanh", weight_var=1.3, bias_var=0.05),
    "correlation": lambda: mf.plot_correlation_map("relu", var=1.0, weight_var=2.0),
}


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put a figure in the place of each marker."""
    if page.file.src_uri != "guides/meanfield.md":
        return markdown
    drawn = re.sub(r"<!-- figure: (\w+) -->", lambda found: _html(found[1]), markdown)
    return f'<script src="../assets/plotly.min.js"></script>\n\n{drawn}'


def _html(name: str) -> str:
    figure = FIGURES[name]().update_layout(height=380)
    return f"\n{figure.to_html(full_html=False, include_plotlyjs=False)}\n"
