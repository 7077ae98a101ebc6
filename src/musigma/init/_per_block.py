"""A scheme for each of several stacked matrices."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from musigma.init._rule import SchemeLike, make_rule


def per_block(scheme: SchemeLike, parts: int | Sequence[int]) -> Callable[[Tensor], Tensor]:
    """A scheme that treats each of several stacked matrices by itself, for packed weights musigma can't know.

    Formula: W = [W₁; W₂; …] along dim 0; the scheme is called with each Wᵢ.

    Args:
        scheme: what to call with every piece, such as `orthogonal_`, its name or a `functools.partial` of it.
        parts: the number of equal pieces, or the rows of each piece (grouped-query attention has
            unequal ones).

    Returns:
        A function of a tensor, to be used as a rule in `apply` or by itself.

    Raises:
        ValueError: when called, if the first dimension can't be cut that way.

    Example:
        >>> import torch, musigma as ms
        >>> qkv = torch.empty(12, 4)                      # three 4×4 projections in one tensor
        >>> w = ms.init.per_block(torch.nn.init.eye_, 3)(qkv)
        >>> bool((w[4:8] == torch.eye(4)).all())
        True

    References:
        pytorch/pytorch#166378 (a packed weight counted as one matrix).
    """
    if isinstance(parts, int) and parts < 1:
        raise ValueError(f"parts ({parts}) must be at least 1; pass the number of stacked matrices")
    rule = make_rule("per_block", scheme)

    def fill(w: Tensor, generator: torch.Generator | None = None) -> Tensor:
        for piece in w.detach().split(_sizes(w, parts)):
            if generator is None:
                rule.call(piece)
            else:
                rule.fill(piece, generator, {})
        return w

    fill.__name__ = f"per_block({rule.label}, {parts})"
    return fill


def _sizes(w: Tensor, parts: int | Sequence[int]) -> list[int]:
    rows = w.shape[0] if w.dim() else 0
    if isinstance(parts, int):
        if rows % parts:
            raise ValueError(
                f"the first dimension ({rows}) must be divisible by parts ({parts}); "
                f"for unequal pieces pass their row counts"
            )
        return [rows // parts] * parts
    if sum(parts) != rows:
        raise ValueError(f"the pieces {list(parts)} must add up to the first dimension ({rows})")
    return list(parts)
