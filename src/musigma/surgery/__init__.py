"""Change a model that exists, on a copy, with a certificate."""

from musigma.surgery._certificate import Certificate, CertificateError
from musigma.surgery._dead_bias import DeadBias, LiveBias, dead_biases, remove_bias
from musigma.surgery._recalibrate import recalibrate

__all__ = [
    "Certificate",
    "CertificateError",
    "DeadBias",
    "LiveBias",
    "dead_biases",
    "recalibrate",
    "remove_bias",
]
