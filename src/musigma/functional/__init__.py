"""What ``ms.functional`` is: torch.nn.functional's normalizations, plus activation=, mask= and residuals."""

from musigma.functional._batch import batch_norm
from musigma.functional._groups import group_norm, instance_norm
from musigma.functional._rows import add_layer_norm, add_rms_norm, layer_norm, rms_norm

__all__ = [
    "add_layer_norm",
    "add_rms_norm",
    "batch_norm",
    "group_norm",
    "instance_norm",
    "layer_norm",
    "rms_norm",
]
