"""The batch itself, before the model has touched it."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from musigma.doctor.probes import _calls
from musigma.doctor.probes._summary import overall
from musigma.graph._example import arguments, input_names
from musigma.statistics import Moments

__all__ = ["InputMeasure", "measure_data"]


@dataclass(frozen=True)
class InputMeasure:
    """One tensor of the batch.

    Args:
        name: the model's argument name ("targets" for those), with the path inside it where it is nested.
        shape: its shape.
        dtype: its dtype.
        values: moments over all finite values; None for an empty or boolean tensor.
        low: smallest finite value.
        high: largest finite value.
        nan: how many values are NaN.
        inf: how many are infinite.
        first_nonfinite: the index of the first value that is not finite.
        integral: whether every finite value is a whole number.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    values: Moments | None
    low: float
    high: float
    nan: int
    inf: int
    first_nonfinite: tuple[int, ...] | None
    integral: bool


def named_tensors(model: nn.Module, inputs: Any) -> dict[str, Tensor]:
    """The tensors of a batch under the names that the graph gives them, those of the model's arguments."""
    return dict(input_names(model, *arguments(inputs)))


def measure_data(model: nn.Module, inputs: Any, targets: Any) -> tuple[InputMeasure, ...]:
    """Measure every tensor of the batch, targets included (named "targets")."""
    named = named_tensors(model, inputs)
    targeted = _calls.tensors_in(targets)
    named |= {"targets" if len(targeted) == 1 else f"targets[{i}]": t for i, t in enumerate(targeted)}
    with torch.no_grad():
        return tuple(_measure(name, t.detach()) for name, t in named.items())


def _measure(name: str, t: Tensor) -> InputMeasure:
    real = torch.view_as_real(t) if t.is_complex() else t
    finite = torch.isfinite(real)
    bad = (~finite).nonzero()
    counted = bool(finite.any()) and real.dtype is not torch.bool
    inside = real[finite] if counted else real.new_zeros(0)
    return InputMeasure(
        name=name,
        shape=tuple(t.shape),
        dtype=t.dtype,
        values=overall(inside) if counted else None,
        low=float(inside.min()) if counted else float("nan"),
        high=float(inside.max()) if counted else float("nan"),
        nan=int(torch.isnan(real).sum()),
        inf=int(torch.isinf(real).sum()),
        first_nonfinite=tuple(bad[0].tolist()) if len(bad) else None,
        integral=counted and bool((inside == inside.round()).all()),
    )
