"""Several matrices in one tensor, each with a gain of its own."""

import inspect
from collections.abc import Sequence

import torch
from torch import Tensor

from musigma.init._fans import FansLike
from musigma.init._fans import fans as count_fans
from musigma.init.schemes._scheme import SCHEMES, Law, Sample, Setting, scheme


def _rows(size: int, gains: Sequence[float], sizes: Sequence[int] | None) -> list[int]:
    if not gains:
        raise ValueError("gains must name at least one matrix")
    if sizes is None:
        if size % len(gains):
            raise ValueError(f"{size} rows must be divisible by the number of gains ({len(gains)})")
        return [size // len(gains)] * len(gains)
    if len(sizes) != len(gains) or sum(sizes) != size or min(sizes) < 0:
        raise ValueError(
            f"sizes {list(sizes)} must be one for each of {len(gains)} gains and add up to {size}"
        )
    return list(sizes)


def _stacked_law(setting: Setting) -> Law:
    options = setting.options
    rows = _rows(setting.shape[options["dim"]], options["gains"], options["sizes"])
    part = SCHEMES[options["scheme"]]
    laws = [
        (size / sum(rows), part.law(setting.shape, fans=setting.fans, options={"gain": gain}))
        for gain, size in zip(options["gains"], rows, strict=True)
    ]
    var = sum(share * law.var for share, law in laws)
    fourth = sum(share * law.kurtosis * law.var**2 for share, law in laws)
    low, high = min(law.low for _, law in laws), max(law.high for _, law in laws)
    return Law(0.0, var, kurtosis=fourth / var**2 if var else 3.0, low=low, high=high)


@scheme(
    law=_stacked_law,
    formula="W = [gain₁·W₁; gain₂·W₂; …], each Wᵢ from one scheme",
    source="packed query-key-value projections of DeepNorm and T-Fixup",
    samples=(
        Sample((60, 20), {"gains": (1.0, 1.0, 0.5), "fans": (20, 20)}),
        Sample((20, 60), {"gains": (1.0, 0.2), "sizes": (50, 10), "dim": 1, "scheme": "xavier_uniform"}),
        Sample((6, 5), {"gains": (1.0, 2.0, 3.0, 4.0)}, error=ValueError),
        Sample((6, 5), {"gains": (1.0, 2.0), "sizes": (3, 4)}, error=ValueError),
        Sample((6, 5), {"gains": ()}, error=ValueError),
        Sample((6, 5), {"gains": (1.0, -2.0)}, error=ValueError),
        Sample((6, 5), {"gains": (1.0,), "scheme": "zeros"}, error=ValueError),
    ),
)
def stacked_(
    w: Tensor,
    *,
    gains: Sequence[float],
    sizes: Sequence[int] | None = None,
    dim: int = 0,
    scheme: str = "xavier_normal",
    fans: FansLike | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Write several matrices that lie stacked in one tensor, from one scheme, with a gain for each.

    Law: W = [gain₁·W₁; gain₂·W₂; …]; the moments are those of the whole tensor.

    Args:
        w: (out, in, *kernel), any floating dtype.
        gains: a factor on the standard deviation of each matrix.
        sizes: how many rows each has; default: equally many.
        dim: along which dimension they are stacked: 1 for weights kept as (in, out).
        scheme: a name in SCHEMES that takes `gain` and `fans`.
        fans: effective fans of one matrix; default: counted from the shape of the whole.
        generator: source of randomness; default: torch's own.

    Returns:
        w, written in place.

    Raises:
        ValueError: sizes that don't fit, a gain that the scheme refuses, a scheme without gain.

    Example:
        >>> import torch, musigma as ms
        >>> w = ms.init.stacked_(torch.empty(9, 3), gains=(1, 1, 0), fans=(3, 3))
        >>> bool((w[6:] == 0).all()), bool((w[:6] == 0).any())
        (True, False)

    References:
        Wang et al. 2022, DeepNet, figure 2 (values are scaled, queries and keys are not).
    """
    rows = _rows(w.shape[dim], gains, sizes)
    part = SCHEMES.get(scheme)
    if part is None or not {"gain", "fans"} <= set(inspect.signature(part.function).parameters):
        raise ValueError(f"scheme must be one that takes gain and fans, got {scheme!r}")
    whole = torch.empty(w.shape, device="meta")
    for gain in gains:
        part.function(whole, gain=gain, fans=fans)  # its checks, before anything is written
    # Fans of the whole are those of what w is, not of a piece of it.
    given = count_fans(whole) if fans is None else fans
    for piece, gain in zip(w.split(rows, dim), gains, strict=True):
        part.function(piece, gain=gain, fans=given, generator=generator)
    return w
