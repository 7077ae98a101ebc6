"""Measures a training step of one whole model in this process, and how exact it is."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from musigma.lab.bench._calls import Library
from musigma.lab.bench._gate import Error
from musigma.lab.bench._measure import kept
from musigma.lab.bench._models import Model, Trained, trained
from musigma.lab.bench._row import Saved, Times
from musigma.lab.bench._timing import How, interleave, threads


def step_times(model: Model, how: How, *, n_threads: int) -> Times:
    """Time a training step, torch's and ours side by side.

    Args:
        model: which.
        how: for how long and by which clock.
        n_threads: torch's.
    """
    with threads(n_threads):
        runs = {
            "eager": trained(model, "torch", how.seed).step,
            "ours": trained(model, "ours", how.seed).step,
        }
        return interleave(runs, how)


def step_errors(model: Model, *, seed: int = 0) -> tuple[Error, ...]:
    """The relative errors of the loss and of all gradients, taken as one vector, against float64."""
    exact = _loss_and_gradients(trained(model, "torch", seed), torch.float64)
    ours, torchs = (
        [
            _relative(*pair)
            for pair in zip(_loss_and_gradients(trained(model, library, seed)), exact, strict=True)
        ]
        for library in _LIBRARIES
    )
    return tuple(Error(name, ours[i], torchs[i]) for i, name in enumerate(("loss", "gradients")))


_LIBRARIES: tuple[Library, Library] = ("ours", "torch")


def _relative(value: Tensor, wanted: Tensor) -> float:
    error = float((value - wanted).norm() / wanted.norm())
    # NaN compares as right with everything
    return error if math.isfinite(error) else math.inf


def _loss_and_gradients(made: Trained, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    if dtype is not None:
        made = Trained(made.model.to(dtype), made.x.to(dtype), made.optimizer)
    loss = made.loss()
    gradients = torch.autograd.grad(loss, list(made.model.parameters()))
    return loss.detach().double(), torch.cat([g.double().flatten() for g in gradients])


def step_saved(model: Model, *, seed: int = 0) -> Saved:
    """Count what autograd keeps between forward and backward, the weights aside."""
    made = {library: trained(model, library, seed) for library in _LIBRARIES}
    bytes_kept = {library: kept(it.loss, it.model.parameters()) for library, it in made.items()}
    return Saved(bytes_kept["ours"], bytes_kept["torch"], 0)
