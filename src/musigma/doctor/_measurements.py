"""What reports draw, as plain JSON types: tables of inputs, layers and parameters."""

from typing import Any

import torch

from musigma.doctor._examination import Examination
from musigma.doctor.probes._summary import mean_square
from musigma.doctor.probes._weights import histogram

__all__ = ["measurements"]


def measurements(exam: Examination) -> dict[str, Any]:
    """The tables of one examination.

    Returns:
        "loss", "loss_source"; "inputs": name, shape, mean, std, low, high; "layers": one row per recorded op
        with a floating output: index, op, module, module_type, shape, mean, std, between_std (what tells
        examples apart), zeros, gradient_std; "parameters": name, shape, mean, std, gradient_norm, histogram.
    """
    trace = exam.trace
    return {
        "loss": trace.loss,
        "loss_source": trace.loss_source,
        "inputs": [
            {
                "name": m.name,
                "shape": m.shape,
                "dtype": str(m.dtype).removeprefix("torch."),
                "mean": None if m.values is None else float(m.values.mean),
                "std": None if m.values is None else float(m.values.std()),
                "low": m.low,
                "high": m.high,
            }
            for m in exam.data
        ],
        "layers": [_layer(n) for n in trace.nodes if n.values is not None],
        "parameters": [_parameter(exam, name) for name in exam.weights],
    }


def _layer(n: Any) -> dict[str, Any]:
    return {
        "index": n.node.index,
        "op": n.node.op,
        "module": n.node.module,
        "module_type": n.node.module_type,
        "shape": n.shape,
        "mean": n.mean,
        "std": n.std,
        "between_std": n.between**0.5,
        "zeros": n.zeros,
        "gradient_std": None if n.gradient is None else float(n.gradient.std()),
    }


def _parameter(exam: Examination, name: str) -> dict[str, Any]:
    measured, gradient = exam.weights[name], exam.trace.gradients.get(name)
    return {
        "name": name,
        "shape": measured.shape,
        "mean": float(measured.values.mean),
        "std": float(measured.values.std()),
        "gradient_norm": None if gradient is None else _norm(gradient),
        "histogram": histogram(exam.parameters[name]),
    }


def _norm(gradient: torch.Tensor) -> float:
    return (mean_square(gradient) * gradient.numel()) ** 0.5
