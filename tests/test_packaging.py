"""What an installed musigma costs to import, names, and carries with it."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from importlib import metadata
from pathlib import Path

import pytest

import musigma

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

HEAVY = {"IPython", "jinja2", "matplotlib", "pandas", "plotly", "rich", "scipy", "sklearn", "triton", "typer"}
# What jaxtyping brings; everything else belongs to torch, numpy or the standard library.
ALLOWED = {"jaxtyping", "musigma", "wadler_lindig"}


def python(code: str) -> str:
    """Run a fresh interpreter without the hooks of this test session."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("MUSIGMA_")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    return done.stdout


def imported_beyond_torch(statement: str) -> set[str]:
    code = f"""
import json, sys
import numpy, torch
before = set(sys.modules)
{statement}
new = {{name.partition(".")[0] for name in set(sys.modules) - before}}
print(json.dumps(sorted(new - set(sys.stdlib_module_names))))
"""
    return set(json.loads(python(code)))


def test_importing_musigma_costs_torch_and_little_more() -> None:
    assert imported_beyond_torch("import musigma") <= ALLOWED | {"torch", "numpy", "typing_extensions"}


def test_no_floor_imports_a_heavy_package() -> None:
    floors = ", ".join(
        f"musigma.{name}" for name in ("doctor", "nn", "init", "inputs", "surgery", "graph", "lab")
    )
    # jinja2 is torch's own dependency, which a floor may make it import
    assert not imported_beyond_torch(f"import {floors}") & (HEAVY - {"jinja2"})


def test_importing_warns_of_nothing() -> None:
    strict = "import warnings; warnings.simplefilter('error'); "
    python(strict + "import musigma; [getattr(musigma, n) for n in musigma.__all__]")


def test_importing_leaves_the_global_generator_alone() -> None:
    said = python(
        "import torch; torch.manual_seed(3); a = torch.get_rng_state(); import musigma;"
        "[getattr(musigma, n) for n in musigma.__all__]; print(torch.equal(a, torch.get_rng_state()))"
    )
    assert said.strip() == "True"


def packages() -> list[str]:
    found = sorted((ROOT / "src/musigma").rglob("__init__.py"))
    return [".".join(p.parent.relative_to(ROOT / "src").parts) for p in found]


@pytest.mark.parametrize("name", packages())
def test_public_names_exist(name: str) -> None:
    module = importlib.import_module(name)
    public = getattr(module, "__all__", [])
    assert [n for n in public if not hasattr(module, n)] == []
    assert len(set(public)) == len(public)


def test_a_module_never_bears_the_name_of_a_function_beside_it() -> None:
    # After `from .record import record`, `package.record` is the function or the module, by import order.
    doubled = []
    for package in sorted((ROOT / "src/musigma").rglob("__init__.py")):
        name = ".".join(package.parent.relative_to(ROOT / "src").parts)
        imports = [n for n in ast.walk(ast.parse(package.read_text())) if isinstance(n, ast.ImportFrom)]
        # `from musigma.graph import _kinds as kinds` names a module, which is what the attribute then is
        named = {a.asname or a.name for n in imports if n.module != name for a in n.names}
        beside = [p for p in package.parent.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()]
        doubled += [str(p.relative_to(ROOT)) for p in beside if p.stem in named]
    assert doubled == []


def test_types_are_declared() -> None:
    assert (ROOT / "src/musigma/py.typed").exists()


def test_every_file_that_is_not_python_is_packaged() -> None:
    globs = PROJECT["tool"]["setuptools"]["package-data"]["musigma"]
    package = ROOT / "src/musigma"
    others = [
        str(p.relative_to(package))
        for p in package.rglob("*")
        if p.is_file() and p.suffix not in {".py", ".pyc"} and "__pycache__" not in p.parts
        # what setup.py builds in place; a wheel gets its own
        if p.suffix != ".so" and p.name != "_build.json"
    ]
    assert [o for o in others if not any(fnmatch(o, g) for g in globs)] == []


def test_one_version() -> None:
    assert musigma.__version__ == metadata.version("musigma")
    assert re.fullmatch(r"\d+\.\d+\.\d+", musigma.__version__)


def test_every_direct_dependency_is_pinned_for_make() -> None:
    def name(requirement: str) -> str:
        return re.split(r"[\s\[<>=!~;]", requirement, maxsplit=1)[0].lower()

    asked = [*PROJECT["project"]["dependencies"]]
    for extra in PROJECT["project"]["optional-dependencies"].values():
        asked += extra
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {name(line) for line in lines if line and not line.startswith("#")}
    assert {name(a) for a in asked} - {"musigma"} - pinned == set()
    assert all("==" in line for line in lines if line and not line.startswith("#"))
