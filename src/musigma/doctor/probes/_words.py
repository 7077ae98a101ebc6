"""How messages name things."""

from collections.abc import Iterable

__all__ = ["called", "listed"]


def called(path: str) -> str:
    """A module's qualified name; the model has none of its own."""
    return path or "the model itself"


def listed(names: Iterable[object], *, limit: int = 6) -> str:
    """The first few names with commas, and how many more there are."""
    all_names = [called(str(n)) for n in names]
    more = len(all_names) - limit
    return ", ".join(all_names[:limit]) + (f" and {more} more" if more > 0 else "")
