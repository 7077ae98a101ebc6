"""Biases that let a recurrent network remember from the first step on."""

from collections.abc import Iterator

from torch import Tensor, nn

from musigma.init._packing import gate_names


def lstm_forget_bias_(module: nn.Module, value: float = 1.0) -> nn.Module:
    """Set the bias of every LSTM's forget gate, so that the cell keeps its content at the start.

    PyTorch adds two biases, b_ih and b_hh: one gets the value, the other 0, in every layer and direction.
    The other gates are left alone.

    Law: b_ih + b_hh = value in the forget block, so σ(value) of the cell is kept per step (0.73 at 1).

    Args:
        module: an LSTM, an LSTMCell, one of `musigma.nn`'s LSTMs (whose biases are their norms'), or a model
            that contains some.
        value: the effective bias.

    Returns:
        module, changed in place. LSTMs without biases stay as they are.

    Raises:
        ValueError: there is no LSTM in the module.

    Example:
        >>> import torch, musigma as ms
        >>> lstm = ms.init.lstm_forget_bias_(torch.nn.LSTM(4, 3, num_layers=2, bidirectional=True))
        >>> (lstm.bias_ih_l1_reverse + lstm.bias_hh_l1_reverse)[3:6].tolist()
        [1.0, 1.0, 1.0]

    References:
        Gers, Schmidhuber & Cummins 2000; Jozefowicz, Zaremba & Sutskever 2015.
    """
    return _set_gate(module, "LSTM", "forget", value)


def gru_update_bias_(module: nn.Module, value: float = 1.0) -> nn.Module:
    """Set the bias of every GRU's update gate, the counterpart of an LSTM's forget gate.

    PyTorch's GRU computes h' = (1 − z)·n + z·h: a *positive* bias of z keeps the old state. (Papers and
    libraries that write (1 − z)·h + z·n need the negative of it.)

    Law: b_ih + b_hh = value in the update block, so σ(value) of the state is kept per step.

    Args:
        module: a GRU, a GRUCell, musigma's LayerNormGRU, or a model that contains some.
        value: the effective bias.

    Returns:
        module, changed in place. GRUs without biases stay as they are.

    Raises:
        ValueError: there is no GRU in the module.

    Example:
        >>> import torch, musigma as ms
        >>> gru = ms.init.gru_update_bias_(torch.nn.GRUCell(4, 2), 2.0)
        >>> (gru.bias_ih + gru.bias_hh)[2:4].tolist()
        [2.0, 2.0]

    References:
        Cho et al. 2014, eq. 7; Tallec & Ollivier 2018 (why a gate's bias is a time scale).
    """
    return _set_gate(module, "GRU", "update", value)


def _set_gate(module: nn.Module, kind: str, gate: str, value: float) -> nn.Module:
    found = [m for m in module.modules() if gate in gate_names(m)]
    if not found:
        raise ValueError(
            f"the module must be or contain at least one {kind}, but {type(module).__name__} has none"
        )
    for recurrent in found:
        for name, bias in _biases(recurrent):
            # The sum is what counts: the value goes into one of the two, once.
            size = int(recurrent.hidden_size)  # type: ignore[arg-type]
            start = gate_names(recurrent).index(gate) * size
            bias.detach()[start : start + size].fill_(value if name.endswith("ih") else 0.0)
    return module


def _biases(recurrent: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """("bias_ih" or "bias_hh", the tensor) for every layer and direction."""
    for name, tensor in recurrent.named_parameters():
        # A layer with norms inside has its biases there: norm_ih_l0.bias.
        if name.startswith(("bias_ih", "bias_hh")):
            yield name[:7], tensor
        elif name.startswith(("norm_ih", "norm_hh")) and name.endswith(".bias"):
            yield "bias" + name[4:7], tensor
