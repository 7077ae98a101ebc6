"""Which biases a normalization subtracts again: found by data flow, and removed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from musigma import graph as _graph
from musigma.graph import Buffer, Graph, Node, Parameter, kinds
from musigma.surgery._certificate import Certificate, certified

_CHANNEL_OPS = kinds.CONVOLUTIONS | kinds.TRANSPOSED_CONVOLUTIONS
# They subtract a mean of exactly the values that share one bias: a channel's, or an example's channel's.
_CANCELLING = kinds.BATCH_NORMS | frozenset(("instance_norm",))


@dataclass(frozen=True)
class DeadBias:
    """A bias that reaches the output only through a normalization that subtracts it.

    Args:
        name: the bias's qualified name.
        node: the op that adds it.
        norm: the op that subtracts it again.
    """

    name: str
    node: Node
    norm: Node


@dataclass(frozen=True)
class LiveBias:
    """A bias that stands before a normalization and yet can't be removed.

    Args:
        name: the bias's qualified name.
        reason: why it stays.
    """

    name: str
    reason: str


def dead_biases(graph: Graph) -> tuple[tuple[DeadBias, ...], tuple[LiveBias, ...]]:
    """The biases that a BatchNorm or InstanceNorm behind them cancels, and those that only look like it.

    A bias b before a norm over the values of one channel is cancelled: the mean of z + b is mean(z) + b. So
    it is for BatchNorm (in eval mode it moves into running_mean) and for InstanceNorm; not for LayerNorm and
    GroupNorm, whose mean runs over channels with different biases, nor for RMSNorm, which subtracts none.

    Args:
        graph: the model as it ran.

    Returns:
        the dead ones, and the ones that stay with the reason, both in execution order.

    References:
        Ioffe & Szegedy 2015, section 3.2; seed notes, "What to Remember".
    """
    dead: list[DeadBias] = []
    live: dict[str, LiveBias] = {}
    for node in graph.nodes:
        name = _bias_of(node)
        if name is None:
            continue
        found = _cancelled_by(graph, node)
        if isinstance(found, Node):
            reason = _why_it_stays(graph, name, node)
            if reason is None:
                dead.append(DeadBias(name, node, found))
            else:
                live[name] = LiveBias(name, reason)
    return tuple(dead), tuple(live.values())


def _bias_of(node: Node) -> str | None:
    if node.op != "linear" and node.op not in _CHANNEL_OPS:
        return None
    sources = node.arguments.get("bias", ())
    return sources[0].name if len(sources) == 1 and isinstance(sources[0], Parameter) else None


def _why_it_stays(graph: Graph, name: str, node: Node) -> str | None:
    uses = [n for n in graph.nodes if name in n.parameters]
    if len(uses) > 1:
        return f"it is used by {len(uses)} ops"
    tied = [p for p in node.arguments["bias"] if isinstance(p, Parameter)]
    names = [p for p in node.parameters if p.rpartition(".")[2] == name.rpartition(".")[2]]
    if len(tied) > 1 or len(names) > 1:
        return f"it is tied: {', '.join(names)}"
    return None


def _cancelled_by(graph: Graph, node: Node) -> Node | None:
    """The norm that subtracts what this op's bias adds, walking through views that keep its axis whole."""
    axis = _channel_axis(node)
    while True:
        if any(int(source) == node.index for source in graph.output if isinstance(source, int)):
            return None
        consumers = graph.consumers(node)
        if len(consumers) != 1:
            return None
        (following,) = consumers
        if following.op in _CANCELLING:
            return following if axis == 1 and _subtracts_own_mean(following) else None
        moved = _axis_after(following, node.outputs[0].shape, axis)
        if moved is None:
            return None
        node, axis = following, moved


def _channel_axis(node: Node) -> int:
    shape = node.outputs[0].shape
    if node.op == "linear":
        return len(shape) - 1
    dims = int(node.op[-2]) if node.op[-2:] in ("1d", "2d", "3d") else len(shape) - 2
    return len(shape) - dims - 1


def _subtracts_own_mean(norm: Node) -> bool:
    """Whether what it subtracts is a mean of its input, or a running one in a buffer that can be shifted."""
    if norm.op == "instance_norm":
        return norm.options.get("use_input_stats", True) is not False
    running = norm.arguments.get("running_mean", ())
    return norm.options.get("training") is True or (len(running) == 1 and isinstance(running[0], Buffer))


def _axis_after(node: Node, shape: Sequence[int], axis: int) -> int | None:
    """Where the axis lies after a view that keeps it whole; None where it doesn't or can't be told."""
    if node.op not in kinds.RESHAPES or len(node.outputs) != 1:
        return None
    new = node.outputs[0].shape
    if node.op in ("transpose", "permute", "movedim", "t"):
        return _axis_after_permutation(node, shape, axis)
    if node.op in ("flip", "rot90", "roll", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle"):
        return None
    # In row-major order an axis is the same one if as much lies before it and it is as long.
    before = math.prod(shape[:axis])
    return next(
        (d for d in range(len(new)) if math.prod(new[:d]) == before and new[d] == shape[axis] and new[d] > 1),
        None,
    )


def _axis_after_permutation(node: Node, shape: Sequence[int], axis: int) -> int | None:
    n = len(shape)
    if node.op == "transpose":
        a, b = (node.options.get(k) for k in ("dim0", "dim1"))
        if not (isinstance(a, int) and isinstance(b, int)):
            return None
        return {a % n: b % n, b % n: a % n}.get(axis, axis)
    dims = node.options.get("dims")
    if node.op == "permute" and isinstance(dims, Sequence) and all(isinstance(d, int) for d in dims):
        return [d % n for d in dims].index(axis)
    return None


def remove_bias(model: nn.Module, example: Any) -> tuple[nn.Module, Certificate]:
    """Remove every bias that a BatchNorm or InstanceNorm behind it subtracts again.

        BN(Wx + b) = BN(Wx)   while it trains;   running_mean ← running_mean − b   for test time

    Args:
        model: any module; left as it is.
        example: what the model is called with: a tensor, a tuple of arguments or a dict of keywords.

    Returns:
        a copy without the dead biases, and the certificate: same outputs in train and in eval mode.

    Raises:
        CertificateError: the outputs moved; nothing was changed.

    Example:
        >>> import torch, musigma as ms
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.ReLU())
        >>> lighter, certificate = ms.surgery.remove_bias(net, torch.randn(8, 4))
        >>> lighter[0].bias is None, net[0].bias is None
        (True, False)

    References:
        Ioffe & Szegedy 2015, section 3.2.
    """
    dead, live = dead_biases(_graph.record(model, example))

    def change(twin: nn.Module) -> None:
        for found in dead:
            owner, _, attribute = found.name.rpartition(".")
            _shift_running_mean(twin, found.norm, twin.get_parameter(found.name).detach())
            setattr(twin.get_submodule(owner), attribute, None)

    changed = tuple(
        f"{d.name}: {model.get_parameter(d.name).numel()} values that "
        f"{d.norm.module or 'the model'} ({d.norm.op}) subtracts again"
        for d in dead
    )
    refused = tuple(f"{b.name}: {b.reason}" for b in live)
    return certified("remove_bias", model, change, example, changed=changed, refused=refused)


def _shift_running_mean(model: nn.Module, norm: Node, bias: torch.Tensor) -> None:
    for source in norm.arguments.get("running_mean", ()):
        if isinstance(source, Buffer):
            running = model.get_buffer(source.name)
            running.copy_(running.to(torch.float64) - bias.to(torch.float64))
