"""How messages name and count things."""

from collections.abc import Iterable

__all__ = ["called", "counted", "listed", "modules"]


def called(path: str, *, root: str = "the model itself") -> str:
    """A module's qualified name in quotes, since it may be a mere number; `root` where it has none."""
    return f"'{path}'" if path else root


def counted(number: int, one: str) -> str:
    """ "1 layer", "2 layers", "2 batches"."""
    plural = "es" if one.endswith(("s", "ch")) else "s"
    return f"{number} {one}" if number == 1 else f"{number} {one}{plural}"


def listed(names: Iterable[object], *, limit: int = 6) -> str:
    """The first few names with commas, and how many more there are."""
    all_names = [str(n) for n in names]
    more = len(all_names) - limit
    return ", ".join(all_names[:limit]) + (f" and {more} more" if more > 0 else "")


def modules(paths: Iterable[str]) -> str:
    """`listed`, of modules."""
    return listed(map(called, paths))
