"""Examine a model on a batch, say what is wrong with its means and spreads, mend a copy, prove it."""

from musigma.doctor._case import Case
from musigma.doctor._compare import Comparison, Run, compare
from musigma.doctor._examine import examine
from musigma.doctor._finding import Finding, Report
from musigma.doctor._rules import explain, list_rules
from musigma.doctor._treat import Given, Record, treat

__all__ = [
    "Case",
    "Comparison",
    "Finding",
    "Given",
    "Record",
    "Report",
    "Run",
    "compare",
    "examine",
    "explain",
    "list_rules",
    "treat",
]
