"""Give weights whose size a normalization hides the size that the activation behind them wants."""

from __future__ import annotations

import torch
from torch import nn

from musigma import init
from musigma.doctor import _treatments
from musigma.doctor._examination import Examination
from musigma.doctor._finding import Finding
from musigma.doctor._treatments import Applied, NotApplicable, Patient
from musigma.graph import Node


# Not `keeps_function`: next to a tiny variance eps counts, and it counts less once the variance has grown.
@_treatments.treatment("rescale", mends=("GRD505",), order=45)
def apply(patient: Patient, findings: tuple[Finding, ...]) -> Applied:
    """Lengthen each weight, and all that it is normalized with, to He's variance."""
    names = dict.fromkeys(name for f in findings for name in f.where)
    factors = {name: _factor(patient, name) for name in names}
    grown = {name: c for name, c in factors.items() if c > 1}
    if not grown:
        raise NotApplicable("the weights are as long as their activations want: lower the learning rate")
    with torch.no_grad():
        for name, c in grown.items():
            _scale(patient, name, c)
    said = ", ".join(f"{name} by {c:.3g}" for name, c in grown.items())
    return Applied(patient.model, f"lengthened {said}, to He's variance", {"factors": grown})


def _factor(patient: Patient, name: str) -> float:
    """√(Var He / E[w²])."""
    path, _, leaf = name.rpartition(".")
    values = patient.exam.weights[name].values
    size = float(values.mean.square() + values.var()) ** 0.5
    fan_in = init.fans(patient.model.get_submodule(path), leaf).fan_in
    return _gain(patient.exam, name) / fan_in**0.5 / size


def _gain(exam: Examination, name: str) -> float:
    found = exam.graph.following_activation(name)
    try:
        return 1.0 if found is None else init.gain((found.name, dict(found.kwargs)))
    except (TypeError, ValueError):  # an activation that there is no gain for
        return 1.0


def _scale(patient: Patient, name: str, c: float) -> None:
    norm = patient.exam.graph.norm_after(name)
    if norm is None:
        raise NotApplicable(f"no normalization follows {name} alone")
    parameters = dict(patient.model.named_parameters())
    parameters[name].mul_(c)
    bias = name.removesuffix("weight") + "bias"
    if name.endswith("weight") and bias in parameters:
        parameters[bias].mul_(c)
    _scale_statistics(patient, norm, c)


def _scale_statistics(patient: Patient, norm: Node, c: float) -> None:
    """What the norm has stored is of the same unit; a norm that has stored nothing yet keeps its 0 and 1."""
    module: nn.Module = patient.model.get_submodule(norm.module)
    if sum(node.module == norm.module and node.op == norm.op for node in patient.exam.graph) > 1:
        raise NotApplicable(f"{norm.module} normalizes the output of several layers")
    tracked = getattr(module, "num_batches_tracked", None)
    if isinstance(tracked, torch.Tensor) and int(tracked) > 0:
        for buffer, power in (("running_mean", 1), ("running_var", 2)):
            getattr(module, buffer).mul_(c**power)
