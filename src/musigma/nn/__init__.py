"""Modules: torch.nn's normalization layers, and a few that torch lacks."""

from musigma.nn._standardize import Standardize, Unstandardize

__all__ = ["Standardize", "Unstandardize"]
