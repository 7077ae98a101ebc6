"""Mean-field theory of wide networks: what an activation and a weight variance do to a signal."""

from musigma.init.meanfield._activations import Activation
from musigma.init.meanfield._critical import Critical, critical
from musigma.init.meanfield._gains import ActivationMoments, gain, moments_of
from musigma.init.meanfield._maps import chi, correlation_map, slope, variance_map
from musigma.init.meanfield._width import WidthInterval, width_interval

__all__ = [
    "Activation",
    "ActivationMoments",
    "Critical",
    "WidthInterval",
    "chi",
    "correlation_map",
    "critical",
    "gain",
    "moments_of",
    "slope",
    "variance_map",
    "width_interval",
]
