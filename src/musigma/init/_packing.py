"""Tensors that hold several weight matrices stacked along their first dimension."""

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from musigma.nn import BatchNormLSTM, LayerNormGRU, LayerNormLSTM

# PyTorch's documented orders of the stacked pieces; musigma's own layers keep them.
_RECURRENT_GATES: tuple[tuple[tuple[type[nn.Module], ...], tuple[str, ...]], ...] = (
    ((nn.LSTM, nn.LSTMCell, LayerNormLSTM, BatchNormLSTM), ("input", "forget", "cell", "output")),
    ((nn.GRU, nn.GRUCell, LayerNormGRU), ("reset", "update", "new")),
)
_ATTENTION_PROJECTIONS = ("query", "key", "value")


def gate_names(module: nn.Module) -> tuple[str, ...]:
    """Names of the gates that an LSTM's or a GRU's tensors stack, in PyTorch's order; () for all others.

    Args:
        module: any module; cells count too.

    Returns:
        The names, first block first.

    Example:
        >>> gate_names(nn.GRU(2, 3))
        ('reset', 'update', 'new')

    References:
        Hochreiter & Schmidhuber 1997; Gers et al. 2000 (forget gate); Cho et al. 2014.
    """
    for types, names in _RECURRENT_GATES:
        if isinstance(module, types):
            return names
    return ()


def part_names(module: nn.Module, name: str) -> tuple[str, ...]:
    """Names of the equal pieces stacked along dim 0 of a parameter; () when it holds one matrix.

    Args:
        module: the module that owns the parameter.
        name: the parameter's name inside that module.

    Returns:
        One name a piece, first piece first.

    Example:
        >>> part_names(nn.MultiheadAttention(4, 2), "in_proj_weight")
        ('query', 'key', 'value')

    References:
        torch.nn documentation of LSTM, GRU, MultiheadAttention and the convolutions.
    """
    if isinstance(module, nn.MultiheadAttention) and name in ("in_proj_weight", "in_proj_bias"):
        return _ATTENTION_PROJECTIONS
    if name.startswith(("weight_ih", "weight_hh", "bias_ih", "bias_hh")):
        return gate_names(module)
    if isinstance(module, nn.modules.conv._ConvNd) and name == "weight" and module.groups > 1:
        return tuple(f"group{i}" for i in range(module.groups))
    return ()


def blocks(module: nn.Module, name: str = "weight") -> dict[str, Tensor]:
    """Views of the matrices that one parameter stacks, so that each can be initialized by itself.

    Formula: W = [W₁; W₂; …] along dim 0, with as many rows each.

    Args:
        module: the module that owns the parameter.
        name: the parameter's name inside that module.

    Returns:
        Piece name → view (writing to it writes to the parameter): the projections of a packed attention
        weight, the gates of an LSTM or GRU, the groups of a convolution. A parameter that holds one
        matrix comes back whole, under its own name.

    Raises:
        AttributeError: the module has no tensor of that name.
        ValueError: the tensor is computed by a parametrization, so that writing to it has no effect.

    Example:
        >>> import torch, musigma as ms
        >>> attention = torch.nn.MultiheadAttention(8, 2)
        >>> {k: tuple(v.shape) for k, v in ms.init.blocks(attention, "in_proj_weight").items()}
        {'query': (8, 8), 'key': (8, 8), 'value': (8, 8)}

    References:
        torch.nn documentation of LSTM, GRU, MultiheadAttention and the convolutions.
    """
    if is_parametrized(module, name):
        raise ValueError(
            f"{name!r} of {type(module).__name__} must be a parameter, but a parametrization computes it; "
            f"write to parametrizations.{name}, or take the parametrization off first"
        )
    tensor = own_tensor(module, name).detach()
    names = part_names(module, name)
    if not names:
        return {name: tensor}
    rows = tensor.shape[0] // len(names)
    return {part: tensor.narrow(0, i * rows, rows) for i, part in enumerate(names)}


def own_tensor(module: nn.Module, name: str) -> Tensor:
    """The tensor that a module holds under a name.

    Args:
        module: the module to look in.
        name: an attribute of it.

    Returns:
        The tensor itself (for a parametrized weight, the computed one).

    Raises:
        AttributeError: there is no tensor of that name; the message lists those there are.

    Example:
        >>> tuple(own_tensor(nn.Linear(2, 3), "weight").shape)
        (3, 2)

    References:
        None.
    """
    tensor = getattr(module, name, None)
    if isinstance(tensor, Tensor):
        return tensor
    names = [n for n, p in module.named_parameters(recurse=False) if p is not None]
    hint = f"try one of {names}" if names else "it has no parameters of its own; pass one of its children"
    raise AttributeError(f"{type(module).__name__} must have a tensor named {name!r}, but has none; {hint}")
