"""Audit of any model's initialization: what is wrong, by which numbers."""

from musigma.init.auditing._audit import audit
from musigma.init.auditing._report import Audit, Finding, TensorAudit

__all__ = ["Audit", "Finding", "TensorAudit", "audit"]
