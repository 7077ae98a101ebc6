"""One recorded forward and one backward: every node's output and its gradient, summed up as moments."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from musigma import graph as _graph
from musigma.doctor.probes import _calls
from musigma.doctor.probes._entries import EntryMeasure, EntryProbe
from musigma.doctor.probes._layers import LayerMeasure, measure_layer
from musigma.doctor.probes._nodes import NodeMeasure, NodeProbe
from musigma.doctor.probes._norms import NormMeasure, buffers_of, measure_norm
from musigma.doctor.probes._pass import Pass, differentiated

__all__ = ["Trace", "take_trace"]


@dataclass(frozen=True)
class Trace(Pass):
    """What one forward and one backward of a model measured.

    Args:
        loss: the number that was differentiated; NaN where nothing could be.
        loss_source: "given", "own" (`output.loss`), "projection" or "none".
        gradients: parameter name -> gradient; None where the loss doesn't reach it or it is frozen.
        output: what the model returned, detached.
        graph: the model as it ran.
        nodes: one measurement per graph node, in execution order; `nodes[i].node.index == i`.
        layers: one measurement per call of a linear or convolutional layer.
        norms: one measurement per call of a normalization op.
        entries: what reaches the first weight layers.
    """

    graph: _graph.Graph
    nodes: tuple[NodeMeasure, ...]
    layers: tuple[LayerMeasure, ...]
    norms: tuple[NormMeasure, ...]
    entries: tuple[EntryMeasure, ...]


def take_trace(
    model: nn.Module, inputs: Any, targets: Any, loss: Callable[..., Any] | None, *, seed: int
) -> Trace:
    """Run the model once forward and once backward, measuring on the way; it stays as it was.

    Args:
        model: run as it is, in its own mode.
        inputs: as the model takes them.
        targets: what the loss takes.
        loss: see `musigma.doctor.examine`.
        seed: what the model's own randomness (dropout) starts from; the global generators are left alone.
    """
    batch = _calls.batch_size(inputs)
    nodes, entries = NodeProbe(batch), EntryProbe(batch)
    layers: list[LayerMeasure] = []
    norms: list[NormMeasure] = []
    outputs: list[Any] = []
    before = buffers_of(model)

    def listen(node: _graph.Node, args: Any, kwargs: Any, made: tuple[Tensor, ...]) -> None:
        nodes.see(node, args, kwargs, made)
        entries.see(node, args, kwargs)
        with torch.no_grad():
            layers.extend(measure_layer(node, args, kwargs, nodes))
            norms.extend(measure_norm(model, before, node, args, kwargs))

    handle = model.register_forward_hook(lambda _m, _a, out: outputs.append(out))
    try:
        with torch.enable_grad(), _calls.forked_rng(model, seed):
            graph = _graph.record(model, _calls.clone_inputs(inputs), listen=listen)
            done = differentiated(model, outputs[-1], targets, loss)
    finally:
        handle.remove()
    return Trace(
        done.loss,
        done.loss_source,
        done.gradients,
        done.output,
        graph,
        nodes.done(),
        tuple(layers),
        tuple(norms),
        entries.done(),
    )
