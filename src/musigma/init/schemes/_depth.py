"""Schemes of Transformers: spreads that know the width of the residual stream, or how deep a layer lies."""

import math

import torch
from torch import Tensor

from musigma.init._fans import Fans, FansLike
from musigma.init._fans import fans as count_fans
from musigma.init.schemes._draw import fill_normal, fill_uniform
from musigma.init.schemes._scaling import (
    BAD_FANS,
    SHAPE_SAMPLES,
    fan_std,
    scaled_normal_law,
    scaled_uniform_law,
)
from musigma.init.schemes._scheme import Law, Sample, Setting, scheme


def _width(fans: FansLike, dim: float | None) -> float:
    """The width d of the residual stream: what a Transformer's weight has on its narrower side."""
    if dim is not None:
        if not 0 < dim < math.inf:
            raise ValueError(f"dim must be positive and finite, got {dim}; it is the residual stream's width")
        return dim
    if not all(0 < fan < math.inf for fan in fans):
        raise ValueError(f"fans must be positive for a weight with elements, got {tuple(fans)}")
    # A look-up adds up one row: only the width counts there.
    return min((fan for fan in fans if fan > 1), default=1)


def _fans_of(w: Tensor, fans: FansLike | None) -> Fans:
    return count_fans(w) if fans is None else Fans(*fans)


def _require_depth(number: float, name: str) -> None:
    if not 1 <= number < math.inf:
        raise ValueError(f"{name} must be at least 1, got {number}; layers are counted from 1")


def _small_law(setting: Setting) -> Law:
    return scaled_normal_law(2 / (5 * _width(setting.fans, setting.options["dim"])))


