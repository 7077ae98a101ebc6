"""Which law a tensor most likely came from: its shape by Kolmogorov and Smirnov, its spread by likelihood."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from musigma.init.auditing._candidates import Candidate, cut, normal, uniform
from musigma.init.auditing._facts import SAMPLE, Facts
from musigma.init.auditing._interval import mean_interval, std_interval
from musigma.init.auditing._outliers import outliers_of
from musigma.init.schemes._scheme import Law

# Fewer entries than this fit almost any law: what is said of them is no evidence.
FEW = 64
_FAMILIES = {"normal": normal, "uniform": uniform, "truncated": cut}
# Rows of an orthogonal matrix agree in length and are at right angles up to float32's rounding of a sum; a
# normal matrix of n columns misses both by 1/√n. bfloat16 rounds each entry by 2⁻⁹, sums of them by less.
_ORTHOGONAL = 2e-3
_ROWS = 32


@dataclass(frozen=True)
class Identified:
    """The law a tensor most likely came from.

    Attributes:
        family: "normal", "uniform", "truncated", "orthogonal", "identity", "constant", "sparse",
            "contaminated" (a law but for outliers) or None for no law.
        label: the law in words; None if there is none.
        law: its numbers (spread as realised where no named law has it).
        named: whether a law in use has this spread, and not only this shape.
        others: further laws in use that can't be told from it.

    Example:
        >>> Identified("constant", "zeros", Law(0.0, 0.0), True).label
        'zeros'
    """

    family: str | None
    label: str | None
    law: Law | None
    named: bool
    others: tuple[str, ...] = ()


def family_of(facts: Facts) -> str:
    """The family that a law in use belongs to, by its kurtosis and bounds.

    Args:
        facts: the tensor.

    Returns:
        The best of the continuous families that fit, or "" for none.

    Example:
        >>> from torch import nn
        >>> from musigma.init.auditing._facts import read
        >>> family_of(read(nn.Linear(64, 64))[0][0])
        'uniform'

    References:
        Massart 1990 (the constant of the DKW inequality).
    """
    fitting = [name for name in _FAMILIES if fits(facts, _FAMILIES[name](facts.std))]
    return max(fitting, key=lambda name: _likelihood(facts, _FAMILIES[name](facts.std)), default="")


def fits(facts: Facts, law: Law, *, rate: float = 1e-6) -> bool:
    """Whether the entries can have the *shape* of a law that has the tensor's own spread and mean.

    Formula: sup|F_n − F| ≤ √(ln(2/rate)/(2n)) over the sampled entries, and none outside the law's bounds.

    Args:
        facts: the tensor.
        law: a continuous law.
        rate: the chance that a tensor of this law is refused.

    Returns:
        Whether it can.

    Example:
        >>> from torch import nn
        >>> from musigma.init.auditing._facts import read
        >>> fits(read(nn.Linear(64, 64))[0][0], normal(0.07))
        False

    References:
        Dvoretzky, Kiefer & Wolfowitz 1956; Massart 1990.
    """
    if not facts.finite or not facts.std > 0 or facts.low == facts.high:
        return False
    # The spread of the tensor stands in for the law's, so its ends may pass the bound by as much as that is
    # off; rounding to the dtype adds half a unit.
    slack = law.std * 4 * math.sqrt((law.kurtosis - 1) / (4 * facts.count)) * 2
    slack += torch.finfo(facts.values.dtype).eps * max(abs(facts.low), abs(facts.high))
    if (
        facts.low < facts.mean + law.low - law.mean - slack
        or facts.high > facts.mean + law.high - law.mean + slack
    ):
        return False
    x = facts.sample
    distribution = _distribution((x - facts.mean) / law.std, law)
    steps = torch.arange(len(x) + 1, dtype=torch.float64) / len(x)
    distance = float(torch.maximum((distribution - steps[:-1]).abs(), (distribution - steps[1:]).abs()).max())
    # Coarse dtypes put many numbers into one: half of the largest share of equal entries is theirs.
    tie = 0.0 if facts.values.dtype.itemsize > 2 else 0.25 * torch.finfo(facts.values.dtype).eps
    return distance <= math.sqrt(math.log(2 / rate) / (2 * len(x))) + tie


def identify(facts: Facts, laws: Iterable[Candidate], z: float) -> Identified:
    """The law that a tensor most likely came from.

    Args:
        facts: the tensor.
        laws: the laws in question, the most usual first.
        z: standard errors that its spread may be off.

    Returns:
        Exact patterns first (constants, identities, orthogonal rows); else the family whose shape fits with
        the greatest likelihood, and in it the laws whose spread the tensor has.

    Example:
        >>> from torch import nn
        >>> from musigma.init.auditing._candidates import candidates
        >>> from musigma.init.auditing._facts import read
        >>> facts = read(nn.Linear(64, 64))[0][0]
        >>> identify(facts, candidates(facts), 4.0).label
        'torch_default'

    References:
        None.
    """
    exact = _exact(facts)
    if exact is not None:
        return exact
    family = family_of(facts)
    if not family and (found := outliers_of(facts)) is not None:
        label = f"normal, std {found.sigma:.3g}, with {found.count} outliers"
        return Identified("contaminated", label, normal(found.sigma), False)
    if not family:
        return Identified(None, None, None, False)
    own = _FAMILIES[family](facts.std)
    matching = [c for c in laws if _same_family(c.law, own) and within(facts, c.law, z)]
    if not matching:
        return Identified(family, f"{family}, std {facts.std:.3g}", own, False)
    error = math.sqrt((own.kurtosis - 1) / (4 * facts.count))

    def distance(candidate: Candidate) -> float:
        # In standard errors; what the layer draws by itself needs two of them to be doubted. Laws of one
        # spread keep their order, the most usual first.
        off = abs(math.log(facts.std / candidate.law.std)) / error
        return round(max(off - 2.0, 0.0) if candidate.usual else off, 6)

    nearest = sorted(matching, key=distance)
    others = tuple(dict.fromkeys(c.label for c in nearest[1:] if c.label != nearest[0].label))
    return Identified(family, nearest[0].label, nearest[0].law, True, others)


def within(facts: Facts, law: Law, z: float) -> bool:
    """Whether a tensor has the mean and the spread of a law, but for z standard errors and rounding.

    Args:
        facts: the tensor.
        law: the law.
        z: standard errors.

    Returns:
        Whether it has.

    Example:
        >>> from torch import nn
        >>> from musigma.init.auditing._facts import read
        >>> within(read(nn.Linear(64, 64))[0][0], uniform(1 / (3 * 64) ** 0.5), 4.0)
        True

    References:
        None.
    """
    # Rounding to nearest changes a spread by less than half a unit in the last place of the largest entry.
    slack = torch.finfo(facts.values.dtype).eps * law.std
    low, high = std_interval(law, facts.count, z)
    left, right = mean_interval(law, facts.count, z)
    return low - slack <= facts.std <= high + slack and left - slack <= facts.mean <= right + slack


def is_orthogonal(matrix: Tensor) -> float:
    """The common singular value of a matrix with orthonormal rows or columns, up to that factor; else 0.

    Args:
        matrix: (rows, columns).

    Returns:
        The factor, judged on a few rows (or columns) that lie far apart.

    Example:
        >>> is_orthogonal(3 * torch.eye(4)), is_orthogonal(torch.ones(4, 4))
        (3.0, 0.0)

    References:
        None.
    """
    rows = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT
    if rows.shape[0] < 2 or rows.shape[1] < 3:
        return 0.0
    chosen = torch.linspace(0, rows.shape[0] - 1, min(_ROWS, rows.shape[0])).round().long()
    few = rows[chosen.to(rows.device)].double().cpu()
    gram = few @ few.mT
    scale = float(gram.diagonal().mean())
    if not scale > 0 or not math.isfinite(scale):
        return 0.0
    error = float((gram / scale - torch.eye(len(few), dtype=torch.float64)).abs().max())
    return math.sqrt(scale) if error < _ORTHOGONAL else 0.0


def _exact(facts: Facts) -> Identified | None:
    if not facts.finite:
        return Identified(None, None, None, False)
    if facts.constant:
        label = {0.0: "zeros", 1.0: "ones"}.get(facts.low, f"constant {facts.low:.4g}")
        return Identified("constant", label, Law(facts.low, 0.0, 1.0), True)
    if facts.values.dim() < 2:
        return None
    blocks = facts.values.flatten(1).chunk(max(len(facts.parts), 1))
    gains = [is_orthogonal(block) for block in blocks]
    kind = "orthogonal" if all(gains) else ""
    if not kind and len(blocks) > 1 and is_orthogonal(facts.values.flatten(1)):
        kind, gains = "orthogonal as one matrix", [is_orthogonal(facts.values.flatten(1))]
    if not kind and facts.values.dim() > 2:
        taps = facts.values
        for size in facts.shape[2:]:
            taps = taps.select(2, size // 2)
        gains = [is_orthogonal(taps)]
        kind = (
            "delta_orthogonal"
            if gains[0] and int(facts.values.count_nonzero()) == int(taps.count_nonzero())
            else ""
        )
    if kind:
        if facts.sample.count_nonzero() < len(facts.sample) / 2:
            kind = kind.replace("delta_orthogonal", "dirac").replace("orthogonal", "identity")
        family = "identity" if kind in ("identity", "dirac") else "orthogonal"
        label = kind if abs(gains[0] - 1) < _ORTHOGONAL else f"{kind}(gain={gains[0]:.4g})"
        return Identified(family, label, Law(0.0, facts.std**2, 1.0), True)
    zeros = 1 - int(facts.sample.count_nonzero()) / len(facts.sample)
    if zeros > 0.05 and len(facts.sample) >= FEW:
        return Identified(
            "sparse", f"{zeros:.0%} zeros", Law(facts.mean, facts.std**2, 3 / (1 - zeros)), False
        )
    return None


def _same_family(law: Law, own: Law) -> bool:
    return math.isclose(law.kurtosis, own.kurtosis, rel_tol=0.02)


def _distribution(x: Tensor, law: Law) -> Tensor:
    """F at x standard deviations from the mean."""
    low, high = (law.low - law.mean) / law.std, (law.high - law.mean) / law.std
    if law.kurtosis == 1.8:
        return ((x - low) / (high - low)).clamp(0, 1)
    if math.isinf(high):
        return torch.special.ndtr(x)
    sigma = high / 2  # of the parent, in standard deviations of what is left after the cut at two of it
    ends = torch.special.ndtr(torch.tensor([low / sigma, high / sigma], dtype=torch.float64))
    return ((torch.special.ndtr(x / sigma) - ends[0]) / (ends[1] - ends[0])).clamp(0, 1)


def _likelihood(facts: Facts, law: Law) -> float:
    """Mean log-density of the sampled entries, in units of the spread."""
    x = (facts.sample - facts.mean) / law.std
    if law.kurtosis == 1.8:
        return -math.log(2 * math.sqrt(3))
    square = float(x.square().mean())
    if math.isinf(law.high):
        return -(math.log(2 * math.pi) + square) / 2
    sigma = law.high / law.std / 2
    mass = math.erf(2 / math.sqrt(2))
    return -(math.log(2 * math.pi) + square / sigma**2) / 2 - math.log(sigma * mass)


__all__ = ["FEW", "SAMPLE", "Identified", "family_of", "fits", "identify", "is_orthogonal", "within"]
