"""What a reproduced result is: a claim with its source, an experiment, and a judgement by number."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Quantity:
    """One number that was predicted and measured.

    Args:
        name: what it is.
        predicted: by theory or by the source.
        measured: here.
        tolerance: how far the two may lie apart, relative to the prediction.
        reason: where the tolerance comes from.
    """

    name: str
    predicted: float
    measured: float
    tolerance: float
    reason: str

    @property
    def holds(self) -> bool:
        """Whether the measurement lies within the tolerance of the prediction."""
        return abs(self.measured - self.predicted) <= self.tolerance * abs(self.predicted)


@dataclass(frozen=True)
class Curve:
    """One line of a result's figure."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


@dataclass(frozen=True)
class Outcome:
    """What an experiment gave.

    Args:
        name: the result's name.
        claim: what was to be shown, in one sentence.
        source: where the claim comes from.
        quantities: every number, predicted and measured.
        curves: the lines of its figure.
        axes: titles of the figure's axes.
    """

    name: str
    claim: str
    source: str
    quantities: tuple[Quantity, ...]
    curves: tuple[Curve, ...] = field(default=(), repr=False)
    axes: tuple[str, str] = ("", "")

    @property
    def holds(self) -> bool:
        """Whether every quantity does."""
        return all(q.holds for q in self.quantities)

    def figure(self) -> Any:
        """The curves as a plotly figure, logarithmic in y.

        Raises:
            ImportError: plotly is not installed; the message says how to install it.
        """
        try:
            import plotly.graph_objects as go
        except ImportError as missing:
            raise ImportError("the figure needs plotly: pip install 'musigma[report]'") from missing
        figure = go.Figure([_line(go, curve) for curve in self.curves])
        figure.update_layout(title=self.claim, xaxis_title=self.axes[0], yaxis_title=self.axes[1])
        figure.update_yaxes(type="log")
        return figure

    def __str__(self) -> str:
        lines = [
            f"{self.name}: {'holds' if self.holds else 'does not hold'}",
            f"  {self.claim} ({self.source})",
        ]
        for q in self.quantities:
            mark = "ok" if q.holds else "off"
            lines.append(
                f"  {q.name}: predicted {q.predicted:.4g}, measured {q.measured:.4g} "
                f"({mark}, within {q.tolerance:.0%}: {q.reason})"
            )
        return "\n".join(lines)


def _line(go: Any, curve: Curve) -> Any:
    # A few hundred points are all that a screen can show of a line.
    every = max(1, len(curve.x) // 400)
    return go.Scatter(x=list(curve.x[::every]), y=list(curve.y[::every]), name=curve.name)


@dataclass(frozen=True)
class Result:
    """A published result and the experiment that reproduces it."""

    name: str
    claim: str
    source: str
    experiment: Callable[[int], Mapping[str, Any]] = field(repr=False)

    def run(self, *, seed: int = 0) -> Outcome:
        """Do the experiment.

        Args:
            seed: what its random numbers start from; the global generators are left alone.
        """
        return Outcome(self.name, self.claim, self.source, **self.experiment(seed))


_REGISTRY: dict[str, Result] = {}


def result(name: str, *, claim: str, source: str) -> Callable[[Callable[[int], Any]], Callable[[int], Any]]:
    """Register an experiment under the result's name.

    Raises:
        ValueError: the name is taken.
    """

    def register(experiment: Callable[[int], Any]) -> Callable[[int], Any]:
        if name in _REGISTRY and _REGISTRY[name].experiment.__module__ != experiment.__module__:
            raise ValueError(f"a result's name must be unique; {name!r} is taken")
        _REGISTRY[name] = Result(name, claim, source, experiment)
        return experiment

    return register


def results() -> tuple[Result, ...]:
    """Every result, by name; their files are imported on the first call.

    Example:
        >>> import musigma as ms
        >>> [r.name for r in ms.lab.results()]
        ['input-scale', 'variance-propagation']
    """
    package = importlib.import_module("musigma.lab.experiments")
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
    return tuple(_REGISTRY[name] for name in sorted(_REGISTRY))


def run(name: str, *, seed: int = 0) -> Outcome:
    """Reproduce one result.

    Args:
        name: one of `results()`.
        seed: what its random numbers start from.

    Raises:
        ValueError: no result is called so; the message names the nearest.
    """
    known = {r.name: r for r in results()}
    if name not in known:
        close = difflib.get_close_matches(name, known, 1) or sorted(known)
        raise ValueError(f"no result is called {name!r}; there is {', '.join(close)}")
    return known[name].run(seed=seed)
