"""Mean-field theory of wide networks: what an activation and a weight variance do to a signal."""

from musigma.init.meanfield._activations import Activation
from musigma.init.meanfield._gains import ActivationMoments, gain, moments_of

__all__ = ["Activation", "ActivationMoments", "gain", "moments_of"]
