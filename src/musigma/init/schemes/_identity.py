"""Layers that begin by handing their input on."""

import math

from torch import Tensor

from musigma.init.schemes._orthogonal import central_tap, require_groups
from musigma.init.schemes._scheme import Law, Sample, Setting, scheme


def _eye_law(setting: Setting) -> Law:
    gain, groups = float(setting.options["gain"]), setting.options["groups"]
    # k entries of n equal the gain. Not a random choice, so there is no sampling error: kurtosis 1.
    share = groups * min(setting.shape[0] // groups, setting.shape[1]) / math.prod(setting.shape)
    return Law(
        gain * share, gain**2 * share * (1 - share), kurtosis=1.0, low=min(0.0, gain), high=max(0.0, gain)
    )


def _eye(w: Tensor, gain: float, groups: int) -> None:
    """Write gain·I into each of the stacked matrices of a 2-D view."""
    w.zero_()
    for block in w.chunk(groups):
        block.fill_diagonal_(gain)


@scheme(
    law=_eye_law,
    formula="W = gain·I",
    source="Le, Jaitly & Hinton 2015",
    samples=(
        Sample((6, 6)),
        Sample((6, 9), {"gain": 0.5}),
        Sample((9, 6)),
        Sample((12, 4), {"groups": 3}),
        Sample((5,), error=ValueError),
        Sample((2, 2, 2), error=ValueError),
        Sample((4, 4), {"groups": 3}, error=ValueError),
    ),
)
def identity_(w: Tensor, *, gain: float = 1.0, groups: int = 1) -> Tensor:
    """Write the identity: a linear layer that starts by copying as many inputs as it has outputs.

    Nothing is random, yet symmetry is broken: every unit copies another input. The surplus rows of a tall
    matrix are zeros and do stay alike.

    Law: W = gain·I (ones on the main diagonal); mean gain/max(rows, columns).

    Args:
        w: (out, in), any floating dtype.
        gain: the diagonal.
        groups: number of equal blocks along dim 0, each an identity: 4 for an LSTM's gates.

    Returns:
        w, written in place.

    Raises:
        ValueError: not two dimensions, dim 0 not divisible by groups.

    Example:
        >>> import torch, musigma as ms
        >>> ms.init.identity_(torch.empty(2, 3))
        tensor([[1., 0., 0.],
                [0., 1., 0.]])

    References:
        Le, Jaitly & Hinton 2015 (IRNN).
    """
    if w.dim() != 2:
        raise ValueError(
            f"Only tensors with 2 dimensions are supported, got shape {tuple(w.shape)}; "
            f"for a convolution use dirac_"
        )
    require_groups(w, groups)
    if not w.is_meta:
        _eye(w, gain, groups)
    return w


@scheme(
    law=_eye_law,
    formula="W = gain·δ: central tap the identity, the others 0",
    source="Zagoruyko & Komodakis 2017",
    samples=(
        Sample((6, 6, 3)),
        Sample((6, 4, 3, 5), {"gain": 2.0}),
        Sample((4, 6, 2, 2, 2)),
        Sample((8, 2, 3, 3), {"groups": 4}),
        Sample((4, 4), error=ValueError),
        Sample((2, 2, 2, 2, 2, 2), error=ValueError),
        Sample((4, 4, 3), {"groups": 3}, error=ValueError),
    ),
)
def dirac_(w: Tensor, *, gain: float = 1.0, groups: int = 1) -> Tensor:
    """Write a Dirac kernel: a convolution that starts by copying its input channels.

    With padding = kernel_size // 2 and stride 1 the output is the input (times gain), channel by channel.

    Law: W[i, i, center] = gain within each group, 0 elsewhere.

    Args:
        w: (out, in, *kernel) with one to three kernel dimensions, any floating dtype.
        gain: the number at the center.
        groups: the convolution's groups.

    Returns:
        w, written in place.

    Raises:
        ValueError: not three to five dimensions, dim 0 not divisible by groups.

    Example:
        >>> import torch, musigma as ms
        >>> ms.init.dirac_(torch.empty(1, 1, 3))
        tensor([[[0., 1., 0.]]])

    References:
        Zagoruyko & Komodakis 2017, DiracNets; torch.nn.init.dirac_.
    """
    center = central_tap(w)
    require_groups(w, groups)
    if not w.is_meta:
        w.zero_()
        _eye(w[center], gain, groups)
    return w
