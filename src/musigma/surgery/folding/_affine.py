"""Which parts of a model do nothing but scale and shift, and by how much."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from musigma.graph import Edge, Node, Source, kinds
from musigma.surgery._places import Observed, called


class RefusalError(Exception):
    """Why a place is left alone."""


@dataclass(frozen=True)
class Affine:
    """A stretch of ops that is y = scale · x + shift and nothing else.

    Args:
        path: the module that consists of it.
        nodes: its ops that depend on the example, in execution order.
        entry: x.
        exit: y.
        scale: broadcasts against y.
        shift: likewise.
        fused: whether an activation or a sum, in the same call, follows it.
    """

    path: str
    nodes: tuple[Node, ...]
    entry: Source
    exit: Edge
    scale: Tensor
    shift: Tensor
    fused: bool = False


@dataclass(frozen=True)
class _Step:
    source: Source
    scale: Tensor
    shift: Tensor


def affine_module(observed: Observed, path: str) -> Affine:
    """What a module does as one scale and shift.

    Raises:
        RefusalError: it does anything else, or is no module of its own.
    """
    graph = observed.graph
    inside = [n for n in graph.nodes if n.module == path or n.module.startswith(f"{path}.")]
    live = [n for n in inside if graph.is_live(n)]
    steps: list[_Step] = []
    for node in live:
        found = step(observed, node)
        if found is None and node.op in kinds.BATCH_NORMS | kinds.GROUP_NORMS:
            raise RefusalError("it takes the statistics of what it is given, not running ones")
        if found is None:
            raise RefusalError(f"it does more than scale and shift: {called(node)}")
        if node.writes:
            raise RefusalError(f"{called(node)} overwrites its input")
        if steps and not (
            isinstance(found.source, Edge) and found.source.key == (live[len(steps) - 1].index, 0)
        ):
            raise RefusalError("it is no plain chain of ops")
        steps.append(found)
    scale, shift = steps[0].scale, steps[0].shift
    for following in steps[1:]:
        scale, shift = following.scale * scale, following.scale * shift + following.shift
    fused = any(n.options.get("activation") is not None or n.arguments.get("add") for n in live)
    return Affine(path, tuple(live), steps[0].source, Edge(live[-1].index), scale, shift, fused)


def why_read_elsewhere(observed: Observed, path: str) -> str | None:
    """Who else reads what a module holds, which goes with it, or None."""
    for node in observed.graph.nodes:
        if node.module == path or node.module.startswith(f"{path}."):
            continue
        for name in (*node.parameters, *node.buffers):
            own = name.startswith(f"{path}.")
            if own and all(n.startswith(f"{path}.") for n in _names(observed, name)):
                return f"its {name.removeprefix(f'{path}.')} is also read by {called(node)}"
    return None


def _names(observed: Observed, name: str) -> tuple[str, ...]:
    groups = (*observed.graph.parameters, *observed.graph.buffers)
    return next((group for group in groups if name in group), (name,))


def step(observed: Observed, node: Node) -> _Step | None:
    """One op as a scale and a shift of its only input that depends on the example."""
    if node.op in kinds.BATCH_NORMS or node.op == "instance_norm":
        return _running_norm(observed, node)
    live = [s for s in node.inputs if observed.graph.is_live(s)]
    if len(live) != 1 or len(node.outputs) != 1:
        return None
    if neutral(observed, node):
        one = torch.ones((), dtype=torch.float64)
        return _Step(live[0], one, torch.zeros_like(one))
    static = _static(observed, node)
    if static is None or node.options.get("alpha", 1) != 1 or node.options.get("rounding_mode") is not None:
        return None
    first = live[0] in node.arguments.get("input", ())
    one, zero = torch.ones_like(static), torch.zeros_like(static)
    numbers = {
        "mul": (static, zero),
        "div": (1 / static, zero) if first else None,
        "add": (one, static),
        "sub": (one, -static) if first else (-one, static),
    }.get(node.op)
    if numbers is None or torch.broadcast_shapes(static.shape, _shape(node)) != torch.Size(_shape(node)):
        return None
    return _Step(live[0], *numbers)


def _static(observed: Observed, node: Node) -> Tensor | None:
    """The one operand that depends on parameters alone. A plain number may hide a size of the example."""
    if node.op not in ("mul", "div", "add", "sub"):
        return None
    sources = [s for s in node.inputs if not observed.graph.is_live(s)]
    value = observed.value(sources[0]) if len(sources) == 1 and len(node.inputs) == 2 else None
    if value is None or not value.is_floating_point():
        return None
    return value.to(torch.float64)


def neutral(observed: Observed, node: Node) -> bool:
    """Whether an op hands on the values in their shape: a cast between floating types, a copy."""
    if node.op in kinds.DROPOUTS:
        return node.options.get("training") is False or node.options.get("p") == 0
    if node.op not in ("to", "contiguous", "clone", "detach", "alias", "data"):
        return False
    return node.index not in observed.converted and node.outputs[0].dtype.is_floating_point


def _shape(node: Node) -> tuple[int, ...]:
    return tuple(int(size) for size in node.outputs[0].shape)


def _running_norm(observed: Observed, node: Node) -> _Step | None:
    """A norm by running statistics: scale = weight / √(var + eps), shift = bias − mean · scale."""
    training = node.options.get("training", node.options.get("use_input_stats"))
    if training is not False or node.arguments.get("mask") or len(node.arguments.get("input", ())) != 1:
        return None
    values = {
        role: observed.value(node.arguments[role][0]) if node.arguments.get(role) else None
        for role in ("running_mean", "running_var", "weight", "bias")
    }
    mean, var = values["running_mean"], values["running_var"]
    if mean is None or var is None:
        return None
    eps = node.options.get("eps", 1e-5)
    if not isinstance(eps, int | float):
        return None
    scale = (var.to(torch.float64) + eps).rsqrt()
    if values["weight"] is not None:
        scale = scale * values["weight"].to(torch.float64)
    shift = -mean.to(torch.float64) * scale
    if values["bias"] is not None:
        shift = shift + values["bias"].to(torch.float64)
    along = (-1, *[1] * (len(node.outputs[0].shape) - 2))
    return _Step(node.arguments["input"][0], scale.reshape(along), shift.reshape(along))


def running_norms(observed: Observed) -> Iterator[Node]:
    """The norm ops that may take their statistics from buffers."""
    for node in observed.graph.nodes:
        if node.op in kinds.BATCH_NORMS or (
            node.op == "instance_norm" and node.arguments.get("running_mean")
        ):
            yield node


def affine_paths(observed: Observed) -> list[str]:
    """Modules that may be nothing but a scale and a shift with numbers of their own, in execution order.

    Norms by running statistics always; others only if they are.
    """
    norms = {node.module for node in running_norms(observed)}
    paths = dict.fromkeys(n.module for n in observed.graph.nodes if observed.graph.is_live(n))
    return [path for path in paths if path and (path in norms or _is_affine(observed, path))]


def _is_affine(observed: Observed, path: str) -> bool:
    held = [*observed.model.get_submodule(path).parameters(), *observed.model.get_submodule(path).buffers()]
    if not held:
        return False
    try:
        affine_module(observed, path)
    except RefusalError:
        return False
    return True
