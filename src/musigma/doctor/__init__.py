"""Examine a model on a batch, say what is wrong with its means and spreads, mend a copy, prove it."""

from musigma.doctor._case import Case
from musigma.doctor._examine import examine
from musigma.doctor._finding import Finding, Report
from musigma.doctor._rules import explain, rules

__all__ = ["Case", "Finding", "Report", "examine", "explain", "rules"]
