"""Correctness comes first: results and gradients against float64, torch's own error beside ours."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from musigma.lab.bench._calls import Function, Inputs, Outputs, function, inputs
from musigma.lab.bench._cell import Cell

# A kernel that computes something else is off by thousands of units. Rounding an intermediate result, as
# the unfused forms do, costs a few; torch's own float32 sums over thousands of rows twenty (measured), and
# where the kernels are switched off these are ours.
LIMIT = 64.0
# torch's BatchNorm on channels-last images is off by 70 units of float32 on these inputs (measured)
KINK = 256 * torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Error:
    """The largest error of one result, in units of the last place of its largest value.

    Args:
        result: ``y``, ``sum``, ``dx``, ``dresidual``, ``dweight``, ``dbias``, ``running_mean`` or
            ``running_var``.
        ours: musigma's.
        torchs: torch's, eager, in the same type.
    """

    result: str
    ours: float
    torchs: float

    @property
    def right(self) -> bool:
        """Whether ours is as near as rounding allows."""
        return self.ours <= LIMIT


def gate(cell: Cell, *, seed: int = 0, ours: Function | None = None) -> tuple[Error, ...]:
    """Compare every output, gradient and running statistic of a cell with float64.

    Args:
        cell: what to compute; its `backward` and `threads` make no difference.
        seed: what the inputs start from.
        ours: the function to judge, where it is not musigma's.

    Returns:
        an error for every result; or a single infinite one, called by the exception that ours raised.
    """
    given = inputs(cell, seed)
    exact = function(cell, "torch", torch.float64)
    widened = Inputs(
        tuple(leaf.detach().double().contiguous().requires_grad_() for leaf in given.leaves), given.gradients
    )
    given = _away_from_the_kink(cell, given, widened)
    widened = Inputs(widened.leaves, tuple(g.double().contiguous() for g in given.gradients))
    wanted = _results(exact, widened)
    try:
        found = [_results(ours or function(cell, "ours"), given)]
    except Exception as error:
        return (raised(error),)
    found.append(_results(function(cell, "torch"), given))
    eps = torch.finfo(cell.torch_dtype).eps
    return tuple(
        Error(name, *(_units(results[i], wanted[i], scale, eps) for results in found))
        for i, (name, scale) in enumerate(zip(_names(cell), _scales(cell, given, wanted), strict=True))
    )


def raised(error: Exception) -> Error:
    """What can't be run isn't right either; the other cells go on."""
    said, _, _ = str(error).partition("\n")
    return Error(f"{type(error).__name__}: {said}", math.inf, 0.0)


def _results(f: Function, given: Inputs) -> Outputs:
    outputs = f.call(*given.leaves)
    gradients = torch.autograd.grad(outputs, given.leaves, given.gradients)
    return (*(y.detach() for y in outputs), *gradients, *f.running)


def _names(cell: Cell) -> list[str]:
    names = ["y", "sum"] if cell.op.startswith("add_") else ["y"]
    names += ["dx", "dresidual"] if cell.residual else ["dx"]
    names += ["dweight"] if "rms_norm" in cell.op else ["dweight", "dbias"]
    return names + (["running_mean", "running_var"] if cell.op.startswith("batch_norm") else [])


def _scales(cell: Cell, given: Inputs, wanted: Outputs) -> list[float]:
    """What an error is measured by: the largest value, or what the terms of a sum make of a rounding each."""
    dy = given.gradients[0].double()
    terms = math.sqrt(dy.numel() / given.leaves[-1].numel()) * float(dy.square().mean().sqrt())
    return [
        max(float(value.abs().max()), terms if name in ("dweight", "dbias") else 0.0)
        for name, value in zip(_names(cell), wanted, strict=True)
    ]


def _units(found: Tensor, wanted: Tensor, scale: float, eps: float) -> float:
    error = float((found.double() - wanted).abs().max())
    # NaN compares as right with everything
    return error / (eps * scale) if math.isfinite(error) else math.inf


def _away_from_the_kink(cell: Cell, given: Inputs, widened: Inputs) -> Inputs:
    """dy with 0 where y is so near relu's kink that rounding decides on which side it falls."""
    if cell.activation != "relu":
        return given
    with torch.no_grad():
        before = function(replace(cell, activation=None), "torch", torch.float64).call(*widened.leaves)[0]
    # or a few roundings to the storage type
    width = max(KINK, 4 * torch.finfo(cell.torch_dtype).eps)
    near = before.abs() <= width * before.abs().max()
    return Inputs(given.leaves, (torch.where(near, 0.0, given.gradients[0]), *given.gradients[1:]))
