"""Warnings of the house. Errors are Python's and torch's own classes."""


class MusigmaWarning(UserWarning):
    """Something musigma can do exactly, but that its caller very likely did not mean."""
