"""Backward through a walked graph: the second moment of the gradient on every edge.

Wide random layers send back gradients that are normal and independent of what went forward (the
gradient-independence assumption of mean-field theory), with fan_out·Var(W) times the variance. In
between, a unit's gradient goes through the very ops that the unit went through, on the same draws.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Final

import torch
from torch import Tensor

from musigma.graph import Edge, Node, Source
from musigma.init.planning._walk import Walk, eps_of

Back = Callable[["Backward", Node, Tensor], Iterable[tuple[Source, Tensor]]]
BACK: Final[dict[str, Back]] = {}
"""Op → what it sends back to its inputs; the families fill it."""


def back(names: frozenset[str]) -> Callable[[Back], Back]:
    """Register what an op family does to gradients."""

    def register(function: Back) -> Back:
        BACK.update(dict.fromkeys(names, function))
        return function

    return register


class Backward:
    """One pass over a walked graph, in reverse.

    Attributes:
        walk: the walk.
        energy: node index → expected sum of squares of the gradient at its first output.
        lost: node index → why what lies before it gets no expectation.
        strays: node index → variance of the log of that energy over draws of the weights.

    Args:
        walk: a walk that has run.
    """

    def __init__(self, walk: Walk) -> None:
        self.walk = walk
        self.graph = walk.graph
        self.energy: dict[int, float] = {}
        self.lost: dict[int, str] = {}
        self.strays: dict[int, float] = {}
        self._gradients: dict[tuple[int, int], Tensor] = {}
        self._stray: dict[tuple[int, int], list[tuple[float, float]]] = {}

    def run(self) -> None:
        """Send a gradient of independent normal numbers back from the first output."""
        start = next((s for s in self.graph.output if isinstance(s, Edge) and self.walk.signal(s)), None)
        if start is None:
            return
        self._gradients[start.key] = self.fresh(1.0, -1)
        for node in reversed(self.graph.nodes[: int(start) + 1]):
            self._visit(node)

    def _visit(self, node: Node) -> None:
        found = {
            output: self._gradients.pop((node.index, output))
            for output in range(len(node.outputs))
            if (node.index, output) in self._gradients
        }
        if not found:
            return
        self.energy[node.index] = sum(
            self.size(Edge(node.index, output)) * float(gradient.square().mean())
            for output, gradient in found.items()
        )
        parts = [part for output in found for part in self._stray.pop((node.index, output), [])]
        # Contributions stray together, each for its share.
        whole = sum(energy for energy, _ in parts)
        stray = (sum(e * math.sqrt(v) for e, v in parts) / whole) ** 2 if whole > 0 else 0.0
        self.strays[node.index] = stray
        for gradient in found.values():
            after = stray
            if self.graph.weights(node):
                # A layer's backward is a sum over its units, each gradient a draw of its own.
                kurtosis = float(gradient.pow(4).mean() / gradient.square().mean().square().clamp_min(1e-300))
                after += max(kurtosis - 1, 0.0) / self.units(node)
            for source, values in self._sent(node, gradient):
                self.add(source, values, after)

    def _sent(self, node: Node, gradient: Tensor) -> Iterable[tuple[Source, Tensor]]:
        norm = self.walk.norm_at(node)
        if norm is not None:
            signal = self.walk.signal(norm.source)
            if signal is None:
                return ()
            size = signal.second - (signal.mean**2 if norm.centered else 0.0)
            return [(norm.source, gradient / math.sqrt(max(size + eps_of(norm.nodes), 1e-30)))]
        rule = BACK.get(node.op)
        if rule is None:
            self.lost[node.index] = f"what {node.op} does to a gradient is not known"
            return ()
        return rule(self, node, gradient)

    def add(self, source: Source, values: Tensor, stray: float) -> None:
        """Add to the gradient of an edge that carries a signal."""
        if isinstance(source, Edge) and self.walk.signal(source) is not None:
            known = self._gradients.get(source.key)
            self._gradients[source.key] = values if known is None else known + values
            part = (self.size(source) * float(values.square().mean()), stray)
            self._stray.setdefault(source.key, []).append(part)

    def units(self, node: Node) -> float:
        """How many units a node's output has."""
        shape = self.walk.shape(Edge(node.index))
        return float(max(shape[1 if len(shape) > 3 or node.op.endswith("1d") else -1], 1)) if shape else 1.0

    def fresh(self, second: float, key: int) -> Tensor:
        """(n,) normal draws, independent of everything else."""
        return self.walk.draws.plain(second, 7_919 * (key + 2))[0]

    def size(self, source: Source) -> float:
        """How many elements a source has."""
        return float(max(torch.Size(self.walk.shape(source)).numel(), 1))
