"""Input scale and zigzag: gradient descent on a badly scaled quadratic, and after standardization.

For least squares the loss is a quadratic whose Hessian is the features' second-moment matrix H. At the best
constant rate, 2/(λmax + λmin), the error shrinks by (κ − 1)/(κ + 1) a step, so that the steps to a tolerance
grow with the condition number κ(H) = λmax/λmin.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from musigma.inputs import Standardizer
from musigma.lab._result import Curve, Quantity, result

TOLERANCE = 1e-3
SCALES = (1.0, 10.0)


@result(
    "input-scale",
    claim="Gradient descent needs many times more steps on badly scaled inputs than on standardized ones",
    source="Lecture notes on normalization, section 1; LeCun et al. 1998, section 4.3",
)
def experiment(seed: int) -> Mapping[str, Any]:
    """Least squares on two independent features of scales 1 and 10 around 2 and −15."""
    generator = torch.Generator().manual_seed(seed)
    scales = torch.tensor(SCALES, dtype=torch.float64)
    offsets = torch.tensor([2.0, -15.0], dtype=torch.float64)
    raw = torch.randn(1000, 2, generator=generator, dtype=torch.float64) * scales + offsets
    slopes = torch.randn(2, generator=generator, dtype=torch.float64) / scales
    targets = raw @ slopes + 1
    quantities, curves, taken = [], [], {}
    for name, x in (("as they come", raw), ("standardized", Standardizer().fit(raw).transform(raw))):
        error, kappa = _descend(x, targets)
        taken[name] = len(error) - 1
        curves.append(Curve(f"{name} (κ = {kappa:.3g})", range(len(error)), error))
        rate = (kappa - 1) / (kappa + 1)
        quantities.append(
            Quantity(
                f"steps to a {TOLERANCE:g} of the first error, inputs {name}",
                math.log(TOLERANCE) / math.log(rate),
                taken[name],
                # The law is exact for the slowest direction alone; what part of the start lies along it is
                # chance: a start with share s of it needs log(1/s)/log(1/rate) fewer steps, and one a step
                # counts whole.
                0.5,
                "the share of the start along the slowest direction is chance, and steps are whole",
            )
        )
    return {
        "quantities": tuple(quantities),
        "curves": tuple(curves),
        "axes": ("step", "error of the weights"),
    }


def _descend(x: Tensor, targets: Tensor) -> tuple[list[float], float]:
    """Distance to the solution at every step, relative to the start's, and the condition number."""
    design = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)
    hessian = design.T @ design / len(x)
    smallest, largest = torch.linalg.eigvalsh(hessian)[[0, -1]].tolist()
    solution = torch.linalg.solve(hessian, design.T @ targets / len(x))
    weights, error = torch.zeros_like(solution), [1.0]
    while error[-1] > TOLERANCE and len(error) < 10**6:
        weights = weights - 2 / (largest + smallest) * (hessian @ (weights - solution))
        error.append(float((weights - solution).norm() / solution.norm()))
    return error, largest / smallest
