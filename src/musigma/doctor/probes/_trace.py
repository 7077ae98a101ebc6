"""One recorded forward and one backward: every node's output and its gradient, summed up as moments."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from musigma import graph as _graph
from musigma.doctor.probes import _calls
from musigma.doctor.probes._entries import EntryMeasure, EntryProbe
from musigma.doctor.probes._layers import LayerMeasure, measure_layer
from musigma.doctor.probes._nodes import NodeMeasure, NodeProbe
from musigma.doctor.probes._norms import NormMeasure, buffers_of, measure_norm

__all__ = ["Trace", "take_trace"]


@dataclass(frozen=True)
class Trace:
    """What one forward and one backward of a model measured.

    Args:
        graph: the model as it ran.
        nodes: one measurement per graph node, in execution order; `nodes[i].node.index == i`.
        layers: one measurement per call of a linear or convolutional layer.
        norms: one measurement per call of a normalization op.
        entries: what reaches the first weight layers.
        loss: the number that was differentiated; NaN where nothing could be.
        loss_source: "given", "own" (`output.loss`), "projection" or "none".
        gradients: parameter name -> gradient; None where the loss doesn't reach it or it is frozen.
        output: what the model returned, detached.
    """

    graph: _graph.Graph
    nodes: tuple[NodeMeasure, ...]
    layers: tuple[LayerMeasure, ...]
    norms: tuple[NormMeasure, ...]
    entries: tuple[EntryMeasure, ...]
    loss: float
    loss_source: str
    gradients: Mapping[str, Tensor | None] = field(repr=False)
    output: Any = field(repr=False)


def take_trace(
    model: nn.Module, inputs: Any, targets: Any, loss: Callable[..., Any] | None, *, seed: int
) -> Trace:
    """Run the model once forward and once backward, measuring on the way; nobody's `.grad` is written.

    Args:
        model: run as it is, in its own mode.
        seed: what the model's own randomness (dropout) starts from; the global generators are left alone.
    """
    batch = _calls.batch_size(inputs)
    nodes, entries = NodeProbe(batch), EntryProbe(batch)
    layers: list[LayerMeasure] = []
    norms: list[NormMeasure] = []
    outputs: list[Any] = []
    before = buffers_of(model)
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}

    def listen(node: _graph.Node, args: Any, kwargs: Any, output: tuple[Tensor, ...]) -> None:
        nodes.see(node, args, kwargs, output)
        entries.see(node, args, kwargs)
        with torch.no_grad():
            layers.extend(measure_layer(node, args, kwargs, output, batch))
            norms.extend(measure_norm(model, before, node, args, kwargs))

    handle = model.register_forward_hook(lambda _m, _a, out: outputs.append(out))
    try:
        with torch.enable_grad(), _calls.forked_rng(model, seed):
            graph = _graph.record(model, _calls.clone_inputs(inputs), listen=listen)
            value, source = _calls.loss_of(outputs[-1], targets, loss)
            gradients = _backward(value, parameters)
    finally:
        handle.remove()
    detached = torch.utils._pytree.tree_map(lambda t: t.detach() if isinstance(t, Tensor) else t, outputs[-1])
    number = float("nan") if value is None else float(value.detach())
    named = {n: gradients.get(n) for n, _ in model.named_parameters()}
    return Trace(
        graph, nodes.done(), tuple(layers), tuple(norms), entries.done(), number, source, named, detached
    )


def _backward(value: Tensor | None, parameters: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
    if value is None or not value.requires_grad or not parameters:
        return {}
    # `grad` rather than `backward`: a loss that closes over other modules must not fill their `.grad`.
    found = torch.autograd.grad(value, list(parameters.values()), allow_unused=True)
    return dict(zip(parameters, found, strict=True))
