"""What a cell runs: musigma's function and what a torch user writes in its place, on the same tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from musigma import functional
from musigma.lab.bench._cell import ROWS, Cell

Library = Literal["ours", "torch"]
Outputs = tuple[Tensor, ...]

EPS = 1e-5
_ACTIVATIONS: dict[str | None, Callable[[Tensor], Tensor]] = {
    None: lambda y: y,
    # In place where models do it so (torchvision's ResNet): a peer is to be as fast as it is in use
    "relu": lambda y: F.relu(y, inplace=True),
    "silu": F.silu,
    "gelu": F.gelu,
}


@dataclass(frozen=True)
class Function:
    """A function of the cell's leaves, and the running statistics that it updates."""

    call: Callable[..., Outputs]
    running: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class Inputs:
    """What a cell's functions take: the leaves, with x first, and a gradient for every output."""

    leaves: tuple[Tensor, ...]
    gradients: tuple[Tensor, ...]

    @property
    def x(self) -> Tensor:
        """The tensor to normalize."""
        return self.leaves[0]


def inputs(cell: Cell, seed: int = 0) -> Inputs:
    """Draw them: mean 0.5, spread 1, weights around 1.

    Weights are float32 beside BatchNorm (as under autocast) and in the input's type elsewhere.
    """
    generator = torch.Generator().manual_seed(seed)

    def tensor(shape: tuple[int, ...], dtype: torch.dtype, mean: float = 0.0) -> Tensor:
        values = torch.randn(shape, generator=generator).add_(mean).to(dtype)
        if cell.channels_last and len(shape) > 1:
            values = values.contiguous(memory_format=_LAST[len(shape)])
        return values

    x = tensor(cell.shape, cell.torch_dtype, 0.5)
    full = [x, tensor(cell.shape, cell.torch_dtype)] if cell.residual else [x]
    width = (cell.shape[-1 if cell.op in ROWS else 1],)
    dtype = torch.float32 if cell.op.startswith("batch_norm") else cell.torch_dtype
    parameters = [tensor(width, dtype, 1.0)]
    if "rms_norm" not in cell.op:
        parameters.append(tensor(width, dtype))
    leaves = tuple(leaf.requires_grad_() for leaf in (*full, *parameters))
    outputs = 2 if cell.op.startswith("add_") else 1
    return Inputs(leaves, tuple(tensor(cell.shape, cell.torch_dtype) for _ in range(outputs)))


_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def function(cell: Cell, library: Library, dtype: torch.dtype = torch.float32) -> Function:
    """The cell's function in one of the two libraries.

    Args:
        cell: which op.
        library: whose.
        dtype: of the running statistics.
    """
    if cell.op in ROWS:
        return Function((_our_rows if library == "ours" else _torchs_rows)(cell))
    channels = cell.shape[1]
    running: Outputs = (torch.full((channels,), 0.4, dtype=dtype), torch.full((channels,), 1.1, dtype=dtype))
    if not cell.op.startswith("batch_norm"):
        running = ()
    return Function((_our_channels if library == "ours" else _torchs_channels)(cell, running), running)


def _our_rows(cell: Cell) -> Callable[..., Outputs]:
    width, activation = cell.shape[-1:], cell.activation
    calls: dict[str, Callable[..., Outputs]] = {
        "layer_norm": lambda x, w, b: (functional.layer_norm(x, width, w, b, EPS, activation=activation),),
        "rms_norm": lambda x, w: (functional.rms_norm(x, width, w, EPS, activation=activation),),
        "add_layer_norm": lambda x, r, w, b: functional.add_layer_norm(
            x, r, width, w, b, EPS, activation=activation
        ),
        "add_rms_norm": lambda x, r, w: functional.add_rms_norm(x, r, width, w, EPS, activation=activation),
    }
    return calls[cell.op]


def _torchs_rows(cell: Cell) -> Callable[..., Outputs]:
    width, activate = cell.shape[-1:], _ACTIVATIONS[cell.activation]

    def add_layer_norm(x: Tensor, r: Tensor, w: Tensor, b: Tensor) -> Outputs:
        s = x + r
        return activate(F.layer_norm(s, width, w, b, EPS)), s

    def add_rms_norm(x: Tensor, r: Tensor, w: Tensor) -> Outputs:
        s = x + r
        return activate(F.rms_norm(s, width, w, EPS)), s

    calls: dict[str, Callable[..., Outputs]] = {
        "layer_norm": lambda x, w, b: (activate(F.layer_norm(x, width, w, b, EPS)),),
        "rms_norm": lambda x, w: (activate(F.rms_norm(x, width, w, EPS)),),
        "add_layer_norm": add_layer_norm,
        "add_rms_norm": add_rms_norm,
    }
    return calls[cell.op]


def _our_channels(cell: Cell, running: Outputs) -> Callable[..., Outputs]:
    activation, groups = cell.activation, cell.groups
    if cell.op == "group_norm":
        return lambda x, w, b: (functional.group_norm(x, groups, w, b, EPS, activation=activation),)
    if cell.op == "instance_norm":
        return lambda x, w, b: (
            functional.instance_norm(x, weight=w, bias=b, eps=EPS, activation=activation),
        )
    mean, var = running
    training = cell.op == "batch_norm"
    if cell.add:
        return lambda x, a, w, b: (
            functional.batch_norm(x, mean, var, w, b, training, 0.1, EPS, add=a, activation=activation),
        )
    return lambda x, w, b: (
        functional.batch_norm(x, mean, var, w, b, training, 0.1, EPS, activation=activation),
    )


def _torchs_channels(cell: Cell, running: Outputs) -> Callable[..., Outputs]:
    activate, groups = _ACTIVATIONS[cell.activation], cell.groups
    if cell.op == "group_norm":
        return lambda x, w, b: (activate(F.group_norm(x, groups, w, b, EPS)),)
    if cell.op == "instance_norm":
        return lambda x, w, b: (activate(F.instance_norm(x, weight=w, bias=b, eps=EPS)),)
    mean, var = running
    training = cell.op == "batch_norm"
    if cell.add:
        # in place again, as in torchvision's ResNet: out += identity
        return lambda x, a, w, b: (activate(F.batch_norm(x, mean, var, w, b, training, 0.1, EPS).add_(a)),)
    return lambda x, w, b: (activate(F.batch_norm(x, mean, var, w, b, training, 0.1, EPS)),)


def runner(call: Callable[..., Outputs], given: Inputs, *, backward: bool) -> Callable[[], Outputs]:
    """What is timed: the outputs alone, or every gradient. Whether to record is its caller's to say."""
    leaves, gradients = given.leaves, given.gradients
    if not backward:
        return lambda: call(*leaves)
    return lambda: torch.autograd.grad(call(*leaves), leaves, gradients)
