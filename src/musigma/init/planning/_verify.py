"""Run the initialized model on the example, forward and backward, and compare with the plan."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from musigma.graph import Edge, Graph, Node, kinds, record
from musigma.init.planning._entry import Layer
from musigma.init.planning._judge import judged
from musigma.init.planning._seen import Seen
from musigma.init.planning._verification import Verification
from musigma.statistics import moments


def verify(model: nn.Module, example: Any, graph: Graph, layers: tuple[Layer, ...]) -> Verification:
    """Measure every weight layer on the example.

    The gradient is that of independent normal numbers at the first output; it goes to activations alone.

    Args:
        model: the initialized model.
        example: what it runs on.
        graph: the graph of the plan.
        layers: what the plan expects.

    Returns:
        What was measured, beside what was expected.
    """
    probe = _Probe(graph, layers)
    with _activations_alone(model), torch.enable_grad():
        record(model, _leaves(example, probe), listen=probe.listen)
        probe.backward()
    loss, ideal = probe.loss()
    return Verification(judged(layers, probe.forward, probe.energy), loss, ideal, tuple(probe.notes))


class _Probe:
    def __init__(self, graph: Graph, layers: tuple[Layer, ...]) -> None:
        self.graph = graph
        self.wanted = {layer.node for layer in layers}
        self.forward: dict[int, Seen] = {}
        self.energy: dict[int, float] = {}
        self.leaves: list[Tensor] = []
        self.notes: list[str] = []
        self.examples = 1
        self._start = next((s for s in graph.output if isinstance(s, Edge)), None)
        self._output: Tensor | None = None
        self._same = True

    def listen(self, node: Node, args: Any, kwargs: Any, outputs: tuple[Tensor, ...]) -> None:
        """Measure a weight layer's output, and wait for its gradient."""
        if not self._same or node.index >= len(self.graph) or self.graph.nodes[node.index].op != node.op:
            if self._same:
                self.notes.append("with these weights the model took another path: the rest is not measured")
            self._same = False
            return
        if node.index in self.wanted and outputs:
            out = outputs[0]
            self.forward[node.index] = Seen(out, self.examples)
            self._start_here(node, out)
            if out.requires_grad:
                out.register_hook(lambda g, index=node.index: self._hear(index, g))
        if self._start is not None and node.index == int(self._start):
            self._output = outputs[self._start.output]

    def _start_here(self, node: Node, out: Tensor) -> None:
        """A gradient needs something to go to: the first layer's output where the input is no number."""
        overwritten = any(reader.inplace for reader in self.graph.consumers(node))
        if not out.requires_grad and out.is_floating_point() and not overwritten:
            self.leaves.append(out.requires_grad_())

    def _hear(self, index: int, gradient: Tensor) -> None:
        m = moments(gradient.detach(), None)
        self.energy[index] = gradient.numel() * float(m.mean.square() + m.var())

    def backward(self) -> None:
        """Send independent normal numbers back from the first output."""
        out = self._output
        if out is None or not out.requires_grad or not self.leaves:
            self.notes.append("no gradient reaches the layers from the first output")
            return
        generator = torch.Generator("cpu").manual_seed(0)
        cotangent = torch.randn(out.shape, generator=generator, device="cpu").to(out)
        torch.autograd.grad(out, self.leaves, cotangent, allow_unused=True)

    def loss(self) -> tuple[float | None, float | None]:
        """Expected cross entropy with classes drawn at random, and ln C; None if it is no classifier."""
        out = self._output
        if out is None or out.dim() < 2 or not out.is_floating_point() or not self._is_head():
            return None, None
        classes = 1 if out.dim() > 3 else -1
        count = out.shape[classes]
        if count < 2:
            return None, None
        z = out.detach().float()
        loss = moments(z.logsumexp(classes) - z.mean(classes), None).mean
        return float(loss), math.log(count)

    def _is_head(self) -> bool:
        node = self.graph.nodes[int(self._start)] if self._start is not None else None
        while node is not None and node.op in kinds.VIEWS and node.inputs:
            node = self.graph.producer(node.inputs[0])
        return node is not None and node.index in self.wanted


def _leaves(example: Any, probe: _Probe) -> Any:
    """The example with numbers that gradients can go to, and how many examples there are."""

    def leaf(value: Any) -> Any:
        if isinstance(value, Tensor):
            if value.dim():
                probe.examples = max(probe.examples, int(value.shape[0])) if not seen else probe.examples
                seen.append(True)
            if not value.is_floating_point():
                return value
            start = value.detach().clone().requires_grad_()
            probe.leaves.append(start)
            return start.clone()  # no leaf, so that the model may write to it
        if isinstance(value, dict):
            return {key: leaf(item) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(map(leaf, value))
        return value

    seen: list[bool] = []
    return leaf(example)


@contextmanager
def _activations_alone(model: nn.Module) -> Iterator[None]:
    """No gradients for weights inside: they are not asked for, and cost a third of the step."""
    wanted = [p for p in model.parameters() if p.requires_grad]
    try:
        for p in wanted:
            p.requires_grad_(False)
        yield
    finally:
        for p in wanted:
            p.requires_grad_(True)
