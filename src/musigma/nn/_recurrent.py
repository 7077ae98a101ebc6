"""What the recurrent layers share: torch.nn.LSTM's calls and shapes around a step that normalizes."""

from __future__ import annotations

import math
import warnings
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from musigma._errors import MusigmaWarning

State = tuple[Tensor, ...]


class Recurrent(nn.Module):
    """Layers and directions, initial and final states, batches, dropout, packed sequences.

    A subclass says how many `gates` its weights stack, what a state is made of (`state_names`), and gives
    `_make_norms`, `_inputs` and `_step`. Parameters are named as in torch.nn.LSTM: ``weight_ih_l0``,
    ``weight_hh_l0_reverse`` and so on.
    """

    gates: ClassVar[int]
    state_names: ClassVar[tuple[str, ...]] = ("h",)

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int,
        bias: bool,
        batch_first: bool,
        dropout: float,
        bidirectional: bool,
        proj_size: int,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        eps: float,
    ) -> None:
        super().__init__()
        _check_sizes(input_size, hidden_size, num_layers, dropout, proj_size)
        self.input_size = input_size
        self.hidden_size = hidden_size
        self.num_layers = num_layers
        self.bias = bias
        self.batch_first = batch_first
        self.dropout = dropout
        self.bidirectional = bidirectional
        self.proj_size = proj_size
        self.eps = eps
        for suffix, width in self._cells():
            shapes = {
                "weight_ih": (self.gates * hidden_size, width),
                "weight_hh": (self.gates * hidden_size, self._out_size),
            }
            if proj_size:
                shapes["weight_hr"] = (proj_size, hidden_size)
            for name, shape in shapes.items():
                weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
                self.register_parameter(f"{name}{suffix}", weight)
            self._make_norms(suffix, device, dtype)
        self.reset_parameters()

    @property
    def _out_size(self) -> int:
        return self.proj_size or self.hidden_size

    @property
    def _directions(self) -> int:
        return 2 if self.bidirectional else 1

    def _cells(self) -> list[tuple[str, int]]:
        """The parameters' suffix and the input width of each layer and direction, in torch's order."""
        return [
            (f"_l{layer}{way}", self.input_size if layer == 0 else self._out_size * self._directions)
            for layer in range(self.num_layers)
            for way in ("", "_reverse")[: self._directions]
        ]

    def reset_parameters(self) -> None:
        """Weights uniform in ±1/√hidden_size, as torch.nn.LSTM's; norms as they start (weight 1, bias 0)."""
        bound = 1 / math.sqrt(self.hidden_size)
        for weight in self._parameters.values():
            if weight is not None:
                nn.init.uniform_(weight, -bound, bound)
        for norm in self.children():
            norm.reset_parameters()  # type: ignore[operator]  # every child is a norm

    def _make_norms(self, suffix: str, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        """Register the norms of one layer and direction."""
        raise NotImplementedError

    def _inputs(self, projected: Tensor, suffix: str) -> Tensor:
        """What comes of W_ih·x before the loop, all steps at once: (steps, n, gates·hidden_size)."""
        raise NotImplementedError

    def _step(self, inputs: Tensor, state: State, suffix: str, t: int) -> State:
        """The state after one step, from the step's `_inputs` and the state before it."""
        raise NotImplementedError

    def _recurrent(self, state: State, suffix: str) -> Tensor:
        return F.linear(state[0], getattr(self, f"weight_hh{suffix}"))

    def forward(
        self, input: Tensor | PackedSequence, hx: Tensor | tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor | PackedSequence, Tensor | tuple[Tensor, ...]]:
        """Run over the sequences, with the arguments, shapes and results of torch.nn.LSTM, GRU or RNN.

        Args:
            input: (steps, n, input_size), (n, steps, input_size) if batch_first, (steps, input_size) for one
                sequence, or a PackedSequence of sequences of several lengths.
            hx: the initial state, (num_layers·directions, n, size), zero if None; for an LSTM a pair (h, c).

        Returns:
            (output, state): the last layer's h at every step, in the form the input came in, and every
            layer's state after its last step, in the form of `hx`.

        Raises:
            ValueError: the input has another number of dims than 2 or 3.
            RuntimeError: its last dim is not input_size, or a state has another shape.
        """
        packed = input if isinstance(input, PackedSequence) else None
        if isinstance(input, PackedSequence):
            x, lengths = pad_packed_sequence(input)
        else:
            x, lengths = input, None
        single = x.dim() == 2
        self._check_input(x)
        if single:
            x = x.unsqueeze(1)
        elif self.batch_first and packed is None:
            x = x.transpose(0, 1)
        keep = None if lengths is None else _valid(x, lengths)
        output, final = self._layers(x, self._initial(x, hx, single), keep)
        result: Tensor | PackedSequence = output
        if packed is not None and lengths is not None:
            result = pack_padded_sequence(output, lengths, enforce_sorted=packed.sorted_indices is None)
        elif single:
            result = output.squeeze(1)
        elif self.batch_first:
            result = output.transpose(0, 1)
        if single:
            final = tuple(s.squeeze(1) for s in final)
        return result, final if len(final) > 1 else final[0]

    def _layers(self, x: Tensor, state: State, keep: Tensor | None) -> tuple[Tensor, State]:
        finals: list[State] = []
        for layer in range(self.num_layers):
            outputs: list[Tensor] = []
            for direction in range(self._directions):
                start = tuple(s[layer * self._directions + direction] for s in state)
                suffix = f"_l{layer}{'_reverse' if direction else ''}"
                output, final = self._scan(x, start, suffix, keep, reverse=direction == 1)
                outputs.append(output)
                finals.append(final)
            x = torch.cat(outputs, -1) if len(outputs) > 1 else outputs[0]
            if self.dropout and layer < self.num_layers - 1:
                x = F.dropout(x, self.dropout, self.training)
        return x, tuple(torch.stack(parts) for parts in zip(*finals, strict=True))

    def _scan(
        self, x: Tensor, state: State, suffix: str, keep: Tensor | None, *, reverse: bool
    ) -> tuple[Tensor, State]:
        """One layer in one direction. Where a sequence is over (`keep` false), its state stands still."""
        inputs = self._inputs(F.linear(x, getattr(self, f"weight_ih{suffix}")), suffix)
        outputs: list[Tensor] = []
        for t in range(x.shape[0]):
            position = x.shape[0] - 1 - t if reverse else t
            new = self._step(inputs[position], state, suffix, t)
            if keep is not None:
                new = tuple(torch.where(keep[position], n, s) for n, s in zip(new, state, strict=True))
            state = new
            outputs.append(state[0])
        if not outputs:
            return x.new_zeros(0, x.shape[1], self._out_size), state
        return torch.stack(outputs[::-1] if reverse else outputs), state

    def _initial(self, x: Tensor, hx: Tensor | tuple[Tensor, Tensor] | None, single: bool) -> State:
        sizes = {"h": self._out_size, "c": self.hidden_size}
        shapes = [(self.num_layers * self._directions, x.shape[1], sizes[s]) for s in self.state_names]
        if hx is None:
            return tuple(x.new_zeros(shape) for shape in shapes)
        given = (hx,) if isinstance(hx, Tensor) else tuple(hx)
        if len(given) != len(shapes):
            wanted = " and ".join(self.state_names)
            raise RuntimeError(f"{type(self).__name__}'s state is {wanted}, got {len(given)} tensors")
        if single:
            if any(s.dim() != 2 for s in given):
                raise RuntimeError(
                    f"For unbatched 2-D input, hx should also be 2-D but got {given[0].dim()}-D tensor"
                )
            given = tuple(s.unsqueeze(1) for s in given)
        for i, (s, shape) in enumerate(zip(given, shapes, strict=True)):
            if s.shape != shape:
                raise RuntimeError(f"Expected hidden[{i}] size {shape}, got {list(s.shape)}")
        return given

    def _check_input(self, x: Tensor) -> None:
        if x.dim() not in (2, 3):
            raise ValueError(f"{type(self).__name__}: Expected input to be 2D or 3D, got {x.dim()}D instead")
        if x.shape[-1] != self.input_size:
            raise RuntimeError(
                f"input.size(-1) must be equal to input_size. Expected {self.input_size}, got {x.shape[-1]} "
                f"in an input of shape {tuple(x.shape)}"
            )

    def extra_repr(self) -> str:
        defaults = {
            "num_layers": 1, "bias": True, "batch_first": False, "dropout": 0.0, "bidirectional": False,
            "proj_size": 0,
        }  # fmt: skip
        changed = [f"{k}={getattr(self, k)}" for k, v in defaults.items() if getattr(self, k) != v]
        return ", ".join([f"{self.input_size}, {self.hidden_size}", *changed])


def _check_sizes(input_size: int, hidden_size: int, num_layers: int, dropout: float, proj_size: int) -> None:
    for name, value in (("input_size", input_size), ("hidden_size", hidden_size), ("num_layers", num_layers)):
        if value < 1:
            raise ValueError(f"{name} must be greater than zero, got {value}")
    if not 0 <= proj_size < hidden_size:
        raise ValueError(
            f"proj_size has to be smaller than hidden_size ({hidden_size}) and not negative, got {proj_size}"
        )
    if not 0 <= dropout <= 1:
        raise ValueError(f"dropout should be a number in range [0, 1], got {dropout}")
    if dropout > 0 and num_layers == 1:
        warnings.warn(
            f"dropout acts after all but the last recurrent layer, so dropout={dropout} does nothing with "
            "num_layers=1",
            MusigmaWarning,
            stacklevel=4,
        )


def _valid(x: Tensor, lengths: Tensor) -> Tensor:
    """Where a step belongs to its sequence: (steps, n, 1)."""
    steps = torch.arange(x.shape[0], device=x.device)
    return (steps[:, None] < lengths.to(x.device)[None]).unsqueeze(-1)
