"""LSTM with BatchNorm inside, which needs statistics of their own for every time step."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from musigma.functional import batch_norm
from musigma.nn._recurrent import Recurrent, State
from musigma.nn._statistics import KeepsStatistics


class StepBatchNorm(KeepsStatistics):
    """BatchNorm1d with one weight and bias and, for each time step, running statistics of its own.

    Args:
        num_features: c.
        max_steps: for how many time steps statistics are kept; later steps use the last one's.
        weight: what the weight starts from.
        bias: whether there is a bias.
        eps: added to the variance.
        momentum: the weight of the new value; None for the plain average.
        device: where parameters and buffers are made.
        dtype: of the parameters, and of the buffers unless it is narrower than float32.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(
        self,
        num_features: int,
        max_steps: int,
        *,
        weight: float = 1.0,
        bias: bool = True,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.momentum = momentum
        self._start = weight
        self.weight = nn.Parameter(torch.empty(num_features, device=device, dtype=dtype))
        self.register_parameter("bias", nn.Parameter(torch.empty_like(self.weight)) if bias else None)
        shape = (max_steps, num_features)
        self.register_buffer("running_mean", torch.empty(shape, device=device, dtype=dtype))
        self.register_buffer("running_var", torch.empty(shape, device=device, dtype=dtype))
        self.register_buffer("num_batches_tracked", torch.empty(max_steps, dtype=torch.long, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The weight at its start, the bias 0, no batch seen."""
        nn.init.constant_(self.weight, self._start)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
        self.running_mean.zero_()
        self.running_var.fill_(1)
        self.num_batches_tracked.zero_()

    def forward(self, input: Tensor, step: int) -> Tensor:
        """(n, c) normalized by the batch's statistics, or in evaluation by those kept for `step`."""
        kept = min(step, self.running_mean.shape[0] - 1)
        return batch_norm(
            input,
            self.running_mean[kept],
            self.running_var[kept],
            self.weight,
            self.bias,
            self.training,
            self.momentum,
            self.eps,
            num_batches_tracked=self.num_batches_tracked[kept],
        )

    def extra_repr(self) -> str:
        max_steps, num_features = self.running_mean.shape
        return f"{num_features}, max_steps={max_steps}, eps={self.eps}, momentum={self.momentum}"


class BatchNormLSTM(Recurrent):
    """LSTM whose summed inputs and cell are batch-normalized, with statistics per time step.

        (i, f, g, o) = BN_t(W_ih·x) + BN_t(W_hh·h)
        c ← σ(f)·c + σ(i)·tanh(g),    h ← σ(o)·tanh(BN_t(c))

    The summed inputs of a recurrent net have another distribution at every step: h starts at zero and grows
    into its range. One set of running statistics for all steps describes none of them, and evaluation then
    computes another function than training did. So each of the first `max_steps` steps has its own, and later
    ones use the last. `LayerNormLSTM` needs none of this, and no batch.

    Weights start at 0.1 (so that tanh is not saturated), and W_ih's norm has the only bias of the gates, as
    in the paper. All sequences of a batch must have one length: with packed sequences the last steps would
    be normalized over the few that are left.

    Args:
        input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, device, dtype, eps: as
            in `LayerNormLSTM`.
        max_steps: for how many time steps statistics are kept: the length of the longest sequence trained on.
        momentum: the weight of the new value in the running statistics; None for the plain average.

    Raises:
        ValueError: max_steps is not positive; else as in `LayerNormLSTM`.

    Example:
        >>> import torch, musigma as ms
        >>> lstm = ms.nn.BatchNormLSTM(3, 5, max_steps=7)
        >>> output, (h, c) = lstm(torch.randn(7, 4, 3))
        >>> lstm.norm_cell_l0.running_var.shape
        torch.Size([7, 5])

    References:
        Cooijmans et al. 2017, "Recurrent Batch Normalization", equations 6 to 8 and section 4.
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
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        max_steps: int,
        momentum: float | None = 0.1,
        eps: float = 1e-5,
    ) -> None:
        if max_steps < 1:
            raise ValueError(f"max_steps must be greater than zero, got {max_steps}")
        # read by _make_norms, which the constructor below calls
        self.max_steps = max_steps
        self.momentum = momentum
        super().__init__(
            input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, 0,
            device, dtype, eps,
        )  # fmt: skip

    def _make_norms(self, suffix: str, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        for name, features, bias in (
            ("norm_ih", 4 * self.hidden_size, self.bias),
            ("norm_hh", 4 * self.hidden_size, False),
            ("norm_cell", self.hidden_size, self.bias),
        ):
            norm = StepBatchNorm(
                features, self.max_steps, weight=0.1, bias=bias, eps=self.eps, momentum=self.momentum,
                device=device, dtype=dtype,
            )  # fmt: skip
            self.add_module(f"{name}{suffix}", norm)

    def forward(
        self, input: Tensor | PackedSequence, hx: Tensor | tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor | PackedSequence, Tensor | tuple[Tensor, ...]]:
        """Run over the sequences, as torch.nn.LSTM does.

        Args:
            input: (steps, n, input_size), or (n, steps, input_size) if batch_first.
            hx: the initial state (h, c), each (num_layers·directions, n, hidden_size); zero if None.

        Returns:
            (output, (h, c)): the last layer's h at every step, and every layer's last state.

        Raises:
            TypeError: a PackedSequence.
            ValueError: training on a batch of one; another number of dims than 2 or 3.
            RuntimeError: the last dim is not input_size, or a state has another shape.
        """
        if isinstance(input, PackedSequence):
            raise TypeError(
                "BatchNormLSTM normalizes each step over the batch, which in a PackedSequence shrinks "
                "towards its end; give it sequences of one length, or use LayerNormLSTM"
            )
        return super().forward(input, hx)

    def _inputs(self, projected: Tensor, suffix: str) -> Tensor:
        return projected  # normalized step by step

    def _step(self, inputs: Tensor, state: State, suffix: str, t: int) -> State:
        gates = getattr(self, f"norm_ih{suffix}")(inputs, t)
        gates = gates + getattr(self, f"norm_hh{suffix}")(self._recurrent(state, suffix), t)
        i, f, g, o = gates.chunk(4, -1)
        c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
        return o.sigmoid() * getattr(self, f"norm_cell{suffix}")(c, t).tanh(), c
