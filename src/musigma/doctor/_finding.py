"""What the doctor found: data only; how it looks on a terminal or a page is `_render` and `report`."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from musigma._version import __version__
from musigma.doctor import _render
from musigma.doctor._case import Case

__all__ = ["SCHEMA", "Finding", "Report", "Severity"]

# Raised by one whenever a key of `Report.to_dict` is removed or changes its meaning; added keys keep it.
SCHEMA = 1

Severity = Literal["error", "warning", "info"]
_ORDER: dict[str, int] = {"error": 0, "warning": 1, "info": 2}


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, where, and by which measured numbers.

    Args:
        code: the rule's code, such as "INP101".
        name: the rule's name, such as "unstandardized-input".
        severity: "error" (it will not train or answer as meant), "warning" (it costs), "info" (it wastes).
        where: qualified names of the modules, parameters or inputs concerned; "" is the model itself.
        message: one sentence with the measured values.
        evidence: the numbers behind the message; JSON-able.
        fix: what to do about it, in the imperative.
        treatment: the treatment that `treat` would apply, or None where it can't be mended automatically.
    """

    code: str
    name: str
    severity: Severity
    where: tuple[str, ...]
    message: str
    evidence: Mapping[str, Any]
    fix: str
    treatment: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The finding as plain JSON types."""
        return {
            "code": self.code,
            "name": self.name,
            "severity": self.severity,
            "where": list(self.where),
            "message": self.message,
            "evidence": _render.jsonable(self.evidence),
            "fix": self.fix,
            "treatment": self.treatment,
        }


@dataclass(frozen=True)
class Report:
    """The findings of one examination, worst first, with the measurements that reports draw.

    Args:
        findings: sorted by severity, then by code.
        measurements: what was measured, as plain JSON types: "inputs", "layers" (activation mean and std and
            the gradient of each recorded op), "parameters" (moments, gradient norm, histogram), "loss".
        skipped: code of every rule that stayed silent for want of something, with what it wanted.
        name: the name of the case or of the model's class.
        case: what was examined, for `treat`; no part of the report's data, and not compared or saved.

    Example:
        >>> from musigma.doctor import Report
        >>> report = Report(findings=(), measurements={}, skipped={}, name="net")
        >>> len(report), report.codes
        (0, ())
    """

    findings: tuple[Finding, ...]
    measurements: Mapping[str, Any] = field(default_factory=dict, repr=False)
    skipped: Mapping[str, str] = field(default_factory=dict, repr=False)
    name: str = ""
    case: Case | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        ordered = sorted(self.findings, key=lambda f: (_ORDER[f.severity], f.code))
        object.__setattr__(self, "findings", tuple(ordered))

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def __len__(self) -> int:
        return len(self.findings)

    @property
    def codes(self) -> tuple[str, ...]:
        """Every code that was found, once each, worst first."""
        return tuple(dict.fromkeys(f.code for f in self.findings))

    def by_code(self, code: str) -> tuple[Finding, ...]:
        """The findings of one rule; empty where it found nothing."""
        return tuple(f for f in self.findings if f.code == code)

    def to_dict(self) -> dict[str, Any]:
        """The whole report as plain JSON types, in a schema that only grows within one version."""
        counts = {s: sum(f.severity == s for f in self.findings) for s in _ORDER}
        return {
            "schema": SCHEMA,
            "musigma": __version__,
            "name": self.name,
            "counts": counts,
            "findings": [f.to_dict() for f in self.findings],
            "skipped": dict(self.skipped),
            "measurements": _render.jsonable(self.measurements),
        }

    def to_json(self, *, indent: int | None = 2) -> str:
        """`to_dict` as JSON text; a number that isn't finite becomes the string "nan", "inf" or "-inf"."""
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False, ensure_ascii=False)

    def __str__(self) -> str:
        return _render.plain(self)

    def __rich__(self) -> Any:
        return _render.rich(self)
