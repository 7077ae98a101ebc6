"""Whether one example's output depends on its batch mates, and where the dependence comes in."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from musigma import graph as _graph
from musigma.doctor.probes import _calls
from musigma.graph import Graph, Node

__all__ = ["Coupling", "measure_coupling"]

# Sums of the same numbers in another order differ by a few units in the last place of the largest one; a
# batch mate that counts moves the output by far more. In float32 it is 1.2e-5.
_ROUNDINGS = 100.0


@dataclass(frozen=True)
class Coupling:
    """What exchanging the other examples changed.

    Args:
        difference: largest absolute change of a kept example's output.
        scale: largest absolute value of the kept examples' outputs.
        kept: how many examples were kept.
        origins: the ops where the change comes in, in execution order; empty where nothing changed.
    """

    difference: float
    scale: float
    kept: int
    origins: tuple[Node, ...]

    @property
    def coupled(self) -> bool:
        """Whether an output changed by more than rounding."""
        return bool(self.origins)


def measure_coupling(model: nn.Module, inputs: Any, *, seed: int = 0) -> Coupling | None:
    """Run the batch twice, the second time with half of the examples replaced by copies of the other half.

    Shapes, and so the model's random numbers, are the same in both runs; the outputs of the examples that
    were kept must be.

    Args:
        model: left as it was.
        inputs: as the model takes them.
        seed: what the model's own randomness starts from.

    Returns:
        None where the batch holds one example, or no output has the batch in front.

    Raises:
        Exception: whatever the model raises.
    """
    examples = _calls.batch_size(inputs) or 1
    kept = examples // 2
    if not kept:
        return None
    others = _calls.rows_of(inputs, [i % kept if i >= kept else i for i in range(examples)])
    first: dict[int, Tensor] = {}
    changed: dict[int, float] = {}

    def keep(node: Node, _args: Any, _kwargs: Any, outputs: Any) -> None:
        if (rows := _kept_rows(outputs, examples, kept)) is not None:
            first[node.index] = rows

    def compare(node: Node, _args: Any, _kwargs: Any, outputs: Any) -> None:
        rows, before = _kept_rows(outputs, examples, kept), first.get(node.index)
        if rows is not None and before is not None and before.shape == rows.shape:
            changed[node.index] = _beyond_rounding(before, rows)

    graph, output = _run(model, inputs, keep, seed)
    _, again = _run(model, others, compare, seed)
    pairs = [
        (a[:kept], b[:kept])
        for a, b in zip(_calls.floating_outputs(output), _calls.floating_outputs(again), strict=False)
        if a.shape == b.shape and a.ndim and a.shape[0] == examples
    ]
    return _judge(pairs, graph, changed, kept) if pairs else None


def _judge(
    pairs: Sequence[tuple[Tensor, Tensor]], graph: Graph, changed: Mapping[int, float], kept: int
) -> Coupling:
    scale = max(float(a.abs().max()) for a, _ in pairs)
    if not any(_beyond_rounding(a, b) for a, b in pairs):
        return Coupling(0.0, scale, kept, ())
    difference = max(float((a - b).abs().max()) for a, b in pairs)
    return Coupling(difference, scale, kept, _origins(graph, changed))


def _run(model: nn.Module, inputs: Any, listen: Any, seed: int) -> tuple[Graph, Any]:
    outputs: list[Any] = []
    handle = model.register_forward_hook(lambda _m, _a, out: outputs.append(out))
    try:
        with torch.no_grad(), _calls.forked_rng(model, seed):
            graph = _graph.record(model, _calls.clone_inputs(inputs), listen=listen)
    finally:
        handle.remove()
    return graph, outputs[-1]


def _kept_rows(outputs: Any, examples: int, kept: int) -> Tensor | None:
    out = next(iter(_calls.floating_outputs(outputs)), None)
    # Cloned: what follows may write over it.
    return out[:kept].detach().clone() if out is not None and out.ndim and out.shape[0] == examples else None


def _beyond_rounding(a: Tensor, b: Tensor) -> float:
    """The largest change if it exceeds rounding, else 0; what isn't finite in either run is left out."""
    apart = (a - b).abs().double().nan_to_num(nan=0.0, posinf=0.0)
    change = float(apart.max())
    largest = float(a.abs().double().nan_to_num(nan=0.0, posinf=0.0).max())
    return change if change > _ROUNDINGS * torch.finfo(a.dtype).eps * largest else 0.0


def _origins(graph: Graph, changed: Mapping[int, float]) -> tuple[Node, ...]:
    """Ops whose kept rows changed although nothing they depend on had changed before.

    An op without the batch in front can't be compared and says neither; the next one that can is named.
    """
    moved = {index for index, change in changed.items() if change}
    reach: set[int] = set()
    origins: list[Node] = []
    for node in graph:
        behind = any(isinstance(s, int) and int(s) in reach for s in node.inputs)
        if behind or node.index in moved:
            reach.add(node.index)
        if node.index in moved and not behind:
            origins.append(node)
    return tuple(origins) or tuple(graph.nodes[-1:])
