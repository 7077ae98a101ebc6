"""The data: its mean and standard deviation, at any size, and the module that applies them."""

from musigma.inputs._estimator import NotFittedError
from musigma.inputs._standardizer import Standardizer

__all__ = ["NotFittedError", "Standardizer"]
