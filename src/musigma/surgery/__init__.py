"""Change a model that exists, on a copy, with a certificate."""

from musigma.surgery import bridge
from musigma.surgery._adapt import adapt
from musigma.surgery._cancelled import CancelledBias, cancelled_biases
from musigma.surgery._certificate import Certificate, CertificateError
from musigma.surgery._freeze import freeze, unfreeze
from musigma.surgery._parameter_groups import parameter_groups
from musigma.surgery._recalibrate import recalibrate
from musigma.surgery._remove_bias import remove_bias
from musigma.surgery._replace import replace
from musigma.surgery._split import split
from musigma.surgery._sync import sync, unsync
from musigma.surgery.converting import convert, insert, remove
from musigma.surgery.folding import fold

__all__ = [
    "CancelledBias",
    "Certificate",
    "CertificateError",
    "adapt",
    "bridge",
    "cancelled_biases",
    "convert",
    "fold",
    "freeze",
    "insert",
    "parameter_groups",
    "recalibrate",
    "remove",
    "remove_bias",
    "replace",
    "split",
    "sync",
    "unfreeze",
    "unsync",
]
