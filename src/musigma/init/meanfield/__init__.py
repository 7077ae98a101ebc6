"""Mean-field theory of wide networks: what an activation and a weight variance do to a signal."""

from musigma.init.meanfield._activations import Activation
from musigma.init.meanfield._batch_norm import batch_norm_growth
from musigma.init.meanfield._critical import Critical, critical
from musigma.init.meanfield._fixed_points import (
    DepthScales,
    critical_weight_var,
    depth_scales,
    fixed_point,
)
from musigma.init.meanfield._gains import ActivationMoments, gain, moments_of
from musigma.init.meanfield._maps import chi, correlation_map, slope, variance_map
from musigma.init.meanfield._plots import (
    plot_correlation_map,
    plot_critical,
    plot_variance_map,
    plot_width_interval,
)
from musigma.init.meanfield._width import WidthInterval, width_interval

__all__ = [
    "Activation",
    "ActivationMoments",
    "Critical",
    "DepthScales",
    "WidthInterval",
    "batch_norm_growth",
    "chi",
    "correlation_map",
    "critical",
    "critical_weight_var",
    "depth_scales",
    "fixed_point",
    "gain",
    "moments_of",
    "plot_correlation_map",
    "plot_critical",
    "plot_variance_map",
    "plot_width_interval",
    "slope",
    "variance_map",
    "width_interval",
]
