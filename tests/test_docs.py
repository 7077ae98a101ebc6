"""The examples in the README and the guides run, as a reader would type them."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("path", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_examples(path: Path) -> None:
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    test = doctest.DocTestParser().get_doctest(path.read_text(), {}, path.name, str(path), 0)
    report: list[str] = []
    doctest.DocTestRunner(optionflags=flags).run(test, out=report.append)
    assert not report, "".join(report)


@pytest.mark.parametrize("path", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_python_blocks_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for block in re.findall(r"^```python\n(.*?)^```", path.read_text(), flags=re.MULTILINE | re.DOTALL):
        exec(compile(block, str(path), "exec"), {"__name__": "example"})


@pytest.mark.parametrize("path", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_to_files_lead_somewhere(path: Path) -> None:
    prose = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"\]\(([^)#\s]+)\)", prose)
    local = [t for t in targets if "://" not in t and not t.startswith("mailto:")]
    # rules/, api/ and the like are written when the documentation is built
    made = re.compile(r"(^|/)(rules|api)/|(^|/)(schemes|cli)\.md$")
    assert [t for t in local if not made.search(t) and not (path.parent / t).exists()] == []
