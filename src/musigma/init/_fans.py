"""How many inputs and outputs one weight really connects."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.parametrize import is_parametrized

from musigma.init._packing import gate_names, own_tensor, part_names

_CONVOLUTION = nn.modules.conv._ConvNd
_TRANSPOSED = nn.modules.conv._ConvTransposeNd
_PACKED = (nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)
_PACKED_WEIGHTS = ("weight_", "in_proj_", "q_proj_", "k_proj_", "v_proj_")


class Fans(NamedTuple):
    """Connections into one output (`fan_in`) and out of one input (`fan_out`) of a layer.

    Both are *effective*: they make Var(z) = fan_in·Var(W)·E[a²] and its backward twin
    Var(∂a) = fan_out·Var(W)·E[∂z²] true on average over positions, so a stride can make them fractions.

    Example:
        >>> import torch, musigma as ms
        >>> ms.init.Fans(3, 4).fan_out
        4
    """

    fan_in: float | int
    fan_out: float | int


FansLike = Fans | tuple[float | int, float | int]


def fans(module_or_weight: nn.Module | Tensor, name: str = "weight") -> Fans:
    """The effective fan-in and fan-out of a weight, as the layer that owns it uses it.

    Law: Var(z) = fan_in·Var(W)·E[a²] forward, Var(∂L/∂a) = fan_out·Var(W)·E[(∂L/∂z)²] backward.
    With K = Π kernel_size, S = Π stride:

    - Linear (o, i): i, o. Bilinear (o, i₁, i₂): i₁·i₂, o·i₂ (gradient of the first input).
    - Conv (o, i/g, k…): i/g·K, o/g·K/S. ConvTranspose (i, o/g, k…): i/g·K/S, o/g·K.
    - Embedding, EmbeddingBag (n, d): 1, d (a look-up adds up one row).
    - RNN, LSTM, GRU and their cells: per gate. MultiheadAttention: per projection.
    - everything else, and a tensor alone: as torch counts, shape[1]·Π shape[2:] and shape[0]·Π shape[2:].

    Borders (padding) are left out: they touch a vanishing share of the positions.

    Args:
        module_or_weight: a layer, a model together with a dotted `name`, or a bare weight of at least
            two dimensions (o, i, k…).
        name: which tensor of the module.

    Returns:
        The two fans; whole numbers stay ints.

    Raises:
        ValueError: the tensor has fewer than two dimensions, or is not initialized yet (lazy modules).
        AttributeError: the module has no such tensor.

    Example:
        >>> import torch, musigma as ms
        >>> ms.init.fans(torch.nn.Conv2d(8, 8, 3, groups=8))            # depthwise: torch counts fan_out = 72
        Fans(fan_in=9, fan_out=9)
        >>> ms.init.fans(torch.nn.ConvTranspose2d(16, 4, 4, stride=2))
        Fans(fan_in=64, fan_out=64)
        >>> ms.init.fans(torch.nn.MultiheadAttention(6, 2), "in_proj_weight")
        Fans(fan_in=6, fan_out=6)

    References:
        Glorot & Bengio 2010, eq. 5 and 6; He et al. 2015, eq. 7 and 14; tensorflow/tensorflow#31192
        (transposed layers); pytorch/pytorch#166378 (packed projections).
    """
    if isinstance(module_or_weight, nn.Module):
        path, _, leaf = name.rpartition(".")
        owner = module_or_weight.get_submodule(path)
        return layer_fans(owner, leaf, _shaped_like(owner, leaf))
    if isinstance(module_or_weight, Tensor):
        return _tensor_fans(module_or_weight, "the tensor")
    raise TypeError(f"fans needs a module or a tensor, got {type(module_or_weight).__name__}")


def layer_fans(module: nn.Module, name: str, weight: Tensor) -> Fans:
    """The fans of a weight, given the layer that uses it under a name.

    Args:
        module: the layer.
        name: what it calls the weight.
        weight: the weight, or a tensor of its shape.

    Returns:
        The effective fans.

    Raises:
        ValueError: fewer than two dimensions, or no shape yet.

    Example:
        >>> layer_fans(nn.GRUCell(2, 3), "weight_ih", nn.GRUCell(2, 3).weight_ih)
        Fans(fan_in=2, fan_out=3)

    References:
        None.
    """
    count = _tensor_fans(weight, f"{name!r} of {type(module).__name__}")
    if (isinstance(module, _PACKED) or gate_names(module)) and name.startswith(_PACKED_WEIGHTS):
        return Fans(weight.shape[1], weight.shape[0] // max(1, len(part_names(module, name))))
    if name != "weight":
        return count
    if isinstance(module, _CONVOLUTION):
        return _convolution_fans(module)
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return Fans(1, weight.shape[1])
    if _is_transposed_linear(module):
        return Fans(weight.shape[0], weight.shape[1])
    return count


def _shaped_like(module: nn.Module, name: str) -> Tensor:
    """A tensor as large as a module's, without computing a parametrized one (which can have effects)."""
    if is_parametrized(module, name):
        return max(
            module.get_submodule(f"parametrizations.{name}").parameters(recurse=False), key=torch.numel
        )
    return own_tensor(module, name)


def _tensor_fans(weight: Tensor, what: str) -> Fans:
    if isinstance(weight, UninitializedParameter):
        raise ValueError(f"{what} has no shape yet; run one batch through the model before you initialize it")
    if weight.dim() < 2:
        raise ValueError(
            f"Fan in and fan out can not be computed for tensor with fewer than 2 dimensions: {what} has "
            f"shape {tuple(weight.shape)}; a bias or a norm's weight needs another scheme (zeros_, ones_)"
        )
    kernel = math.prod(weight.shape[2:])
    return Fans(weight.shape[1] * kernel, weight.shape[0] * kernel)


def _convolution_fans(module: nn.modules.conv._ConvNd) -> Fans:
    kernel, stride = math.prod(module.kernel_size), math.prod(module.stride)
    taps_in = module.in_channels // module.groups * kernel
    taps_out = module.out_channels // module.groups * kernel
    # A strided convolution skips inputs: each is read by 1/stride of the taps, averaged over positions.
    # A transposed one leaves gaps between its inputs: each output adds up 1/stride of the taps.
    if isinstance(module, _TRANSPOSED):
        return Fans(_divide(taps_in, stride), taps_out)
    return Fans(taps_in, _divide(taps_out, stride))


def _divide(count: int, by: int) -> float | int:
    return count // by if count % by == 0 else count / by


def _is_transposed_linear(module: nn.Module) -> bool:
    """Whether this is transformers' `Conv1D`: a linear layer that keeps its weight as (in, out)."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf") and not hasattr(module, "kernel_size")
