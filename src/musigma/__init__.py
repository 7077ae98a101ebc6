"""The mean and the spread of a deep network, where they should be: in its inputs, activations and weights.

Floors, each usable alone: `moments` (statistics), `functional` and `nn` (normalization), `inputs`
(standardization), `init` (initialization), `graph` (a model as it ran), `surgery` (change a model, with a
certificate), `doctor` (examine, treat, prove), `lab` (published results, reproduced).
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from musigma._version import __version__
from musigma.statistics import Moments, Running, moments

if TYPE_CHECKING:
    from musigma import doctor, functional, graph, init, inputs, lab, nn, ops, statistics, surgery

_FLOORS = (
    "doctor",
    "functional",
    "graph",
    "init",
    "inputs",
    "lab",
    "nn",
    "ops",
    "statistics",
    "surgery",
)

__all__ = [
    "Moments",
    "Running",
    "__version__",
    "doctor",
    "functional",
    "graph",
    "init",
    "inputs",
    "lab",
    "moments",
    "nn",
    "ops",
    "statistics",
    "surgery",
]


def __getattr__(name: str) -> ModuleType:
    """A floor is imported when it is first named, so that one piece costs one piece."""
    if name in _FLOORS:
        return importlib.import_module(f"musigma.{name}")
    raise AttributeError(f"module 'musigma' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
