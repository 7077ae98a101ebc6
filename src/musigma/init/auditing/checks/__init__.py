"""One problem, one file; the order here is the order in which findings are told."""

from musigma.init.auditing.checks import unwritten  # isort: skip
from musigma.init.auditing.checks import (
    clones,
    collapse,
    drift,
    forget_gate,
    identical_units,
    off_center,
    off_plan,
    outliers,
    packed,
    repeated_pieces,
    residual,
    saturated,
    selu_gain,
    tied_embedding,
    ties,
    wrong_fan,
)

__all__ = [
    "clones",
    "collapse",
    "drift",
    "forget_gate",
    "identical_units",
    "off_center",
    "off_plan",
    "outliers",
    "packed",
    "repeated_pieces",
    "residual",
    "saturated",
    "selu_gain",
    "tied_embedding",
    "ties",
    "unwritten",
    "wrong_fan",
]
