"""The registry of rules: one rule is one documented file, and an undocumented one is refused."""

import difflib
import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from musigma.doctor._finding import Severity

__all__ = ["SECTIONS", "Check", "Rule", "Symptom", "explain", "list_rules", "rule", "select_rules"]

SECTIONS = ("What it does", "Why it hurts", "Example", "Use instead", "Fix safety", "References")
# What a rule may ask of the caller; the names are those of `examine`'s arguments.
NEEDS = ("targets", "loss", "optimizer", "scheduler", "mask", "independent", "intent")

_CODE = re.compile(r"[A-Z]{3}\d{3}")
_NAME = re.compile(r"[a-z]+(-[a-z0-9]+)*")


@dataclass(frozen=True)
class Symptom:
    """What a rule says; the registry adds who said it (code, name, severity, treatment).

    Args:
        where: qualified names of the modules, parameters or inputs concerned; "" is the model itself.
        message: one sentence with the measured values.
        evidence: the numbers behind the message; JSON-able.
        fix: what to do about it, in the imperative.
        severity: only where it differs from the rule's own.
    """

    where: tuple[str, ...]
    message: str
    evidence: Mapping[str, Any]
    fix: str
    severity: Severity | None = None


Check = Callable[[Any], Iterable[Symptom]]


@dataclass(frozen=True)
class Rule:
    """A registered rule: its identity, its judgement and its documentation."""

    code: str
    name: str
    severity: Severity
    needs: tuple[str, ...]
    on_failure: bool
    check: Check
    text: str

    def section(self, title: str) -> str:
        """One section of the rule's documentation, as markdown without its heading."""
        return split_sections(self.text)[title]


_REGISTRY: dict[str, Rule] = {}


def split_sections(text: str) -> dict[str, str]:
    """The `##` sections of a rule's docstring, in order."""
    pieces = re.split(r"^## +(.+?) *$", text, flags=re.MULTILINE)
    return {title: body.strip() for title, body in zip(pieces[1::2], pieces[2::2], strict=True)}


def rule(
    code: str,
    name: str,
    *,
    severity: Severity,
    needs: tuple[str, ...] = (),
    on_failure: bool = False,
) -> Callable[[Check], Check]:
    """Register a judgement under its code; the docstring of its file is its documentation.

    Args:
        code: three capitals and three digits, such as "INP101"; each once.
        name: words with hyphens, such as "unstandardized-input"; each once.
        severity: what a symptom has unless it says otherwise.
        needs: arguments of `examine` without which the rule stays silent.
        on_failure: judge also (and only then look at `examination.failure`) when the model raised.

    Returns:
        A decorator that leaves the function as it is.

    Raises:
        ValueError: a malformed or taken code or name, or a docstring that lacks a section.
    """
    if not _CODE.fullmatch(code):
        raise ValueError(f"a rule's code is three capitals and three digits, such as INP101; got {code!r}")
    if not _NAME.fullmatch(name):
        raise ValueError(f"a rule's name is lower-case words with hyphens; got {name!r}")
    if severity not in get_args(Severity):
        raise ValueError(f"severity must be one of {get_args(Severity)}; got {severity!r}")
    if unknown := [n for n in needs if n not in NEEDS]:
        raise ValueError(f"needs must be arguments of examine {NEEDS}; got {unknown}")

    def register(check: Check) -> Check:
        text = inspect.cleandoc(sys.modules[check.__module__].__doc__ or "")
        _refuse_undocumented(code, name, text, check.__module__)
        for other in _REGISTRY.values():
            if (other.code == code or other.name == name) and other.check.__module__ != check.__module__:
                raise ValueError(
                    f"{code} {name} is taken by {other.code} {other.name} in {other.check.__module__}"
                )
        _REGISTRY[code] = Rule(code, name, severity, needs, on_failure, check, text)
        return check

    return register


def _refuse_undocumented(code: str, name: str, text: str, module: str) -> None:
    first = text.splitlines()[0] if text else ""
    if not first.startswith(f"{code} {name}"):
        raise ValueError(
            f"the docstring of {module} must begin with '{code} {name}'; it begins with {first!r}"
        )
    found = split_sections(text)
    missing = [s for s in SECTIONS if not found.get(s)]
    if missing:
        raise ValueError(f"{code} ({module}) must document {list(SECTIONS)}; missing or empty: {missing}")
    for title in ("Example", "Use instead"):
        if "```python" not in found[title]:
            raise ValueError(
                f"{code} ({module}): section '{title}' needs a ```python block that defines `case`"
            )


def list_rules() -> tuple[Rule, ...]:
    """Every rule, by code; the files under `musigma.doctor.rules` are imported on the first call.

    Example:
        >>> from musigma.doctor import list_rules
        >>> next(r.name for r in list_rules() if r.code == "INP103")
        'non-finite-input'
    """
    package = importlib.import_module("musigma.doctor.rules")
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
    return tuple(_REGISTRY[c] for c in sorted(_REGISTRY))


def explain(code: str) -> str:
    """The documentation of a rule, as markdown, by its code or its name.

    Args:
        code: such as "INP101" or "unstandardized-input"; case doesn't matter.

    Raises:
        ValueError: no such rule; the message names the nearest.

    Example:
        >>> from musigma.doctor import explain
        >>> explain("INP103").splitlines()[0]
        'INP103 non-finite-input: NaN or infinity in the data.'
    """
    wanted = code.strip()
    for r in list_rules():
        if wanted.upper() == r.code or wanted.lower() == r.name:
            return r.text
    raise ValueError(f"no rule is called {code!r}; {_nearest(wanted)}")


def _nearest(wanted: str) -> str:
    known = [r.code for r in list_rules()] + [r.name for r in list_rules()]
    close = difflib.get_close_matches(wanted.upper(), known, 3) + difflib.get_close_matches(
        wanted.lower(), known, 3
    )
    return (
        f"did you mean {' or '.join(close[:3])}?"
        if close
        else f"the codes are {', '.join(known[: len(known) // 2])}"
    )


def select_rules(select: Iterable[str] | None, ignore: Iterable[str] | None) -> tuple[Rule, ...]:
    """The rules whose code begins with one of `select` (all where it is None) and with none of `ignore`.

    Raises:
        TypeError: a bare string where a collection of codes is meant.
        ValueError: a prefix that no rule has.
    """
    chosen = {r.code: r for r in list_rules()}
    for argument, prefixes in (("select", select), ("ignore", ignore)):
        if isinstance(prefixes, str):
            raise TypeError(f"{argument} must be a collection of codes or prefixes; write [{prefixes!r}]")
        for prefix in prefixes or ():
            if not any(r.code.startswith(prefix.upper()) or r.name == prefix for r in list_rules()):
                raise ValueError(
                    f"{argument}: no rule has a code that begins with {prefix!r}; {_nearest(prefix)}"
                )

    def named(r: Rule, prefixes: Iterable[str]) -> bool:
        return any(r.code.startswith(p.upper()) or r.name == p for p in prefixes)

    kept = [r for r in chosen.values() if select is None or named(r, list(select))]
    return tuple(r for r in kept if not named(r, list(ignore or ())))
