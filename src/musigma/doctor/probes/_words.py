"""How messages name things."""

from collections.abc import Iterable

__all__ = ["called", "counted", "listed"]


def called(path: str) -> str:
    """A module's qualified name; the model has none of its own."""
    return path or "the model itself"


def listed(names: Iterable[object], *, limit: int = 6) -> str:
    """The first few names with commas, and how many more there are."""
    all_names = [called(str(n)) for n in names]
    more = len(all_names) - limit
    return ", ".join(all_names[:limit]) + (f" and {more} more" if more > 0 else "")


def counted(count: int, what: str) -> str:
    """A number and its noun: "1 step", "2 steps"."""
    plural = "es" if what.endswith(("s", "ch")) else "s"
    return f"{count} {what}{'' if count == 1 else plural}"
