"""Start the outputs where ignorance is: small, and around the targets' mean."""

import torch
from torch import Tensor

from musigma.doctor import _treatments
from musigma.doctor._finding import Finding
from musigma.doctor._treatments import Applied, NotApplicable, Patient
from musigma.doctor.probes import _calls
from musigma.doctor.probes._layers import LayerMeasure
from musigma.statistics import moments

# Outputs of this standard deviation cost std²/2 = 0.125 above ln C, and let most of the gradient through.
_STD = 0.5


@_treatments.treatment("shrink_head", mends=("INI210",), order=50)
def apply(patient: Patient, findings: tuple[Finding, ...]) -> Applied:
    """Scale the last layer's weights down, and set its bias to 0 or to a regression's mean target."""
    named = {w for f in findings for w in f.where}
    heads = [layer for layer in patient.exam.trace.layers if layer.weight in named]
    if not heads:
        raise NotApplicable("no last layer with a weight of its own makes the output")
    offset = _offset(patient)
    with torch.no_grad():
        said = [_shrink(patient, head, offset) for head in heads]
    return Applied(patient.model, "; ".join(said), {"heads": sorted(named)})


def _offset(patient: Patient) -> Tensor | None:
    """The mean target of a regression; None for classes."""
    chance = patient.exam.chance
    if chance is None or chance.kind != "mean_squared_error":
        return None
    return moments(_calls.tensors_in(patient.exam.targets)[0], 0).mean


def _shrink(patient: Patient, head: LayerMeasure, offset: Tensor | None) -> str:
    weight = patient.model.get_parameter(str(head.weight))
    scale = min(1.0, _STD / head.produced**0.5)
    if offset is not None:
        # Small beside the targets' own spread, whatever their unit.
        spread = patient.exam.chance.value**0.5 if patient.exam.chance is not None else 1.0
        scale = min(1.0, _STD * spread / head.produced**0.5)
    weight.mul_(scale)
    said = f"scaled {head.weight} by {scale:.2g}"
    if head.bias is None:
        return said
    bias = patient.model.get_parameter(head.bias)
    if offset is not None and offset.numel() == bias.numel():
        bias.copy_(offset.reshape(bias.shape))
        return f"{said} and set {head.bias} to the targets' mean"
    bias.zero_()
    return f"{said} and set {head.bias} to 0"
