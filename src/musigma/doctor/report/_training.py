"""How two models trained, side by side: the curves, and a table that names the better of each pair."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from musigma.doctor._compare import Comparison, Run
from musigma.doctor.report._figures import Figure, Mark, Series, progress
from musigma.statistics import moments

__all__ = ["Row", "Trained", "comparison_rows", "trained_figures", "trials"]

# One comparison, or several that differ in their seed alone: then medians are shown.
Trained = Comparison | Sequence[Comparison]


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Args:
        name: what is compared.
        original: its median for the original; None where most runs did not reach it.
        treated: its median for the treated copy.
        wins: in how many runs (the original, the treated) was ahead.
        better: "original", "treated", or "" where neither median is ahead by what is shown of it.
        unit: how it is shown: "", "%", "s" or "steps".
    """

    name: str
    original: float | None
    treated: float | None
    wins: tuple[int, int]
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

    def verdict(self, *, runs: int) -> str:
        """Which is better, and in how many of the runs where there are several."""
        if not self.better:
            return "-"
        won = self.wins[0 if self.better == "original" else 1]
        return self.better if runs == 1 else f"{self.better}, {won} of {runs}"


def trials(trained: Trained) -> tuple[Comparison, ...]:
    """The comparisons, as a tuple.

    Raises:
        ValueError: there is none.
    """
    several = (trained,) if isinstance(trained, Comparison) else tuple(trained)
    if not several:
        raise ValueError("comparison must be a Comparison or a sequence of them; got an empty one")
    return several


def _row(
    name: str,
    several: Sequence[Comparison],
    measure: Callable[[Run], float | None],
    cost: Callable[[float], float],
    unit: str = "",
) -> Row:
    """A measure's medians; a value that was not reached or isn't finite costs most."""

    def costs(value: float | None) -> float:
        return math.inf if value is None or not math.isfinite(value) else cost(value)

    pairs = [(measure(c.original), measure(c.treated)) for c in several]
    ahead = [(costs(a) < costs(b), costs(b) < costs(a)) for a, b in pairs]
    original, treated = (_median([pair[i] for pair in pairs]) for i in (0, 1))
    first, second = costs(original), costs(treated)
    better = "" if first == second else "original" if first < second else "treated"
    row = Row(name, original, treated, (sum(a for a, _ in ahead), sum(b for _, b in ahead)), better, unit)
    return replace(row, better="") if row.shown("original") == row.shown("treated") else row


def _median(values: Sequence[float | None]) -> float | None:
    """The middle value, the upper of two; NaN counts as larger than numbers, not reached as larger still."""
    ordered = sorted(values, key=lambda v: (v is None, v is not None and math.isnan(v), v or 0.0))
    return ordered[len(ordered) // 2]


def _mean_accuracy(run: Run) -> float:
    return float(moments(torch.tensor([accuracy for _, accuracy in run.accuracies]), dim=0).mean)


def comparison_rows(trained: Trained) -> list[Row]:
    """Every measure of the two models, whichever comes out ahead."""
    several = trials(trained)
    expected, goal = several[0].expected_loss, several[0].goal
    if expected is not None:
        name = f"loss at the start (ln {math.exp(expected):.0f} = {expected:.3f})"
        rows = [_row(name, several, lambda run: run.losses[0], lambda v: abs(v - expected))]
    else:
        rows = [_row("loss at the start", several, lambda run: run.losses[0], lambda v: v)]
    rows.append(_row("loss at the end", several, lambda run: run.losses[-1], lambda v: v))
    if all(run.accuracies for c in several for run in (c.original, c.treated)):
        steps = f"steps to {goal:.0%} test accuracy"
        rows.append(_row(steps, several, lambda run: run.steps_to(goal), lambda v: v, "steps"))
        rows.append(_row("test accuracy, mean over the run", several, _mean_accuracy, lambda v: -v, "%"))
        rows.append(
            _row("final test accuracy", several, lambda run: run.accuracies[-1][1], lambda v: -v, "%")
        )
    # Too noisy to call a winner, on a machine that does other things as well
    rows.append(_row("time to train", several, lambda run: run.seconds, lambda _: 0.0, "s"))
    return rows


def _curves(
    several: Sequence[Comparison], points: Callable[[Run], Sequence[tuple[int, float]]]
) -> list[Series]:
    """The median of all runs at every step."""
    series = []
    for name in ("original", "treated"):
        at: dict[int, list[float | None]] = {}
        for comparison in several:
            for step, value in points(getattr(comparison, name)):
                at.setdefault(step, []).append(value)
        series.append(Series(name, list(at), [_median(values) for values in at.values()]))
    return series


def trained_figures(trained: Trained) -> list[Figure]:
    """The loss of every step and the accuracy on held-out data."""
    several = trials(trained)
    expected, goal = several[0].expected_loss, several[0].goal
    median = f" The median of {len(several)} runs." if len(several) > 1 else ""
    figures = [
        progress(
            "loss",
            "Training loss",
            "The same batches in the same order for both." + median,
            _curves(several, lambda run: list(enumerate(run.losses, start=1))),
            unit="loss",
            mark=None if expected is None else Mark(expected, f"ln {math.exp(expected):.0f}"),
        )
    ]
    curves = _curves(several, lambda run: run.accuracies)
    if all(one.y for one in curves):
        figures.append(
            progress(
                "accuracy",
                "Test accuracy",
                "On data that neither model was trained on." + median,
                curves,
                unit="accuracy",
                percent=True,
                mark=Mark(goal, f"{goal:.0%}"),
            )
        )
    return figures
