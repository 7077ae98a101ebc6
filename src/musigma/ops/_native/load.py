"""Loads the compiled kernels if they are there and were built for the torch that runs; else says why not."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType

import torch

RECORD = Path(__file__).parents[1] / "_build.json"
"""What setup.py wrote about the build."""

LEVEL = "MUSIGMA_LEVEL"
"""The environment variable that takes another CPU level than this CPU's best."""

REBUILD = "install musigma once more, with pip's --force-reinstall --no-deps --no-cache-dir"


@dataclass(frozen=True)
class Native:
    """The extension, or why there is none. `broken` is a reason its user should hear of unasked."""

    module: ModuleType | None
    reason: str
    broken: bool = False


def load() -> Native:
    """Load the extension beside this package.

    An extension built against another torch may not even load, or load and then read objects whose layout
    has changed, so its record is read first.
    """
    try:
        record = json.loads(RECORD.read_text())
        built, built_for, reason, size = (record[key] for key in ("built", "torch", "reason", "size"))
    except FileNotFoundError:
        return Native(None, "no native kernel is built")
    except (OSError, ValueError, KeyError, TypeError) as error:
        return Native(None, f"{RECORD.name} can't be read: {error!r}; {REBUILD}", broken=True)
    if not built:
        return Native(None, f"the kernels could not be built: {reason}; {REBUILD}", broken=True)
    if built_for != torch.__version__:
        return Native(
            None,
            f"the kernels were built for torch {built_for}, and {torch.__version__} runs; {REBUILD}",
            broken=True,
        )
    if record.get("sources") != digest():
        return Native(
            None, f"the kernels' sources have changed since they were built; {REBUILD}", broken=True
        )
    # A file that was copied in part ends the process where the linker reads beyond it.
    path = RECORD.parent / f"_C{EXTENSION_SUFFIXES[0]}"
    if path.exists() and path.stat().st_size != size:
        return Native(None, f"{path.name} is not the file that was built; {REBUILD}", broken=True)
    try:
        module = importlib.import_module("musigma.ops._C")
    except ImportError as error:
        said, _, _ = str(error).partition("\n")  # C++ adds its stack
        return Native(None, f"the kernels do not load: {said}; {REBUILD}", broken=True)
    chosen = _at_level(module)
    return Native(module, f"built for torch {torch.__version__}, runs at level {module.level()}{chosen}")


def digest() -> str:
    """Of the sources of the extension: new Python must not meet old C++. setup.py forms the same."""
    ops = Path(__file__).parents[1]
    sources = sorted(path for kind in ("cpp", "h") for path in ops.glob(f"*/*.{kind}"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()


def _at_level(module: ModuleType) -> str:
    """Go to the level that the environment asks for; returns how that is told.

    Raises:
        ValueError: no such level is compiled, or this CPU can't run it.
    """
    wanted = os.environ.get(LEVEL, "")
    if not wanted:
        return ""
    levels: dict[str, bool] = module.levels()
    usable = ", ".join(name for name, runs in levels.items() if runs)
    if wanted not in levels:
        raise ValueError(
            f"{LEVEL} must be one of {', '.join(levels)}; got {wanted!r}. This CPU runs {usable}"
        )
    if not module.use_level(wanted):
        raise ValueError(f"{LEVEL}={wanted} asks for instructions this CPU lacks; it runs {usable}")
    return f", as {LEVEL} says"
