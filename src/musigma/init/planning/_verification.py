"""What was measured after an initialization, beside what was expected."""

from __future__ import annotations

import html
import math
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Check:
    """One weight layer: measured and expected.

    Attributes:
        node: index of the op in the plan's graph.
        module: where it ran.
        weights: its weights.
        kind: what its output is for, as in `Layer`.
        std: root of the output's second moment, over examples, places and units.
        expected: the same, expected.
        low, high: where theory lets it lie at this width, depth and number of examples.
        across: standard deviation from example to example, the mean over units taken out.
        correlation: of the outputs of two examples, averaged over pairs; nan for a single example.
        expected_correlation: the same, expected.
        gradient: sum of squares of the gradient at the output, relative to the last layer's.
        expected_gradient: the same, expected; nan where theory doesn't say.
        gradient_low, gradient_high: where theory lets it lie.
        missed: what lies outside, and why; empty if nothing does.
    """

    node: int
    module: str
    weights: tuple[str, ...]
    kind: str
    std: float
    expected: float
    low: float
    high: float
    across: float
    correlation: float
    expected_correlation: float
    gradient: float
    expected_gradient: float
    gradient_low: float
    gradient_high: float
    missed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verification:
    """The example, run forward and backward through the initialized model.

    Attributes:
        checks: one for each weight layer, in execution order.
        loss: cross entropy of the first output with classes drawn at random, if it looks like logits.
        ideal: the loss of ignorance, ln C.
        notes: what could not be measured, and why.
    """

    checks: tuple[Check, ...]
    loss: float | None = None
    ideal: float | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def missed(self) -> tuple[str, ...]:
        """Everything that lies outside of its interval, with the reason."""
        found = [f"{check.module or 'the model'}: {text}" for check in self.checks for text in check.missed]
        if self.loss is not None and self.ideal is not None and self.loss > self.ideal + _EXCESS:
            found.append(f"the loss starts at {self.loss:.4g}, ignorance costs {self.ideal:.4g}")
        return tuple(found)

    @property
    def ok(self) -> bool:
        """Whether nothing was missed."""
        return not self.missed

    def __str__(self) -> str:
        lines = [self._head()]
        lines += [f"missed: {text}" for text in self.missed]
        lines += [f"note: {note}" for note in self.notes]
        lines.append(f"{'layer':28} {'std':>8} {'expected':>19} {'across':>7} {'corr':>5} {'gradient':>8}")
        for c in self.checks:
            name = c.module or (c.weights[0] if c.weights else "")
            name = name if len(name) <= 28 else "…" + name[-27:]
            interval = f"{_number(c.low)}…{_number(c.high)}"
            lines.append(
                f"{name:28} {_number(c.std):>8} {interval:>19} {_number(c.across):>7} "
                f"{c.correlation:5.2f} {_number(c.gradient):>8}"
            )
        return "\n".join(lines)

    def _head(self) -> str:
        missed = len(self.missed)
        said = "all as expected" if not missed else f"{missed} outside of what theory allows"
        loss = "" if self.loss is None else f"; loss {self.loss:.4g}, ignorance {self.ideal:.4g}"
        return f"verified on the example: {len(self.checks)} layers, {said}{loss}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data; nan is None."""
        return {
            "ok": self.ok,
            "missed": list(self.missed),
            "loss": self.loss,
            "ideal": self.ideal,
            "notes": list(self.notes),
            "checks": [{name: _plain(value) for name, value in vars(check).items()} for check in self.checks],
        }

    def fragment(self) -> str:
        """A table as HTML."""
        rows = "".join(
            f"<tr><td><code>{html.escape(c.module or ', '.join(c.weights))}</code></td><td>{c.std:.4g}</td>"
            f"<td>{c.low:.4g} … {c.high:.4g}</td><td>{c.across:.4g}</td><td>{c.correlation:.3f}</td>"
            f"<td>{c.gradient:.3g}</td><td>{html.escape('; '.join(c.missed))}</td></tr>"
            for c in self.checks
        )
        return (
            f"<p>{html.escape(self._head())}</p><table><thead><tr><th>layer</th><th>std</th><th>expected</th>"
            "<th>across examples</th><th>correlation</th><th>gradient</th><th>missed</th></tr></thead>"
            f"<tbody>{rows}</tbody></table>"
        )


# Logits of variance 1 cost a half above ln C; more is a head that is sure of something it can't know.
_EXCESS = 0.5


def _number(value: float) -> str:
    return f"{value:.3g}"


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return list(value) if isinstance(value, tuple) else value
