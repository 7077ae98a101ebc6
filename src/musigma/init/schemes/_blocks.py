"""A constant for each of several stacked blocks: the biases of a recurrent layer's gates."""

from collections.abc import Sequence

from torch import Tensor

from musigma.init.schemes._scheme import Law, Sample, Setting, scheme


def _law(setting: Setting) -> Law:
    values = [float(value) for value in setting.options["values"]]
    mean = sum(values) / len(values)
    var = sum((value - mean) ** 2 for value in values) / len(values)
    fourth = sum((value - mean) ** 4 for value in values) / len(values)
    return Law(mean, var, kurtosis=fourth / var**2 if var else 3.0, low=min(values), high=max(values))


@scheme(
    law=_law,
    formula="block i of dim 0 = values[i]",
    source="Gers, Schmidhuber & Cummins 2000",
    samples=(
        Sample((8,), {"values": (0.0, 1.0, 0.0, 0.0)}),
        Sample((6, 5), {"values": (0.5, 0.25)}),
        Sample((7,), {"values": (0.0, 1.0)}, error=ValueError),
        Sample((4,), {"values": ()}, error=ValueError),
        Sample((), {"values": (1.0,)}, error=ValueError),
    ),
)
def block_constant_(w: Tensor, *, values: Sequence[float]) -> Tensor:
    """Write one number into each of several equal blocks along the first dimension.

    Law: w[i·n : (i+1)·n] = values[i]; over all blocks the mean and variance of the values.

    Args:
        w: (blocks·n, *), any floating dtype.
        values: one number a block, first block first: (0, 1, 0, 0) for the forget gate of an LSTM.

    Returns:
        w, written in place.

    Raises:
        ValueError: no values, or a first dimension that they don't divide.

    Example:
        >>> import torch, musigma as ms
        >>> ms.init.block_constant_(torch.empty(4), values=(0.0, 1.0))
        tensor([0., 0., 1., 1.])

    References:
        Gers, Schmidhuber & Cummins 2000 (forget gate).
    """
    if not values or w.dim() < 1 or w.shape[0] % len(values):
        raise ValueError(
            f"the first dimension of shape {tuple(w.shape)} must be divisible by the number of values "
            f"({len(values)}); pass one value a block"
        )
    for block, value in zip(w.chunk(len(values)), values, strict=True):
        block.fill_(value)
    return w
