"""One value to normalize: nothing is left of it but the bias, exactly, and its author is told once."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from weakref import WeakSet

import torch
from torch import Tensor, nn

from musigma._errors import MusigmaWarning

# A warning points at the first frame outside of torch and of this package.
_INSIDE = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
_told: WeakSet[nn.Module] = WeakSet()


def only_bias(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """What a centered norm makes of one value: (x − x) · weight + bias.

    x̂ is exactly 0, so y is exactly the bias and no gradient reaches the weight or x; a kernel that rounds
    its mean returns noise of up to 1/√eps instead. NaN and inf stay visible.
    """
    y = x - x
    if weight is not None:
        y = y * weight
    if bias is not None:
        y = y + bias
    return y.to(x.dtype)


def warn_single_value(
    function: str, shape: Sequence[int], left: str = "the output is the bias alone"
) -> None:
    """Say that `function` normalizes single values: once a layer, or as Python's warning filters have it.

    Args:
        function: the function's name, as its user calls it.
        shape: the input's shape.
        left: what is left of the input.
    """
    if torch.compiler.is_compiling():
        return
    layer, level = caller()
    if layer is not None:
        if layer in _told:
            return
        _told.add(layer)
    who = function if layer is None else f"{type(layer).__name__} ({function})"
    warnings.warn(
        f"{who} normalizes single values: an input of shape {tuple(shape)} holds one value per set of "
        f"statistics, so {left}. Normalize over more features, use fewer groups, or drop the layer",
        MusigmaWarning,
        stacklevel=level + 1,
    )


def caller() -> tuple[nn.Module | None, int]:
    """The layer on whose behalf we were called, if any, and how many frames up the user's own code stands."""
    frame: FrameType | None = sys._getframe(1)
    layer: nn.Module | None = None
    level, inside = 0, True
    while frame is not None and (inside or layer is None):
        owner = frame.f_locals.get("self")
        if layer is None and isinstance(owner, nn.Module):
            layer = owner
        inside = inside and frame.f_code.co_filename.startswith(_INSIDE)
        level += inside
        frame = frame.f_back
    return layer, level
