"""A whole model's initialization, planned from what really follows each layer."""

from musigma.init.planning._entry import Entry, Layer
from musigma.init.planning._initialize import initialize, plan
from musigma.init.planning._plan import Plan
from musigma.init.planning._verification import Verification

__all__ = ["Entry", "Layer", "Plan", "Verification", "initialize", "plan"]
