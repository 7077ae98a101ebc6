"""Which calls are rectifiers, however they are written."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from musigma.graph import Edge, Node, Source, kinds

__all__ = ["rectified_argument"]

# What `relu` is made of by hand: `where(h > 0, h, 0)` and `h * (h > 0)`.
_COMPARISONS = frozenset(("gt", "ge"))


def rectified_argument(
    node: Node, args: Sequence[Any], kwargs: Mapping[str, Any], above: Sequence[Node]
) -> str | None:
    """The name of the argument that a call hands on where it is positive, with 0 elsewhere; None if none.

    Args:
        node: the call.
        args: its live arguments.
        kwargs: likewise.
        above: the nodes before it, by index.
    """
    options = node.options
    if node.op in kinds.RECTIFIERS or options.get("activation") in kinds.RECTIFIERS:
        return "input"
    if node.op in ("hardtanh", "clamp"):
        floor = options.get("min_val" if node.op == "hardtanh" else "min")
        return "input" if _is_zero(floor) else None
    if node.op in ("maximum", "max"):
        return _other(node, [*args, *kwargs.values()])
    if node.op == "where" and _is_zero(options.get("y")):
        return (
            "x" if _is_sign_of(node.arguments.get("condition", ()), node.arguments.get("x"), above) else None
        )
    if node.op == "mul":
        pair = node.arguments.get("input", ()), node.arguments.get("other", ())
        for name, (value, mask) in (("input", pair), ("other", pair[::-1])):
            if _is_sign_of(mask, value, above):
                return name
    return None


def _is_zero(value: Any) -> bool:
    return isinstance(value, int | float) and value == 0


def _other(node: Node, values: Sequence[Any]) -> str | None:
    """The argument of a maximum whose other one is 0 throughout."""
    pair = [v for v in values if isinstance(v, Tensor)]
    names = list(node.arguments)
    # A constant that nobody recorded has no name among the arguments; it is what stands second.
    if len(pair) != 2 or not names:
        return None
    zero = [bool(t.numel()) and not bool(torch.any(t)) for t in pair]
    if zero == [False, True]:
        return names[0]
    return names[-1] if zero == [True, False] else None


def _is_sign_of(mask: Sequence[Source], value: Sequence[Source] | None, above: Sequence[Node]) -> bool:
    source = mask[0] if len(mask) == 1 else None
    if not isinstance(source, Edge) or not value:
        return False
    compared = above[source]
    of_it = compared.arguments.get("input", ()) == value
    return compared.op in _COMPARISONS and of_it and _is_zero(compared.options.get("other"))
