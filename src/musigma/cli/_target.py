"""`path/to/file.py:factory` or `package.module:factory`, loaded; each way to fail has its own sentence."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import os
import pkgutil
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from musigma.doctor import Case

FORM = "TARGET must be path/to/file.py:factory or package.module:factory"


class TargetError(Exception):
    """The target can't be used; `trace` is the user's own traceback where their code raised."""

    def __init__(self, message: str, *, trace: str = "") -> None:
        super().__init__(message)
        self.trace = trace


def load(target: str) -> Case:
    """Import what `target` names, call it and return the case it makes.

    Raises:
        TargetError: it can't be found, imported, called, or does not return a `Case`.
    """
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name:
        raise TargetError(f"{FORM}; got {target!r}")
    module = _from_file(place) if _is_path(place) else _from_name(place)
    factory = _attribute(module, name, place)
    case = _call(factory, target)
    if not isinstance(case, Case):
        hint = "return musigma.doctor.Case(model, inputs, ...)"
        raise TargetError(f"{target} must return a musigma.doctor.Case; it returned {_kind(case)}: {hint}")
    return case


def _kind(value: Any) -> str:
    kind = type(value)
    named = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(value, tuple | list):
        return f"a {named} of {', '.join(type(v).__name__ for v in value) or 'nothing'}"
    return "None" if value is None else f"a {named}"


def _is_path(place: str) -> bool:
    return place.endswith(".py") or os.sep in place or (os.altsep is not None and os.altsep in place)


def _close(word: str, known: list[str]) -> str:
    near = difflib.get_close_matches(word, known, n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def _from_file(place: str) -> ModuleType:
    path = Path(place).expanduser()
    if not path.is_file():
        folder = path.parent
        if not folder.is_dir():
            raise TargetError(f"{FORM}: there is no folder {folder}")
        known = sorted(p.name for p in folder.glob("*.py"))
        raise TargetError(f"{FORM}: there is no file {path}{_close(path.name, known)}")
    path = path.resolve()
    # Unique, so that a file called torch.py or test.py hides nothing and is hidden by nothing.
    name = f"_musigma_target_{hashlib.sha1(str(path).encode()).hexdigest()[:12]}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise TargetError(f"{FORM}: {path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    # dataclasses and pickling look a class's module up here while it is being imported
    sys.modules[name] = module
    _search_first(str(path.parent))
    with _shown_whole(f"importing {place} raised"):
        spec.loader.exec_module(module)
    return module


def _from_name(place: str) -> ModuleType:
    _search_first(os.getcwd())
    parent = ""
    for part in place.split("."):
        full = f"{parent}.{part}" if parent else part
        if not part.isidentifier() or not _exists(full):
            raise TargetError(f"{FORM}: no module named {full!r}{_near_module(part, parent)}")
        parent = full
    with _shown_whole(f"importing {place} raised"):
        return importlib.import_module(place)


def _search_first(folder: str) -> None:
    if folder not in sys.path:
        sys.path.insert(0, folder)


def _exists(full: str) -> bool:
    with _shown_whole(f"importing the parents of {full} raised"):
        try:
            return full in sys.modules or importlib.util.find_spec(full) is not None
        except ModuleNotFoundError as error:
            # The parent is a plain module, which holds no others
            if error.name == full:
                return False
            raise


def _near_module(part: str, parent: str) -> str:
    paths = getattr(sys.modules.get(parent), "__path__", []) if parent else None
    known = sorted(m.name for m in pkgutil.iter_modules(paths))
    near = _close(part, known)
    if not parent and not near and (Path.cwd() / f"{part}.py").is_file():  # pragma: no cover
        return f"; did you mean ./{part}.py?"
    return near or ("" if parent else "; modules are looked for in this folder and in the installed packages")


def _attribute(module: ModuleType, name: str, place: str) -> Any:
    value: Any = module
    for part in name.split("."):
        if not hasattr(value, part):
            known = [n for n in dir(value) if not n.startswith("_")]
            # A factory is most likely a function that the module itself defines
            own = [n for n in known if getattr(getattr(value, n), "__module__", None) == module.__name__]
            near = _close(part, known) or (f"; it defines {', '.join(own[:5])}" if own else "")
            raise TargetError(f"{place} has no attribute {part!r}{near}")
        value = getattr(value, part)
    return value


def _call(factory: Any, target: str) -> Any:
    if not callable(factory):
        raise TargetError(f"{target} must be a function that returns a Case; it is {_kind(factory)}")
    try:
        inspect.signature(factory).bind()
    except TypeError as error:
        taken = str(inspect.signature(factory))
        raise TargetError(f"{target} must take no arguments; it takes {taken}: {error}") from None
    except ValueError:  # a builtin without a signature: calling it tells
        pass
    with _shown_whole(f"{target} raised"):
        return factory()


@contextmanager
def _shown_whole(what: str) -> Iterator[None]:
    """Turn the user's exception into a TargetError that carries their traceback, from their first line on."""
    try:
        yield
    except TargetError:
        raise
    except SystemExit as error:
        raise TargetError(
            f"{what} SystemExit({error.code!r}); guard it with if __name__ == '__main__'"
        ) from None
    except Exception as error:
        raise TargetError(f"{what} {summary(error)}", trace=own_traceback(error)) from None


def summary(error: BaseException) -> str:
    """The exception's class and message, without the notes that `examine` adds."""
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def own_traceback(error: BaseException) -> str:
    """The traceback as Python prints it, without the frames of musigma and importlib that lead to it."""
    tb = error.__traceback__
    while tb is not None and _is_ours(tb):
        tb = tb.tb_next
    # A SyntaxError has no frame in the user's file; it shows the place by itself
    return "".join(traceback.format_exception(type(error), error, tb))


def _is_ours(tb: TracebackType) -> bool:
    name = tb.tb_frame.f_globals.get("__name__", "")
    return name.startswith(("musigma.", "importlib.", "_frozen_importlib", "runpy")) or name in {
        "importlib",
        "musigma",
    }
