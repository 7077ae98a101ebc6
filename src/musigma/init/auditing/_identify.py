"""Which law a tensor most likely came from: its shape by Kolmogorov and Smirnov, its spread by likelihood."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from musigma.init.auditing._alike import rows_are_alike
from musigma.init.auditing._candidates import UNIFORM_KURTOSIS, Candidate, cut, normal, uniform
from musigma.init.auditing._facts import Facts
from musigma.init.auditing._interval import mean_interval, std_interval
from musigma.init.auditing._outliers import outliers_of
from musigma.init.schemes._scheme import Law

# Fewer entries than this fit almost any law: what is said of them is no evidence.
FEW = 64
# What a layer draws by itself is preferred to a law that is up to so many nats more likely.
_HEADSTART = 4.0
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


def fits(facts: Facts, law: Law, *, rate: float = 1e-6) -> bool:
    """Whether the entries can have been drawn from a continuous law, by their distribution.

    Formula: sup|F_n − F| ≤ √(ln(2/rate)/(2n)) over the sampled entries, and none outside the law's bounds.

    Args:
        facts: the tensor.
        law: a continuous law.
        rate: the chance that a tensor of this law is refused.

    Returns:
        Whether they can.

    Example:
        >>> from torch import nn
        >>> from musigma.init.auditing._facts import read
        >>> facts = read(nn.Linear(64, 64))[0][0]
        >>> fits(facts, uniform(1 / (3 * 64) ** 0.5)), fits(facts, normal(1 / (3 * 64) ** 0.5))
        (True, False)

    References:
        Dvoretzky, Kiefer & Wolfowitz 1956; Massart 1990.
    """
    if not facts.finite or facts.constant or not _inside(facts, law):
        return False
    x = facts.sample
    distribution = _distribution((x - law.mean) / law.std, law)
    steps = torch.arange(len(x) + 1, dtype=torch.float64) / len(x)
    distance = float(torch.maximum((distribution - steps[:-1]).abs(), (distribution - steps[1:]).abs()).max())
    # Coarse dtypes put many numbers into one: half of the largest share of equal entries is theirs.
    tie = 0.0 if facts.values.dtype.itemsize > 2 else 0.25 * torch.finfo(facts.values.dtype).eps
    return distance <= math.sqrt(math.log(2 / rate) / (2 * len(x))) + tie


def _inside(facts: Facts, law: Law) -> bool:
    # Rounding to the dtype may carry an entry half a unit past a bound.
    slack = torch.finfo(facts.values.dtype).eps * max(abs(facts.low), abs(facts.high))
    return law.low - slack <= facts.low and facts.high <= law.high + slack


def own_law(facts: Facts, family: str) -> Law:
    """A family's law with the mean and the spread, and where it has bounds the ends, that a tensor has.

    Args:
        facts: the tensor.
        family: "normal", "uniform" or "truncated".

    Returns:
        The law.

    Example:
        >>> from torch import nn
        >>> from musigma.init.auditing._facts import read
        >>> facts = read(nn.Linear(64, 64))[0][0]
        >>> own_law(facts, "normal").std == facts.std
        True

    References:
        None.
    """
    free = _FAMILIES[family](facts.std)
    if math.isinf(free.high):
        return Law(facts.mean, free.var, free.kurtosis)
    # A bound is known by the farthest entry, unless the tensor is small: then the spread knows it better.
    reach = max(facts.high, -facts.low, free.high)
    # ... but a law much wider than the spread is another law.
    excess = 4 * math.sqrt((free.kurtosis - 1) / (4 * facts.count)) + 4 / math.sqrt(facts.count)
    reach = min(reach, free.high * (1 + excess))
    return _FAMILIES[family](facts.std * reach / free.high)


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
    matching = [c for c in laws if within(facts, c.law, z) and fits(facts, c.law)]
    if matching and not rows_are_alike(facts, matching[0].law.kurtosis):
        return Identified(None, None, None, False)
    if matching:
        # Laws of one likelihood keep their order, the most usual first.
        best = sorted(matching, key=lambda c: -round(_likelihood(facts, c.law) + _HEADSTART * c.usual, 6))
        others = tuple(dict.fromkeys(c.label for c in best[1:] if c.label != best[0].label))
        return Identified(_family(best[0].law), best[0].label, best[0].law, True, others)
    families = [name for name in _FAMILIES if fits(facts, own_law(facts, name))]
    if families:
        family = max(families, key=lambda name: _likelihood(facts, own_law(facts, name)))
        if not rows_are_alike(facts, own_law(facts, family).kurtosis):
            return Identified(None, None, None, False)
        return Identified(family, f"{family}, std {facts.std:.3g}", own_law(facts, family), False)
    if (found := outliers_of(facts)) is not None:
        label = f"normal, std {found.sigma:.3g}, with {found.count} outliers"
        return Identified("contaminated", label, normal(found.sigma), False)
    return Identified(None, None, None, False)


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
    pattern = _pattern(facts)
    if pattern is not None:
        return pattern
    zeros = 1 - int(facts.sample.count_nonzero()) / len(facts.sample)
    if zeros > 0.05 and len(facts.sample) >= FEW:
        return Identified(
            "sparse", f"{zeros:.0%} zeros", Law(facts.mean, facts.std**2, 3 / (1 - zeros)), False
        )
    return None


def _pattern(facts: Facts) -> Identified | None:
    """Orthonormal rows or columns, of each block, of all as one, or of a kernel's central tap alone."""
    taps = facts.values
    for size in facts.shape[2:]:
        taps = taps.select(2, size // 2)
    central = taps is not facts.values and int(facts.values.count_nonzero()) == int(taps.count_nonzero())
    flat = taps if central else facts.values.flatten(1)
    gains = [is_orthogonal(block) for block in flat.chunk(max(len(facts.parts), 1))]
    copies = int(flat.count_nonzero()) <= max(flat.shape)
    kind = ("dirac" if central else "identity") if copies else "delta_orthogonal" if central else "orthogonal"
    if not all(gains):
        gains = [is_orthogonal(flat)] if len(gains) > 1 and not central else [0.0]
        kind = "orthogonal as one matrix"
    if not all(gains):
        return None
    label = kind if abs(gains[0] - 1) < _ORTHOGONAL else f"{kind}(gain={gains[0]:.4g})"
    family = "identity" if copies else "orthogonal"
    return Identified(family, label, Law(0.0, facts.std**2, 1.0), True)


def _family(law: Law) -> str:
    if math.isinf(law.high):
        return "normal"
    return "uniform" if law.kurtosis == UNIFORM_KURTOSIS else "truncated"


def _distribution(x: Tensor, law: Law) -> Tensor:
    """F at x standard deviations from the mean."""
    low, high = (law.low - law.mean) / law.std, (law.high - law.mean) / law.std
    if law.kurtosis == UNIFORM_KURTOSIS:
        return ((x - low) / (high - low)).clamp(0, 1)
    if math.isinf(high):
        return torch.special.ndtr(x)
    sigma = high / 2  # of the parent, in standard deviations of what is left after the cut at two of it
    ends = torch.special.ndtr(torch.tensor([low / sigma, high / sigma], dtype=torch.float64))
    return ((torch.special.ndtr(x / sigma) - ends[0]) / (ends[1] - ends[0])).clamp(0, 1)


def _likelihood(facts: Facts, law: Law) -> float:
    """Log-density of all entries under a law that has none of them outside its bounds."""
    family = _family(law)
    if family == "uniform":
        return -facts.count * math.log(law.high - law.low)
    square = facts.std**2 + (facts.mean - law.mean) ** 2
    if family == "normal":
        return -facts.count * (math.log(2 * math.pi * law.var) + square / law.var) / 2
    sigma = (law.high - law.mean) / 2
    mass = math.erf(2 / math.sqrt(2))
    return -facts.count * (math.log(2 * math.pi * sigma**2 * mass**2) + square / sigma**2) / 2
