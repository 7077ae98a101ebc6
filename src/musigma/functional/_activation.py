"""The activations a normalization can apply to its own result."""

from musigma.ops import ACTIVATIONS, activate, check_activation

__all__ = ["ACTIVATIONS", "activate", "check_activation"]
