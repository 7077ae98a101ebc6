"""Every example in the package's docstrings runs, one test a module."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
import types
from typing import Any

import pytest

import musigma

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


class Finder(doctest.DocTestFinder):
    """The standard finder tells whose a function is by its globals; a type checker's wrapper has its own."""

    def _from_module(self, module: types.ModuleType | None, object: Any) -> bool:
        if module is not None and inspect.isroutine(object) and hasattr(object, "__wrapped__"):
            return bool(object.__module__ == module.__name__)
        return bool(super()._from_module(module, object))  # type: ignore[misc]


def modules() -> list[str]:
    found = pkgutil.walk_packages(musigma.__path__, "musigma.")
    return ["musigma", *sorted(m.name for m in found if not m.name.endswith("__main__"))]


@pytest.mark.parametrize("name", modules())
def test_docstring_examples(name: str) -> None:
    module = importlib.import_module(name)
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    report: list[str] = []
    for test in Finder().find(module, name):
        runner.run(test, out=report.append)
    assert runner.failures == 0, "".join(report)


def test_finder_sees_through_the_type_checker() -> None:
    import functools

    module = types.ModuleType("probe")

    def plain() -> None:
        """
        >>> 1 + 1
        2
        """

    plain.__module__ = "probe"

    @functools.wraps(plain)
    def wrapped() -> None: ...

    module.wrapped = wrapped  # type: ignore[attr-defined]
    assert [len(t.examples) for t in Finder().find(module, "probe") if t.examples] == [1]
