"""Published results, reproduced and judged."""

from musigma.lab._result import Curve, Outcome, Quantity, Result, results, run

__all__ = ["Curve", "Outcome", "Quantity", "Result", "results", "run"]
