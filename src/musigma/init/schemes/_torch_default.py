"""What torch.nn.Linear and the convolutions do by themselves."""

import math

import torch
from torch import Tensor

from musigma.init._fans import Fans, FansLike
from musigma.init.schemes._draw import fill_uniform
from musigma.init.schemes._scaling import BAD_FANS, GIVEN_FANS, SHAPE_SAMPLES, fan_std, scaled_uniform_law
from musigma.init.schemes._scheme import Law, Sample, Setting, scheme


def _law(setting: Setting) -> Law:
    return scaled_uniform_law(1 / (3 * setting.fans.fan_in))


@scheme(
    law=_law,
    formula="w ~ U[±1/√fan_in], Var = 1/(3·fan_in)",
    source="torch.nn.Linear.reset_parameters",
    samples=(*SHAPE_SAMPLES, GIVEN_FANS, BAD_FANS),
)
def torch_default_(
    w: Tensor, *, fans: FansLike | None = None, generator: torch.Generator | None = None
) -> Tensor:
    """Write what torch.nn.Linear and the convolutions start with.

    `kaiming_uniform_(a=√5)` reads like He's scheme and is none: its gain is √(2/(1+5)) = 1/√3, so a
    layer keeps a third of the mean square, a sixth before ReLU, and deep stacks fade.

    Law: mean 0, Var = 1/(3·fan_in), bounds ±1/√fan_in.

    Args:
        w: (out, in, *kernel), any floating dtype.
        fans: effective fans; default: counted from the shape.
        generator: source of randomness; default: torch's own.

    Returns:
        w, written in place.

    Raises:
        ValueError: fewer than two dimensions, fans not positive.

    Example:
        >>> import torch, musigma as ms
        >>> bool((ms.init.torch_default_(torch.empty(5, 16)).abs() <= 0.25).all())
        True

    References:
        pytorch/pytorch#15314 (how √5 came about); LeCun et al. 1998.
    """
    bound = fan_std(w, fans, "fan_in", 1.0)
    fill_uniform(w, -bound, bound, generator)
    return w


@scheme(
    law=_law,
    formula="b ~ U[±1/√fan_in] with the weight's fan_in",
    source="torch.nn.Linear.reset_parameters",
    samples=(
        Sample((1000,), {"fans": Fans(16, 1000)}),
        Sample((100,), {"fans": Fans(7, 3)}),
        Sample((4,), {"fans": Fans(-1, 4)}, error=ValueError),
    ),
)
def torch_default_bias_(b: Tensor, *, fans: FansLike, generator: torch.Generator | None = None) -> Tensor:
    """Write the biases that torch.nn.Linear and the convolutions start with.

    In a deep stack they are what is left when the weights have let the signal fade: a healthy-looking
    spread that is the same for every input.

    Law: mean 0, Var = 1/(3·fan_in), bounds ±1/√fan_in; zeros where fan_in is 0 (a layer without inputs).

    Args:
        b: (out,), any floating dtype.
        fans: fans of the *weight* beside it, `fans(module)`: a bias has none of its own.
        generator: source of randomness; default: torch's own.

    Returns:
        b, written in place.

    Raises:
        ValueError: fan_in is negative or not finite.

    Example:
        >>> import torch, musigma as ms
        >>> b = ms.init.torch_default_bias_(torch.empty(50), fans=(16, 50))
        >>> bool((b.abs() <= 0.25).all())
        True

    References:
        torch.nn.Linear.reset_parameters.
    """
    fan_in = fans[0]
    if not 0 <= fan_in < math.inf:
        raise ValueError(f"fan_in must be finite and at least 0, got {fan_in}; pass fans(module)")
    bound = 1 / math.sqrt(fan_in) if fan_in > 0 else 0.0
    fill_uniform(b, -bound, bound, generator)
    return b
