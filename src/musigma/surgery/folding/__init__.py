"""Folding away what only scales and shifts."""

from musigma.surgery.folding._fold import KINDS, fold

__all__ = ["KINDS", "fold"]