@scheme(
    law=_small_law,
    formula="w ~ N(0, 2/(5·d)), d the width of the residual stream",
    source="Nguyen & Salazar 2019; GPT-NeoX",
    samples=(
        *SHAPE_SAMPLES,
        Sample((60, 50), {"fans": Fans(1, 50)}),
        Sample((60, 50), {"dim": 20}),
        BAD_FANS,
        Sample((60, 50), {"dim": 0}, error=ValueError),
    ),
)
def small_init_(
    w: Tensor,
    *,
    dim: float | None = None,
    fans: FansLike | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Write normal numbers as small in all of a Transformer as Glorot's are in its feed-forward layers.

    It is `xavier_normal_` of a matrix d × 4d, for every weight of the model.

    Law: mean 0, Var = 2/(d + 4d) = 2/(5·d).

    Args:
        w: (out, in, *kernel), any floating dtype.
        dim: width d of the residual stream; default: the smaller fan (an embedding's row).
        fans: effective fans; default: counted from the shape.
        generator: source of randomness; default: torch's own.

    Returns:
        w, written in place.

    Raises:
        ValueError: fewer than two dimensions, fans or dim not positive.

    Example:
        >>> import torch, musigma as ms
        >>> g = torch.Generator().manual_seed(0)
        >>> w = ms.init.small_init_(torch.empty(1600, 400), generator=g)
        >>> round(1000 * ms.moments(w, None).var().item(), 1)
        1.0

    References:
        Nguyen & Salazar 2019, Transformers without Tears, section 2.2; Black et al. 2022, GPT-NeoX-20B,
        section 2.1.
    """
    fill_normal(w, 0.0, math.sqrt(2 / (5 * _width(_fans_of(w, fans), dim))), generator)
    return w


def _wang_law(setting: Setting) -> Law:
    return scaled_normal_law(
        4 / setting.options["layers"] ** 2 / _width(setting.fans, setting.options["dim"])
    )


@scheme(
    law=_wang_law,
    formula="w ~ N(0, 4/(L²·d)), d the width of the residual stream, L the number of layers",
    source="Wang & Komatsuzaki 2021; GPT-NeoX",
    samples=(
        *(Sample(s.shape, {"layers": 6}, s.error) for s in SHAPE_SAMPLES),
        Sample((60, 50), {"layers": 1, "dim": 20}),
        Sample((60, 50), {"layers": 3, "fans": Fans(9, 16)}),
        Sample((60, 50), {"layers": 0}, error=ValueError),
    ),
)
def wang_(
    w: Tensor,
    *,
    layers: int,
    dim: float | None = None,
    fans: FansLike | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Write normal numbers for the last projection of each branch of a deep residual network.

    Law: mean 0, standard deviation 2/(L·√d).

    Args:
        w: (out, in, *kernel), any floating dtype.
        layers: number L of Transformer layers.
        dim: width d of the residual stream; default: the smaller fan.
        fans: effective fans; default: counted from the shape.
        generator: source of randomness; default: torch's own.

    Returns:
        w, written in place.

    Raises:
        ValueError: fewer than two dimensions, fans or dim not positive, layers below 1.

    Example:
        >>> import torch, musigma as ms
        >>> g = torch.Generator().manual_seed(0)
        >>> w = ms.init.wang_(torch.empty(400, 1600), layers=10, generator=g)
        >>> round(ms.moments(w, None).std().item(), 3)
        0.01

    References:
        Wang & Komatsuzaki 2021, mesh-transformer-jax; Black et al. 2022, GPT-NeoX-20B, section 2.1.
    """
    _require_depth(layers, "layers")
    fill_normal(w, 0.0, 2 / (layers * math.sqrt(_width(_fans_of(w, fans), dim))), generator)
    return w


def _depth_scaled_law(setting: Setting) -> Law:
    gain = setting.options["alpha"] / math.sqrt(setting.options["layer"])
    return scaled_uniform_law(2 * gain**2 / (setting.fans.fan_in + setting.fans.fan_out))


@scheme(
    law=_depth_scaled_law,
    formula="w ~ U[±α/√l·√(6/(fan_in + fan_out))], l the layer's number, counted from 1",
    source="Zhang, Titov & Sennrich 2019",
    samples=(
        *(Sample(s.shape, {"layer": 5}, s.error) for s in SHAPE_SAMPLES),
        Sample((60, 50), {"layer": 1, "alpha": 0.5}),
        Sample((60, 50), {"layer": 3, "fans": Fans(9, 16)}),
        Sample((60, 50), {"layer": 0}, error=ValueError),
        Sample((60, 50), {"layer": 2, "alpha": -1.0}, error=ValueError),
    ),
)
def depth_scaled_(
    w: Tensor,
    *,
    layer: int,
    alpha: float = 1.0,
    fans: FansLike | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Write Glorot's uniform numbers, smaller the deeper the layer lies (DS-Init).

    A branch of layer l then adds 1/l of the variance that flows past it, so that the gradients of a
    post-norm Transformer no longer vanish towards its first layers.

    Law: mean 0, Var = α²/l·2/(fan_in + fan_out).

    Args:
        w: (out, in, *kernel), any floating dtype.
        layer: number l of the Transformer layer, counted from 1.
        alpha: factor α of all layers, at most 1 in the paper.
        fans: effective fans; default: counted from the shape. A packed weight needs those of one block.
        generator: source of randomness; default: torch's own.

    Returns:
        w, written in place.

    Raises:
        ValueError: fewer than two dimensions, fans not positive, layer below 1, alpha negative.

    Example:
        >>> import torch, musigma as ms
        >>> w = ms.init.depth_scaled_(torch.empty(3, 3), layer=4)
        >>> bool((w.abs() <= 0.5).all())
        True

    References:
        Zhang, Titov & Sennrich 2019, Improving Deep Transformer with Depth-Scaled Initialization and Merged
        Attention, eq. 5.
    """
    _require_depth(layer, "layer")
    bound = math.sqrt(3) * fan_std(w, fans, "fan_avg", alpha / math.sqrt(layer))
    fill_uniform(w, -bound, bound, generator)
    return w
