"""The signal as it ran: what every layer with weights receives and puts out, overall and across examples."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from musigma.graph import Edge, Graph, Node, forked_rng, kinds, record, tensors
from musigma.graph._example import Example
from musigma.statistics import moments

# Ops whose results are asked for: layers, what they are made of, and where a scale begins anew.
_TOLD = kinds.WEIGHT_OPS | kinds.NORMS | kinds.ADDITIONS | kinds.SATURATING


@dataclass(frozen=True)
class Spread:
    """The size of one tensor of the forward pass.

    Attributes:
        square: E[x²] over everything.
        between: the part of it that tells examples apart: the variance over examples, averaged over the
            rest; None without a batch axis of at least two.
        units: the number of features, channels of a convolution.
    """

    square: float
    between: float | None
    units: int

    @property
    def rms(self) -> float:
        """√E[x²]."""
        return self.square**0.5

    @property
    def share(self) -> float | None:
        """The part of the second moment that tells examples apart."""
        return None if self.between is None or not self.square > 0 else self.between / self.square


@dataclass
class Signal:
    """Spreads of the recorded forward, by node.

    Attributes:
        batch: how many examples there were; None where the example has no batch axis.
        outputs: node index → what it put out.
        received: node index → what a layer with weights received.
    """

    batch: int | None
    outputs: dict[int, Spread] = field(default_factory=dict)
    received: dict[int, Spread] = field(default_factory=dict)

    def __call__(self, node: Node, args: Any, kwargs: Mapping[str, Any], outputs: tuple[Tensor, ...]) -> None:
        with torch.no_grad():
            first = next((t for t in outputs if _readable(t)), None)
            if first is not None and node.op in _TOLD:
                self.outputs[node.index] = self._spread(first, node.op)
            if node.op in kinds.WEIGHT_OPS:
                signals = (t for t in tensors((args, kwargs)) if not isinstance(t, nn.Parameter))
                incoming = next(filter(_readable, signals), None)
                if incoming is not None:
                    self.received[node.index] = self._spread(incoming, node.op)

    def _spread(self, x: Tensor, op: str) -> Spread:
        x = x.detach()
        whole = moments(x)
        square = float(whole.mean) ** 2 + float(whole.var())
        between = None
        if self.batch is not None and self.batch > 1 and x.dim() > 1 and x.shape[0] == self.batch:
            between = float(moments(moments(x, 0).var()).mean)
        axis = -1 - int(op[-2]) if "conv" in op and op[-1] == "d" else -1
        return Spread(square, between, x.shape[axis] if x.dim() >= abs(axis) else 1)


def measure(model: nn.Module, example: Example, seed: int | None) -> tuple[Graph, Signal]:
    """Run the model once on an example and measure what runs through it.

    Args:
        model: any module.
        example: a tensor, a tuple of arguments or a mapping of keyword arguments.
        seed: what the model's own noise (dropout) starts from; None for the present state.

    Returns:
        The graph and the spreads.

    Raises:
        Exception: what the model raises on the example, with a note on the call.

    Example:
        >>> graph, signal = measure(nn.Linear(2, 3), torch.ones(5, 2), None)
        >>> signal.batch, signal.received[0].square
        (5, 1.0)

    References:
        None.
    """
    signal = Signal(_batch(example))
    with torch.no_grad(), forked_rng(model, seed):
        graph = record(model, example, listen=signal)
    return graph, signal


def source_spread(graph: Graph, signal: Signal, source: object) -> Spread | None:
    """The spread of a value that a node made.

    Args:
        graph: the recorded model.
        signal: its spreads.
        source: an entry of `node.inputs`.

    Returns:
        The spread; None for inputs and for what was not measured.

    Example:
        >>> graph, signal = measure(nn.Linear(2, 3), torch.ones(5, 2), None)
        >>> source_spread(graph, signal, graph.output[0]).units
        3

    References:
        None.
    """
    return signal.outputs.get(int(source)) if isinstance(source, Edge) else None


def _batch(example: Example) -> int | None:
    """The length of the axis that all tensors of the example begin with."""
    lengths = {t.shape[0] for t in tensors(example) if t.dim() > 1}
    return lengths.pop() if len(lengths) == 1 else None


def _readable(x: Tensor) -> bool:
    return x.is_floating_point() and x.numel() > 0 and x.layout is torch.strided and not x.is_meta
