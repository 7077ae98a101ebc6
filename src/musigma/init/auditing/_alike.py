"""Whether rows and columns of a weight are alike, as those of a draw are; training makes them differ."""

import math

from torch import Tensor

from musigma.init.auditing._facts import Facts
from musigma.statistics import Moments, moments

# Standard errors: with four statistics a tensor, one of a hundred thousand tensors is refused by chance.
_SIGMAS = 5.0
_FEWEST = 8


def rows_are_alike(facts: Facts, kurtosis: float) -> bool:
    """Whether rows (and columns) differ in mean and in spread by no more than chance explains.

    Formula: for independent entries of variance σ² and kurtosis κ, means of n entries vary by σ²/n and mean
    squares by (κ−1)·σ⁴/n. Training makes some inputs and some units matter more than others.

    Args:
        facts: a tensor with a finite, positive spread.
        kurtosis: of the law that its entries seem to have.

    Returns:
        Whether they may be draws of one law; True for what has too few rows or columns to tell.

    Example:
        >>> from torch import nn
        >>> from musigma.init.auditing._facts import read
        >>> rows_are_alike(read(nn.Linear(64, 64))[0][0], 1.8)
        True

    References:
        None.
    """
    if facts.values.dim() < 2 or min(facts.shape[0], facts.count // facts.shape[0]) < _FEWEST:
        return True
    flat = facts.values.flatten(1)
    return all(_alike(facts, moments(flat, dim), flat.shape[dim], kurtosis) for dim in (1, 0))


def _alike(facts: Facts, each: Moments, entries: int, kurtosis: float) -> bool:
    squares = each.var() + (each.mean - facts.mean).square()
    drawn = squares > 0  # a row of zeros stands for padding
    means, squares = each.mean[drawn], squares[drawn]
    # The excess kurtosis of a mean square is 12/n for a normal law, and less for those with lighter tails.
    error = math.sqrt((2 + 12 / entries) / max(len(means), 1))
    return all(
        _spread(values) / expected < 1 + _SIGMAS * error + 0.5 * error**2 * _SIGMAS**2
        for values, expected in (
            (means, facts.std**2 / entries),
            (squares, (kurtosis - 1) * facts.std**4 / entries),
        )
    )


def _spread(values: Tensor) -> float:
    return float(moments(values).var(correction=1)) if values.numel() > 1 else 0.0
