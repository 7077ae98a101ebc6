"""The Moments object: compute (through ops), merge, reduce over ranks, mask, run."""

from musigma.statistics._moments import Moments, moments
from musigma.statistics._running import Running

__all__ = ["Moments", "Running", "moments"]
