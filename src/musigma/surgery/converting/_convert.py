"""Turn normalizations of one kind into another."""

from __future__ import annotations

from typing import Any, Literal

from torch import nn

from musigma.graph import unwrap
from musigma.surgery._batches import as_batches, as_example
from musigma.surgery._certificate import Certificate
from musigma.surgery._layers import Where, duplicate, materialized
from musigma.surgery.converting._batch import from_batch_norm
from musigma.surgery.converting._identity import to_identity
from musigma.surgery.converting._layer import to_rms_norm

Kind = Literal["batchnorm", "layernorm", "any"]
Target = Literal["groupnorm", "layernorm", "instancenorm", "rmsnorm", "identity"]

_PAIRS = {
    "batchnorm": ("groupnorm", "layernorm", "instancenorm", "identity"),
    "layernorm": ("rmsnorm", "identity"),
    "any": ("identity",),
}


def convert(
    model: nn.Module,
    example: Any,
    *,
    source: Kind = "batchnorm",
    target: Target = "groupnorm",
    groups: int | None = None,
    loader: Any = None,
    max_batches: int | None = None,
    where: Where = None,
) -> tuple[nn.Module, Certificate]:
    """Turn normalizations of one kind into another, with weights calibrated on data.

        weight, bias = argmin Σ (old(x) − weight · z(x) − bias)²,   z = the new layer without weight and bias

    Layers are converted in the order in which they run: `old(x)` is what the layer gave in the model as it
    was, in evaluation, and z is of what reaches it now, behind layers that are converted already, so that
    a layer also makes up for those before it. The certificate says of every layer what the fit left over.

    - BatchNorm → GroupNorm, LayerNorm (over the channels, each position for itself) or InstanceNorm: the new
      statistics belong to examples, so this is never exact, and training goes on from close by.
    - LayerNorm → RMSNorm: exact where the inputs have mean 0, calibrated else. A bias, which RMSNorm
      doesn't have, moves into the Linears behind it; where it cannot, the layer is left alone.
    - anything → Identity, where it is one: on the data and on random inputs.

    Hooks, `.training`, eps, types, devices and `requires_grad` stay. Left alone, with the reason: subclasses
    with a forward of their own, layers that would normalize single values, channels that make no groups.

    Args:
        model: any module; left as it is.
        example: what the model is called with.
        source: "batchnorm", "layernorm", or "any" normalization.
        target: what they become.
        groups: of a GroupNorm; None for at most 32 with at least two channels and sixteen values each.
        loader: what to calibrate on: batches as in `recalibrate`, read several times. The example if None.
        max_batches: read only so many.
        where: names or patterns of layers, or a function of name and layer; all of the kind if None.

    Returns:
        a converted copy, and the certificate with the difference of its outputs in evaluation. It has no
        bound unless the conversion is exact.

    Raises:
        ValueError: an unknown pair of kinds, groups without a GroupNorm, no batches, or `where` names none.

    Example:
        >>> import torch, musigma as ms
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU())
        >>> small, certificate = ms.surgery.convert(net, torch.randn(8, 3, 10, 10), groups=4)
        >>> small[1]
        GroupNorm(4, 8, eps=1e-05, affine=True, bias=True)

    References:
        Wu & He 2018, "Group Normalization"; Zhang & Sennrich 2019, "Root mean square layer normalization".
    """
    if target not in _PAIRS.get(source, ()):
        known = "; ".join(f"{s} to {', '.join(t)}" for s, t in _PAIRS.items())
        raise ValueError(f"there is no conversion of {source!r} to {target!r}; there is {known}")
    if groups is not None and (target != "groupnorm" or groups < 1):
        raise ValueError(f"groups is of a GroupNorm and at least 1; got groups={groups} for {target!r}")
    twin = duplicate(unwrap(materialized(model, example)))
    data = calibration_data(twin, example, loader, max_batches)
    if target == "identity":
        return to_identity(twin, data, source, where)
    if source == "layernorm":
        return to_rms_norm(twin, data, where)
    return from_batch_norm(twin, data, target, groups, where)


def calibration_data(model: nn.Module, example: Any, loader: Any, max_batches: int | None) -> list[Any]:
    """What to calibrate on, as the model is called with it.

    Raises:
        ValueError: no batches.
    """
    if loader is None:
        return [example]
    data: list[Any] = []
    for batch in as_batches(loader):
        if max_batches is not None and len(data) >= max_batches:
            break
        data.append(as_example(model, batch))
    if not data:
        raise ValueError("calibration needs at least one batch; got none")
    return data
