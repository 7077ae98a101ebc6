"""Recurrent layers with LayerNorm inside: the network the first note is about."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from musigma.nn._layer_norm import LayerNorm
from musigma.nn._recurrent import Recurrent, State


class _LayerNormRecurrent(Recurrent):
    def _norm(
        self, name: str, features: int, device: torch.device | str | None, dtype: torch.dtype | None
    ) -> None:
        self.add_module(name, LayerNorm(features, self.eps, bias=self.bias, device=device, dtype=dtype))


class LayerNormLSTM(_LayerNormRecurrent):
    """LSTM whose summed inputs and cell are layer-normalized at every step.

        (i, f, g, o) = LN(W_ih·x) + LN(W_hh·h)
        c ← σ(f)·c + σ(i)·tanh(g),    h ← σ(o)·tanh(LN(c))

    Each LN has its own weight and bias and takes its statistics from the summed inputs of one example at one
    step. So there is nothing to keep per time step, sequences may be longer than any in training, and
    a batch of one is no special case, which is the first note's argument against BatchNorm here.

    Arguments, call and shapes are torch.nn.LSTM's, packed sequences included, and so are the names and shapes
    of the weights. The biases are the norms' (one before a norm would cancel).

    Args:
        input_size: features of x.
        hidden_size: features of c, and of h unless projected.
        num_layers: layers stacked on each other.
        bias: whether the norms have a bias.
        batch_first: whether input and output are (n, steps, features) instead of (steps, n, features).
        dropout: the probability with which an output of a layer but the last is dropped in training.
        bidirectional: whether a second set of weights reads the sequence backward.
        proj_size: features of h if it is projected, W_hr·h; 0 for no projection.
        device: where the parameters are made.
        dtype: of the parameters.
        eps: of the norms.

    Raises:
        ValueError: a size that is not positive, a projection that is not smaller than hidden_size, or a
            dropout that is no probability.

    Example:
        >>> import torch, musigma as ms
        >>> output, (h, c) = ms.nn.LayerNormLSTM(3, 5, num_layers=2)(torch.randn(7, 4, 3))
        >>> output.shape, h.shape, c.shape
        (torch.Size([7, 4, 5]), torch.Size([2, 4, 5]), torch.Size([2, 4, 5]))

    References:
        Ba, Kiros & Hinton 2016, "Layer Normalization", equations 20 to 22 of the supplement.
    """

    gates = 4
    state_names = ("h", "c")

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        eps: float = 1e-5,
    ) -> None:
        super().__init__(
            input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, proj_size,
            device, dtype, eps,
        )  # fmt: skip

    def _make_norms(self, suffix: str, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        self._norm(f"norm_ih{suffix}", 4 * self.hidden_size, device, dtype)
        self._norm(f"norm_hh{suffix}", 4 * self.hidden_size, device, dtype)
        self._norm(f"norm_cell{suffix}", self.hidden_size, device, dtype)

    def _inputs(self, projected: Tensor, suffix: str) -> Tensor:
        return getattr(self, f"norm_ih{suffix}")(projected)

    def _step(self, inputs: Tensor, state: State, suffix: str, t: int) -> State:
        gates = inputs + getattr(self, f"norm_hh{suffix}")(self._recurrent(state, suffix))
        i, f, g, o = gates.chunk(4, -1)
        c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
        h = o.sigmoid() * getattr(self, f"norm_cell{suffix}")(c).tanh()
        return (F.linear(h, getattr(self, f"weight_hr{suffix}")) if self.proj_size else h), c


class LayerNormGRU(_LayerNormRecurrent):
    """GRU whose summed inputs are layer-normalized at every step.

        (r, z) = LN(W_ih·x) + LN(W_hh·h),    n = tanh(LN(W_in·x) + σ(r)·LN(W_hn·h))
        h ← (1 − σ(z))·n + σ(z)·h

    The gates r and z share a norm, the candidate n has its own. The order of the gates and the sense of z are
    torch.nn.GRU's (the paper's z is 1 − z here). Arguments, call, shapes and weights are torch.nn.GRU's.

    Args:
        input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, device, dtype, eps: as
            in `LayerNormLSTM`.

    Raises:
        ValueError: as in `LayerNormLSTM`.

    Example:
        >>> import torch, musigma as ms
        >>> output, h = ms.nn.LayerNormGRU(3, 5, bidirectional=True)(torch.randn(7, 4, 3))
        >>> output.shape, h.shape
        (torch.Size([7, 4, 10]), torch.Size([2, 4, 5]))

    References:
        Ba, Kiros & Hinton 2016, "Layer Normalization", supplement, the GRU's equations.
    """

    gates = 3

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        eps: float = 1e-5,
    ) -> None:
        super().__init__(
            input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, 0,
            device, dtype, eps,
        )  # fmt: skip

    def _make_norms(self, suffix: str, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        self._norm(f"norm_ih{suffix}", 2 * self.hidden_size, device, dtype)
        self._norm(f"norm_hh{suffix}", 2 * self.hidden_size, device, dtype)
        self._norm(f"norm_in{suffix}", self.hidden_size, device, dtype)
        self._norm(f"norm_hn{suffix}", self.hidden_size, device, dtype)

    def _normalized(self, projected: Tensor, source: str, suffix: str) -> tuple[Tensor, Tensor]:
        """The gates' summed inputs and the candidate's, each under its norm."""
        gates, candidate = projected.split([2 * self.hidden_size, self.hidden_size], -1)
        return (
            getattr(self, f"norm_{source}h{suffix}")(gates),
            getattr(self, f"norm_{source}n{suffix}")(candidate),
        )

    def _inputs(self, projected: Tensor, suffix: str) -> Tensor:
        return torch.cat(self._normalized(projected, "i", suffix), -1)

    def _step(self, inputs: Tensor, state: State, suffix: str, t: int) -> State:
        gates_x, candidate_x = inputs.split([2 * self.hidden_size, self.hidden_size], -1)
        gates_h, candidate_h = self._normalized(self._recurrent(state, suffix), "h", suffix)
        r, z = (gates_x + gates_h).sigmoid().chunk(2, -1)
        n = (candidate_x + r * candidate_h).tanh()
        return ((1 - z) * n + z * state[0],)


class LayerNormRNN(_LayerNormRecurrent):
    """Elman RNN whose summed inputs are layer-normalized at every step: the first note's own example.

        a = W_ih·x + W_hh·h,    h ← f(LN(a)),    LN(a) = weight/σ · (a − μ) + bias

    Args:
        input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, device, dtype, eps: as
            in `LayerNormLSTM`.
        nonlinearity: f, ``"tanh"`` or ``"relu"``.

    Raises:
        ValueError: another nonlinearity; else as in `LayerNormLSTM`.

    Example:
        >>> import torch, musigma as ms
        >>> output, h = ms.nn.LayerNormRNN(3, 5, batch_first=True)(torch.randn(4, 7, 3))
        >>> torch.equal(output[:, -1], h[0])
        True

    References:
        Ba, Kiros & Hinton 2016, "Layer Normalization", equation 4.
    """

    gates = 1

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        nonlinearity: str = "tanh",
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        eps: float = 1e-5,
    ) -> None:
        if nonlinearity not in ("tanh", "relu"):
            raise ValueError(f"Unknown nonlinearity '{nonlinearity}'. Select from 'tanh' or 'relu'.")
        super().__init__(
            input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, 0,
            device, dtype, eps,
        )  # fmt: skip
        self.nonlinearity = nonlinearity

    def _make_norms(self, suffix: str, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        self._norm(f"norm{suffix}", self.hidden_size, device, dtype)

    def _inputs(self, projected: Tensor, suffix: str) -> Tensor:
        return projected

    def _step(self, inputs: Tensor, state: State, suffix: str, t: int) -> State:
        a = getattr(self, f"norm{suffix}")(inputs + self._recurrent(state, suffix))
        return (a.tanh() if self.nonlinearity == "tanh" else a.relu(),)
