"""The two summaries that most measurements are made of."""

from torch import Tensor

from musigma.statistics import Moments, moments

__all__ = ["mean_square", "overall"]


def overall(t: Tensor) -> Moments:
    """Moments over every value of a tensor, a single number included; scalars."""
    return moments(t.detach().reshape(-1), 0)


def mean_square(of: Moments | Tensor | None) -> float:
    """E[x²] = mean² + var; NaN of nothing."""
    if of is None:
        return float("nan")
    m = overall(of) if isinstance(of, Tensor) else of
    return float(m.mean) ** 2 + float(m.var())
