"""Schemes that write the same number, or identities: nothing random, so nothing that breaks symmetry."""

from torch import Tensor

from musigma.init.schemes._scheme import Law, Sample, Setting, scheme

_ANY_SHAPE = (Sample((6, 5)), Sample((7,)), Sample((2, 3, 1, 4)), Sample(()))


def _constant_law(setting: Setting) -> Law:
    value = float(setting.options["value"])
    return Law(value, 0.0, low=value, high=value)


@scheme(
    law=_constant_law,
    formula="w = value",
    source="none",
    samples=tuple(Sample(s.shape, {"value": 0.25}) for s in _ANY_SHAPE),
    any_dtype=True,
)
def constant_(w: Tensor, *, value: float) -> Tensor:
    """Write one number everywhere.

    As the weight of a hidden layer it breaks no symmetry: units with equal weights compute the same and
    get the same gradient, so they stay equal for ever. For biases and for a norm's weight it is right.

    Law: w = value, Var = 0.

    Args:
        w: (*), any dtype.
        value: what to write.

    Returns:
        w, written in place.

    Example:
        >>> import torch, musigma as ms
        >>> ms.init.constant_(torch.empty(2), value=0.5)
        tensor([0.5000, 0.5000])

    References:
        Goodfellow, Bengio & Courville 2016, section 8.4.
    """
    return w.fill_(value)


@scheme(
    law=lambda setting: Law(0.0, 0.0, low=0.0, high=0.0),
    formula="w = 0",
    source="none",
    samples=_ANY_SHAPE,
    any_dtype=True,
)
def zeros_(w: Tensor) -> Tensor:
    """Write zeros: right for biases and for the last layer of a residual branch, fatal for hidden weights.

    With all weights zero the units of a layer are copies of each other and stay so (no symmetry is
    broken), and no gradient passes to the layers below.

    Law: w = 0, Var = 0.

    Args:
        w: (*), any dtype.

    Returns:
        w, written in place.

    Example:
        >>> import torch, musigma as ms
        >>> ms.init.zeros_(torch.empty(2))
        tensor([0., 0.])

    References:
        Goodfellow, Bengio & Courville 2016, section 8.4.
    """
    return w.zero_()


@scheme(
    law=lambda setting: Law(1.0, 0.0, low=1.0, high=1.0),
    formula="w = 1",
    source="none",
    samples=_ANY_SHAPE,
    any_dtype=True,
)
def ones_(w: Tensor) -> Tensor:
    """Write ones: the neutral weight of a normalization layer.

    Law: w = 1, Var = 0.

    Args:
        w: (*), any dtype.

    Returns:
        w, written in place.

    Example:
        >>> import torch, musigma as ms
        >>> ms.init.ones_(torch.empty(2))
        tensor([1., 1.])

    References:
        Ioffe & Szegedy 2015 (γ at the start).
    """
    return w.fill_(1)
