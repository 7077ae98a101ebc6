"""From whatever names an activation to a function of float64 tensors."""

import copy
import difflib
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Function = Callable[[Tensor], Tensor]
Activation = str | nn.Module | Callable[..., Tensor] | tuple[str, Mapping[str, Any]]


def _identity(z: Tensor) -> Tensor:
    return z


def _gelu_tanh(z: Tensor) -> Tensor:
    return F.gelu(z, approximate="tanh")


def _quick_gelu(z: Tensor) -> Tensor:
    return z * torch.sigmoid(1.702 * z)


def _relu_squared(z: Tensor) -> Tensor:
    return F.relu(z).square()


ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    "celu": F.celu,
    "elu": F.elu,
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "hardshrink": F.hardshrink,
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "hardtanh": F.hardtanh,
    "identity": _identity,
    "leaky_relu": F.leaky_relu,
    "logsigmoid": F.logsigmoid,
    "mish": F.mish,
    "quick_gelu": _quick_gelu,
    "relu": F.relu,
    "relu6": F.relu6,
    "relu_squared": _relu_squared,
    "selu": F.selu,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "sin": torch.sin,
    "softplus": F.softplus,
    "softshrink": F.softshrink,
    "softsign": F.softsign,
    "tanh": torch.tanh,
    "tanhshrink": F.tanhshrink,
    "threshold": F.threshold,
}

# Other people's names of the same functions; the layers are torch's words for "nothing follows".
_ALIASES = {
    "linear": "identity",
    "conv1d": "identity",
    "conv2d": "identity",
    "conv3d": "identity",
    "conv_transpose1d": "identity",
    "conv_transpose2d": "identity",
    "conv_transpose3d": "identity",
    "none": "identity",
    "swish": "silu",
    "relu2": "relu_squared",
    "squared_relu": "relu_squared",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "leakyrelu": "leaky_relu",
    "hard_tanh": "hardtanh",
    "hard_sigmoid": "hardsigmoid",
    "hard_swish": "hardswish",
    "log_sigmoid": "logsigmoid",
}


def canonical_name(name: str) -> str:
    """The name under which musigma knows an activation.

    Args:
        name: any of its usual names, in any case.

    Returns:
        A key of the table of activations.

    Raises:
        ValueError: nobody calls an activation that; the message has the nearest names.

    Example:
        >>> canonical_name("Swish")
        'silu'

    References:
        None.
    """
    key = name.lower()
    key = _ALIASES.get(key, key)
    if key in ACTIVATIONS:
        return key
    near = difflib.get_close_matches(key, [*ACTIVATIONS, *_ALIASES], n=3)
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"known are {sorted(ACTIVATIONS)}"
    raise ValueError(f"Unsupported nonlinearity {name!r}: {hint} Any callable works too.")


def resolve(activation: Activation) -> tuple[Function, str]:
    """A function of float64 CPU tensors for an activation, and what to call it in messages.

    The function never changes its argument, the module it came from, or the random state.

    Args:
        activation: a name; (name, keyword arguments); a callable; an activation module (a copy of it is
            evaluated in float64 on the CPU, in the mode it is in).

    Returns:
        The function and its label.

    Raises:
        ValueError: unknown name.
        TypeError: nothing of the kind, or something that is no elementwise function of its argument.

    Example:
        >>> function, label = resolve(("leaky_relu", {"negative_slope": 0.5}))
        >>> function(torch.tensor([-2.0, 2.0])), label
        (tensor([-1.,  2.]), 'leaky_relu(negative_slope=0.5)')

    References:
        None.
    """
    raw, label = lookup(activation)

    def function(z: Tensor) -> Tensor:
        # In-place activations write to their argument, random ones draw.
        with torch.no_grad(), torch.device("cpu"), torch.random.fork_rng(devices=[]):
            out = raw(z.clone())
        return _as_real(out, z, label)

    _require_elementwise(function, label)
    return function, label


def lookup(activation: Activation) -> tuple[Callable[..., Tensor], str]:
    """The raw function behind an activation (a float64 CPU copy of a module), and its label.

    Args:
        activation: as in `resolve`.

    Returns:
        The function, which may write to its argument or draw, and the label.

    Raises:
        ValueError: unknown name.
        TypeError: nothing of the kind, or a PReLU of several slopes.

    Example:
        >>> lookup("Swish")[1]
        'silu'

    References:
        None.
    """
    if isinstance(activation, str):
        name = canonical_name(activation)
        return ACTIVATIONS[name], name
    if isinstance(activation, nn.Module):
        _require_one_slope(activation)
        return copy.deepcopy(activation).double().cpu(), str(activation)
    if isinstance(activation, tuple) and len(activation) == 2 and isinstance(activation[0], str):
        name, keywords = canonical_name(activation[0]), dict(activation[1])
        listed = ", ".join(f"{k}={v}" for k, v in keywords.items())
        return (lambda z: ACTIVATIONS[name](z, **keywords)), f"{name}({listed})"
    if callable(activation):
        return activation, getattr(activation, "__name__", repr(activation))
    raise TypeError(
        f"an activation is a name, (name, keywords), a callable or a module, got {type(activation).__name__}"
    )


def _require_one_slope(module: nn.Module) -> None:
    if isinstance(module, nn.PReLU) and module.num_parameters > 1:
        raise TypeError(
            f"an activation must treat all entries alike, but PReLU has {module.num_parameters} slopes; "
            f"pass ('leaky_relu', {{'negative_slope': …}}) for the channel you mean"
        )


def _as_real(out: object, z: Tensor, label: str) -> Tensor:
    if not isinstance(out, Tensor) or out.shape != z.shape or out.is_complex():
        got = f"shape {tuple(out.shape)}, {out.dtype}" if isinstance(out, Tensor) else type(out).__name__
        raise TypeError(
            f"an activation must map each entry to one real number, but {label} turned shape "
            f"{tuple(z.shape)} into {got}; wrap it in a function that does"
        )
    return out.to(z.dtype)


def _require_elementwise(function: Function, label: str) -> None:
    z = torch.linspace(-3.0, 3.0, 61, dtype=torch.float64, device="cpu")
    whole, part = function(z), function(z[::3])
    # Vectorised and scalar code of one function may differ by some units in the last place of the dtype
    # it computes in, float32 at worst: 16 of them.
    scale = whole.abs().nan_to_num(0, 0, 0).amax().clamp_min(1e-300)
    same = torch.isclose(whole[::3] / scale, part / scale, rtol=0.0, atol=16 * 2.0**-23, equal_nan=True)
    if not bool(same.all()):
        raise TypeError(
            f"an activation must be a fixed function of one entry, but {label} gives z = "
            f"{z[::3][~same][0].item():g} different values in different company; if it draws random "
            f"numbers put it in eval mode, if it normalizes (softmax, LayerNorm) it has no gain"
        )
