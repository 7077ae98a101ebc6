"""The summaries that most measurements are made of."""

from collections.abc import Sequence

from torch import Tensor

from musigma.statistics import Moments, moments

__all__ = ["mean_square", "merged", "overall"]


def overall(t: Tensor) -> Moments:
    """Moments over every value of a tensor, a single number included; scalars."""
    return moments(t.detach().reshape(-1), 0)


def mean_square(of: Moments | Tensor | None) -> float:
    """E[x²] = mean² + var; NaN of nothing."""
    if of is None:
        return float("nan")
    m = overall(of) if isinstance(of, Tensor) else of
    return float(m.mean) ** 2 + float(m.var())


def merged(m: Moments, dims: Sequence[int] | None = None) -> Moments:
    """The sets along `dims` (all of them where None) together: Chan's merge of sets of one size.

    A merge of k sets of n values has the mean of their means, and M2 = Σ M2ᵢ + n·Σ(meanᵢ − mean)². One pass
    over an activation then gives its moments between examples, per unit and overall.

    References:
        Chan, Golub & LeVeque 1983, "Algorithms for computing the sample variance", eq. 2.1.
    """
    along = list(range(m.mean.ndim)) if dims is None else list(dims)
    if not along:
        return m
    means = moments(m.mean, along)
    return Moments(m.count * means.count, means.mean, m.m2.sum(along) + m.count * means.m2)
