"""A scale and a shift into a BatchNorm that follows it and has to stay."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from musigma.graph import Edge, Node, kinds
from musigma.surgery._places import why_branched, why_hooked, why_not_alone, why_not_module, why_not_parameter
from musigma.surgery.folding._affine import Affine, RefusalError, step
from musigma.surgery.folding._layers import Edit, assign
from musigma.surgery.folding._moves import per_channel
from musigma.surgery.folding._place import Place, Plan, remove

# Nobody expects a BatchNorm behind every BatchNorm: the reasons of the other folds say enough.
NOTHING = ""


def merge(plan: Plan, affine: Affine) -> Place:
    """The place of an affine that goes into the BatchNorm behind it.

        (s·x + t − mean) · r · weight + bias  =  (x − 0) · r · (s · weight) + bias + (t − mean) · r · weight

    Raises:
        RefusalError: there is none, or it can't.
    """
    observed = plan.observed
    if affine.fused:
        raise RefusalError(NOTHING)
    node = _next_norm(plan, affine)
    path = node.module
    reason = why_not_module(observed, path)
    for role in ("weight", "bias"):
        reason = reason or why_not_parameter(observed, node, role)
    others = [n for n in observed.graph.nodes if path in (b.rpartition(".")[0] for b in n.buffers)]
    if reason is None and (not isinstance(observed.model.get_submodule(path), _BatchNorm) or len(others) > 1):
        reason = "its statistics are read elsewhere too"
    paths = [affine.path, path]
    reason = reason or why_hooked(observed.model, paths) or why_branched(observed.graph, paths)
    if reason is not None:
        raise RefusalError(f"{path} can't take it: {reason}")
    shape = [int(size) for size in node.outputs[0].shape]
    scale, shift = (per_channel(v.expand(shape), 1) for v in (affine.scale, affine.shift))
    removed = frozenset(n.index for n in affine.nodes)
    edits = (_into(path, scale, shift), remove(affine.path, fused=False))
    return Place(affine.path, f"merged into {path}", edits, (path,), removed, frozenset([affine.path]))


def _next_norm(plan: Plan, affine: Affine) -> Node:
    graph, edge = plan.observed.graph, affine.exit
    while True:
        readers = graph.consumers(edge)
        reason = why_not_alone(graph, edge, readers[:1])
        if reason is not None or not readers:
            raise RefusalError(NOTHING)
        (node,) = readers
        if node.op in kinds.BATCH_NORMS and node.index not in plan.removed:
            if step(plan.observed, node) is None:
                raise RefusalError(f"{node.module} takes the statistics of what it is given")
            return node
        if node.index not in plan.removed:
            raise RefusalError(NOTHING)
        edge = Edge(node.index)


def _into(path: str, scale: torch.Tensor, shift: torch.Tensor) -> Edit:
    def edit(model: nn.Module) -> None:
        norm = model.get_submodule(path)
        assert isinstance(norm, _BatchNorm)
        assert norm.running_mean is not None
        assert norm.running_var is not None
        weight, bias, mean = (
            t.detach().to(torch.float64) for t in (norm.weight, norm.bias, norm.running_mean)
        )
        rstd = (norm.running_var.to(torch.float64) + norm.eps).rsqrt()
        s, t = scale.to(weight), shift.to(weight)
        assign(model, f"{path}.weight", weight * s)
        assign(model, f"{path}.bias", bias + (t - mean) * rstd * weight)
        norm.running_mean = torch.zeros_like(norm.running_mean)

    return edit
