"""φ and the derivative that a backward pass multiplies by, for any callable."""

from collections.abc import Callable

import torch
from torch import Tensor

from musigma.init.meanfield._activations import Activation, lookup, resolve

# Central differences: truncation h²|φ'''|/6 and rounding eps/h balance at about eps^(1/3) = 6e-6.
_STEP = 2.0**-17
Pair = Callable[[Tensor], tuple[Tensor, Tensor]]


def differentiate(activation: Activation) -> tuple[Pair, str, bool]:
    """φ with its derivative as autograd gives it, or by central differences where autograd gives none.

    Autograd's derivative is the one a network's gradient is multiplied by, also where it is not the
    slope of φ: at a jump, or under a backward of the user's own.

    Args:
        activation: a name, (name, keywords), a callable or an activation module.

    Returns:
        A function z (n,) → (φ(z), φ'(z)), its label, and whether autograd made the derivative.

    Raises:
        ValueError: unknown name.
        TypeError: φ is not a fixed elementwise function.

    Example:
        >>> pair, label, by_autograd = differentiate("relu")
        >>> pair(torch.tensor([-1.0, 2.0])), label, by_autograd
        ((tensor([0., 2.]), tensor([0., 1.])), 'relu', True)

    References:
        None.
    """
    function, label = resolve(activation)
    with torch.inference_mode(False):  # a copy made in inference mode would leave autograd
        raw, _ = lookup(activation)
    probe = torch.linspace(-1.0, 1.0, 3, dtype=torch.float64, device="cpu")
    if _by_autograd(raw, probe) is None:
        return (lambda z: (function(z), _by_differences(function, z, _STEP))), label, False

    def pair(z: Tensor) -> tuple[Tensor, Tensor]:
        both = _by_autograd(raw, z)
        assert both is not None, "autograd followed the activation a moment ago"
        return both

    return pair, label, True


def _by_autograd(raw: Callable[..., Tensor], z: Tensor) -> tuple[Tensor, Tensor] | None:
    """φ and φ', or None where the function leaves autograd (NumPy inside, detached, a comparison)."""
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.device("cpu"),
        torch.random.fork_rng(devices=[]),
    ):
        leaf = z.detach().clone().requires_grad_()
        try:
            out = raw(leaf.clone())
            if not out.requires_grad:
                return None
            (slope,) = torch.autograd.grad(out, leaf, torch.ones_like(out))
        except (RuntimeError, NotImplementedError):
            return None
    return out.detach().to(z.dtype), slope


def _by_differences(function: Callable[[Tensor], Tensor], z: Tensor, step: float) -> Tensor:
    h = step * z.abs().clamp_min(1.0)
    above, below = z + h, z - h
    return (function(above) - function(below)) / (above - below)


def has_jumps(activation: Activation) -> bool:
    """Whether differences of φ grow without bound as the step shrinks, as they do at a jump.

    Args:
        activation: a name, (name, keywords), a callable or an activation module.

    Returns:
        True where max |φ(z+h) − φ(z−h)| over 4096 points on [−8, 8] does not shrink with the spacing.

    Raises:
        ValueError: unknown name.
        TypeError: φ is not a fixed elementwise function.

    Example:
        >>> has_jumps("hardshrink"), has_jumps("relu")
        (True, False)

    References:
        None.
    """
    function, _ = resolve(activation)
    low = torch.linspace(-8.0, 8.0, 4097, dtype=torch.float64, device="cpu")[:-1]
    width = low[1] - low[0]
    low, high = low, low + width
    first = (function(high) - function(low)).abs()
    # Follow the widest gap into its half: a continuous function's shrinks, a jump's stays.
    at = int(first.argmax())
    a, b, gap = low[at : at + 1], high[at : at + 1], float(first[at])
    for _ in range(30):
        middle = (a + b) / 2
        left = float((function(middle) - function(a)).abs())
        right = float((function(b) - function(middle)).abs())
        a, b = (a, middle) if left >= right else (middle, b)
        gap_now = max(left, right)
        if gap_now == 0.0:
            return False
    # 30 halvings leave 2^-30 of a smooth gap, 2^-15 of a root's; a jump keeps all of it but rounding.
    return gap_now > 0.01 * gap
