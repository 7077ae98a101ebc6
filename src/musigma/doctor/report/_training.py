"""How two models trained, side by side: the curves, and a table that names the better of each pair."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from musigma.doctor.report._figures import Figure, Mark, Series, progress

__all__ = ["Comparison", "Row", "Run", "comparison_rows", "trained_figures"]


@runtime_checkable
class Run(Protocol):
    """One training run, as `musigma.doctor.compare` measures it."""

    @property
    def losses(self) -> Sequence[float]:
        """The loss of every step, before that step's update."""

    @property
    def accuracies(self) -> Sequence[tuple[int, float]]:
        """(step, accuracy on the held-out data) wherever it was measured; empty where there is none."""

    @property
    def seconds(self) -> float:
        """Time spent on the training steps alone."""


@runtime_checkable
class Comparison(Protocol):
    """Two runs on the same batches in the same order."""

    @property
    def original(self) -> Run:
        """The model as it was given."""

    @property
    def treated(self) -> Run:
        """The treated copy."""

    @property
    def expected_loss(self) -> float | None:
        """What a fresh classifier's loss should be, ln C; None where that is not defined."""

    @property
    def goal(self) -> float:
        """The accuracy whose first step is reported."""


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Args:
        name: what is compared.
        original: its value for the original; None where it was not reached.
        treated: its value for the treated copy.
        better: "original", "treated", or "" for a draw.
        unit: how it is shown: "", "%", "s" or "steps".
    """

    name: str
    original: float | None
    treated: float | None
    better: str
    unit: str = ""

    def shown(self, which: str) -> str:
        """A value as text."""
        value = self.original if which == "original" else self.treated
        if value is None:
            return "not reached"
        if not math.isfinite(value):
            return str(value)
        if self.unit == "%":
            return f"{100 * value:.1f} %"
        if self.unit == "s":
            return f"{value:.1f} s"
        return f"{value:.0f}" if self.unit == "steps" else f"{value:.3f}"


def _row(
    name: str, original: float | None, treated: float | None, unit: str, *, best: str, target: float = 0.0
) -> Row:
    def cost(value: float | None) -> float:
        if value is None or not math.isfinite(value):
            return math.inf
        return {"low": value, "high": -value, "near": abs(value - target)}[best]

    costs = {"original": cost(original), "treated": cost(treated)}
    better = "" if costs["original"] == costs["treated"] else min(costs, key=costs.__getitem__)
    return Row(name, original, treated, better, unit)


def reached(run: Run, goal: float) -> int | None:
    """The first step whose accuracy is at least the goal."""
    return next((step for step, accuracy in run.accuracies if accuracy >= goal), None)


def comparison_rows(comparison: Comparison) -> list[Row]:
    """Every measure of the two runs, whichever comes out ahead."""
    a, b = comparison.original, comparison.treated
    rows = []
    if comparison.expected_loss is not None:
        name = f"loss at the start (a fresh net: {comparison.expected_loss:.3f})"
        rows.append(_row(name, a.losses[0], b.losses[0], "", best="near", target=comparison.expected_loss))
    else:
        rows.append(_row("loss at the start", a.losses[0], b.losses[0], "", best="low"))
    rows.append(_row("loss at the end", a.losses[-1], b.losses[-1], "", best="low"))
    if a.accuracies and b.accuracies:
        goal = comparison.goal
        rows.append(
            _row(
                f"steps to {goal:.0%} test accuracy", reached(a, goal), reached(b, goal), "steps", best="low"
            )
        )
        rows.append(_row("final test accuracy", a.accuracies[-1][1], b.accuracies[-1][1], "%", best="high"))
    # One run's time is too noisy to call a winner
    rows.append(Row("time to train", a.seconds, b.seconds, "", "s"))
    return rows


def trained_figures(comparison: Comparison) -> list[Figure]:
    """The loss of every step and the accuracy on held-out data."""
    runs = {"original": comparison.original, "treated": comparison.treated}
    losses = [Series(name, range(1, len(run.losses) + 1), run.losses) for name, run in runs.items()]
    expected = comparison.expected_loss
    figures = [
        progress(
            "loss",
            "Training loss",
            "The same batches in the same order for both.",
            losses,
            unit="loss",
            mark=None if expected is None else Mark(expected, f"a fresh net: {expected:.3f}"),
        )
    ]
    if all(run.accuracies for run in runs.values()):
        curves = [Series(name, *zip(*run.accuracies, strict=True)) for name, run in runs.items()]
        figures.append(
            progress(
                "accuracy",
                "Test accuracy",
                "On data that neither model was trained on.",
                curves,
                unit="accuracy",
                percent=True,
                mark=Mark(comparison.goal, f"{comparison.goal:.0%}"),
            )
        )
    return figures
