"""The registry of treatments: one treatment is one file, and says which codes it mends."""

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from musigma.doctor._examination import Examination
from musigma.doctor._finding import Finding

__all__ = ["Applied", "NotApplicable", "Patient", "Treatment", "treatment", "treatment_for", "treatments"]


class NotApplicable(Exception):  # noqa: N818 - it is an answer ("this can't be mended here, because"), no error
    """Why a treatment can't mend these findings on this model."""


@dataclass(frozen=True)
class Patient:
    """What a treatment works on.

    Args:
        model: a copy that the treatment may change or replace.
        exam: the examination that made the findings, of another copy; its graph and measurements.
        batches: data as the model takes it, batch by batch, to take statistics from; can be read repeatedly.
        seed: what random numbers start from; one stream per parameter name.
    """

    model: nn.Module
    exam: Examination
    batches: Sequence[Any]
    seed: int = 0


@dataclass(frozen=True)
class Applied:
    """What a treatment did.

    Args:
        model: the treated model.
        done: one sentence with the names and numbers.
        details: JSON-able numbers.
    """

    model: nn.Module
    done: str
    details: Mapping[str, Any] = field(default_factory=dict)


Apply = Callable[[Patient, tuple[Finding, ...]], Applied]


@dataclass(frozen=True)
class Treatment:
    """A registered treatment.

    Args:
        name: such as "standardize".
        mends: the codes it mends.
        order: treatments are given in ascending order: data first, then structure, weights, statistics.
        keeps_function: whether it promised not to change what the model computes; checked afterwards.
        apply: does it, on a copy.
    """

    name: str
    mends: tuple[str, ...]
    order: int
    keeps_function: bool
    apply: Apply


_REGISTRY: dict[str, Treatment] = {}


def treatment(
    name: str, *, mends: tuple[str, ...], order: int, keeps_function: bool = False
) -> Callable[[Apply], Apply]:
    """Register a treatment for the codes it mends.

    Raises:
        ValueError: a code that another treatment mends already.
    """

    def register(apply: Apply) -> Apply:
        for other in _REGISTRY.values():
            if other.name != name and (shared := set(other.mends) & set(mends)):
                raise ValueError(
                    f"{sorted(shared)} are mended by {other.name!r} already; {name!r} can't claim them"
                )
        _REGISTRY[name] = Treatment(name, mends, order, keeps_function, apply)
        return apply

    return register


def treatments() -> tuple[Treatment, ...]:
    """Every treatment, in the order they are given; their files are imported on the first call."""
    package = importlib.import_module("musigma.doctor.treatments")
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
    return tuple(sorted(_REGISTRY.values(), key=lambda t: (t.order, t.name)))


def treatment_for(code: str) -> str | None:
    """The name of the treatment that mends this code; None where nothing does automatically."""
    return next((t.name for t in treatments() if code in t.mends), None)
