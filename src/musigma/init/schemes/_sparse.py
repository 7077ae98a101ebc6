"""Few connections, but strong ones."""

import math

import torch
from torch import Tensor

from musigma.init.schemes._draw import standard_normal
from musigma.init.schemes._scheme import Law, Sample, Setting, scheme


def _zeros(sparsity: float, size: int) -> int:
    return math.ceil(sparsity * size)


def _law(setting: Setting) -> Law:
    size = setting.shape[setting.options["dim"]]
    kept = 1 - _zeros(setting.options["sparsity"], size) / size
    std = setting.options["std"]
    # A share `kept` of normal entries: second moment kept·std², fourth kept·3·std⁴.
    return Law(0.0, kept * std**2, kurtosis=3 / kept if kept else 1.0)


@scheme(
    law=_law,
    formula="w ~ N(0, std²), ⌈sparsity·size⌉ entries of every column (dim 0) or row (dim 1) set to 0",
    source="Martens 2010",
    samples=(
        Sample((60, 50), {"sparsity": 0.1}),
        Sample((63, 40), {"sparsity": 0.9, "std": 1.0}),
        Sample((40, 63), {"sparsity": 0.75, "dim": 1}),
        Sample((5, 5), {"sparsity": 1.0}),
        Sample((5, 5), {"sparsity": 0.0}),
        Sample((5,), {"sparsity": 0.1}, error=ValueError),
        Sample((5, 5, 5), {"sparsity": 0.1}, error=ValueError),
        Sample((5, 5), {"sparsity": 1.5}, error=ValueError),
        Sample((5, 5), {"sparsity": 0.5, "dim": 2}, error=ValueError),
        Sample((5, 5), {"sparsity": 0.5, "std": -1.0}, error=RuntimeError),
    ),
)
def sparse_(
    w: Tensor,
    *,
    sparsity: float,
    std: float = 0.01,
    dim: int = 0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Write normal numbers, all but a few of them zero, the same number in every column or row.

    torch.nn.init.sparse_ empties columns: every *input* reaches few units (dim=0). Martens limits the
    connections *into* every unit, so that it doesn't saturate however large the layer (dim=1).

    Law: mean 0, Var = std²·(1 − ⌈sparsity·size⌉/size) with size = w.shape[dim].

    Args:
        w: (out, in), any floating dtype.
        sparsity: share of zeros, in [0, 1].
        std: standard deviation of the others.
        dim: along which dimension the zeros are counted: 0 within a column, 1 within a row.
        generator: source of randomness; default: torch's own.

    Returns:
        w, written in place.

    Raises:
        ValueError: not two dimensions, sparsity outside [0, 1], dim neither 0 nor 1.
        RuntimeError: std is negative.

    Example:
        >>> import torch, musigma as ms
        >>> w = ms.init.sparse_(torch.empty(10, 4), sparsity=0.7)
        >>> (w == 0).sum(0)
        tensor([7, 7, 7, 7])

    References:
        Martens 2010, Deep learning via Hessian-free optimization, section 5.
    """
    if w.dim() != 2:
        raise ValueError(f"Only tensors with 2 dimensions are supported, got shape {tuple(w.shape)}")
    if not 0 <= sparsity <= 1 or dim not in (0, 1):
        raise ValueError(f"sparsity must lie in [0, 1] and dim be 0 or 1, got {sparsity=}, {dim=}")
    if not std >= 0:
        raise RuntimeError(f"normal expects std >= 0.0, but found std {std}; pass a standard deviation")
    if not w.is_meta:
        values = std * standard_normal(w.shape, w, generator)
        # The places of a random order: those of the largest of independent numbers.
        order = standard_normal(w.shape, w, generator).argsort(dim=dim)
        emptied = order.narrow(dim, 0, _zeros(sparsity, w.shape[dim]))
        w.copy_(values.scatter_(dim, emptied, 0.0))
    return w
