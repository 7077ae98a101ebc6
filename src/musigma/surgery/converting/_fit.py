"""Weight and bias with which one layer comes closest to another, by least squares over data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from musigma.statistics import Moments, moments
from musigma.surgery._seen import run_and_listen


@dataclass(frozen=True)
class Fit:
    """y ≈ weight · z + bias, for each feature by itself.

    Args:
        weight: of the features' shape, float64.
        bias: likewise.
        error: root mean square of what is left of y, over its standard deviation; of all features together.
        examples: how many the fit is over.
    """

    weight: Tensor
    bias: Tensor
    error: float
    examples: int


@dataclass
class Joint:
    """The joint moments of y and z, batch by batch.

    cov(y, z) = (var(y + z) − var(y − z)) / 4
    """

    total: Moments | None = None
    difference: Moments | None = None
    y: Moments | None = None
    z: Moments | None = None
    examples: int = 0

    def add(self, y: Tensor, z: Tensor, dims: Sequence[int]) -> None:
        """Take in one batch, whose other dims are the features'."""
        y, z = y.detach().double(), z.detach().double()
        for name, value in (("total", y + z), ("difference", y - z), ("y", y), ("z", z)):
            new, old = moments(value, dims), getattr(self, name)
            setattr(self, name, new if old is None else old + new)
        self.examples += y.shape[0]

    def fit(self, *, intercept: bool = True) -> Fit:
        """The least squares over everything taken in.

        weight = cov(y, z) / var(z), bias = mean(y) − weight · mean(z);
        weight = mean(y · z) / mean(z²) without an intercept
        """
        assert self.total is not None
        assert self.difference is not None
        assert self.y is not None
        assert self.z is not None
        var_y, var_z = self.y.var(), self.z.var()
        cov = (self.total.var() - self.difference.var()) / 4
        if not intercept:
            cov, var_z = cov + self.y.mean * self.z.mean, var_z + self.z.mean.square()
            var_y = var_y + self.y.mean.square()
        weight = torch.where(var_z > 0, cov / torch.where(var_z > 0, var_z, 1.0), 0.0)
        bias = self.y.mean - weight * self.z.mean if intercept else torch.zeros_like(weight)
        left = (var_y - weight * cov).clamp(min=0)
        spread = var_y.sum()
        error = float((left.sum() / spread).sqrt()) if spread > 0 else 0.0
        return Fit(weight, bias, error, self.examples)


def paired(
    teacher: nn.Module, student: nn.Module, name: str, batches: Sequence[Any]
) -> Iterator[tuple[Tensor, Tensor]]:
    """What a layer gives in the model as it was, and what reaches it in the model as it is now, by call."""
    for batch in batches:
        outputs = calls_of(teacher, name, batch, lambda x, y: y)
        inputs = calls_of(student, name, batch, lambda x, y: x)
        yield from zip(outputs, inputs, strict=False)


def _kept(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def calls_of(model: nn.Module, name: str, batch: Any, pick: Callable[[Tensor, Any], Any]) -> list[Any]:
    """Something of each call of a layer, in evaluation."""
    found: list[Any] = []
    layers: Mapping[str, nn.Module] = {name: model.get_submodule(name)}
    run_and_listen(model, layers, batch, lambda _n, x, y: found.append(_kept(pick(x, y))))
    return found
