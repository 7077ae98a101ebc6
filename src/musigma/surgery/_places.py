"""Whether a place of a model may be touched, and if not, why not in words."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from musigma.graph import UNKNOWN, Buffer, Edge, Graph, Node, Parameter, Source, kinds, record, unwrap

_HOOKS = {
    "_forward_hooks": "a forward hook",
    "_forward_pre_hooks": "a forward pre-hook",
    "_backward_hooks": "a backward hook",
    "_backward_pre_hooks": "a backward pre-hook",
}


@dataclass(frozen=True)
class Slot:
    """Where a tensor stood in a call that is kept to be run again."""

    position: int


@dataclass(frozen=True)
class Kept:
    """A call without its tensors: what it takes to run it again on others.

    Args:
        function: what ran.
        args: positional arguments, with slots for the tensors that depend on the example.
        kwargs: keyword arguments, likewise.
        slots: how many.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    slots: int

    def __call__(self, *values: Tensor) -> Any:
        """The call on other values, one a slot."""

        def fill(value: Any) -> Any:
            return values[value.position] if isinstance(value, Slot) else value

        is_leaf = lambda value: isinstance(value, Slot)  # noqa: E731
        args, kwargs = pytree.tree_map(fill, (self.args, dict(self.kwargs)), is_leaf=is_leaf)
        return self.function(*args, **kwargs)


@dataclass(frozen=True)
class Observed:
    """A model as it ran, and what a graph alone does not hold.

    Args:
        model: the copy that ran, unwrapped.
        graph: what it did.
        kept: the calls that only move values about (views, concatenations, paddings, poolings), by node.
        static: the values that depend on parameters and buffers alone, by node and output.
        converted: the casts that turned integers or booleans into floats.
    """

    model: nn.Module
    graph: Graph
    kept: Mapping[int, Kept] = field(repr=False)
    static: Mapping[tuple[int, int], Tensor] = field(repr=False)
    converted: frozenset[int] = frozenset()

    def value(self, source: Source) -> Tensor | None:
        """The tensor behind a source that does not depend on the example; None if it does."""
        if isinstance(source, Parameter):
            return self.model.get_parameter(source.name).detach()
        if isinstance(source, Buffer):
            return self.model.get_buffer(source.name).detach()
        return self.static.get(source.key) if isinstance(source, Edge) else None


def observe(
    model: nn.Module,
    example: Any,
    *,
    training: bool | None = False,
    dtype: torch.dtype | None = torch.float64,
) -> Observed:
    """Run a copy once and write down what it did.

    Args:
        model: left as it is; wrappers are taken off.
        example: what it is called with.
        training: the mode to run in; None leaves every module in its own.
        dtype: what the copy's parameters and the example's floating tensors are cast to; None keeps theirs.
    """
    twin = copied(unwrap(model))
    if dtype is not None:
        twin = twin.to(dtype)
        example = cast(example, dtype)
    if training is not None:
        twin.train(training)
    kept: dict[int, Kept] = {}
    static: dict[tuple[int, int], Tensor] = {}
    live: set[int] = set()
    converted: set[int] = set()

    def listen(node: Node, args: Any, kwargs: Any, outputs: tuple[Tensor, ...]) -> None:
        if node.op in _MOVERS:
            kept[node.index] = _keep(node, args, kwargs)
        if any(int(s) in live if isinstance(s, Edge) else _is_root(s) for s in node.inputs):
            live.add(node.index)
            if node.op == "to" and args and not args[0].is_floating_point():
                converted.add(node.index)
        else:
            for position, tensor in enumerate(outputs):
                static[node.index, position] = tensor.detach().clone()

    with torch.no_grad():
        graph = record(twin, example, listen=listen)
    return Observed(twin, graph, kept, static, frozenset(converted))


_MOVERS = (
    kinds.VIEWS | kinds.CONCATENATIONS | kinds.PADDINGS | kinds.POOLINGS | kinds.UPSAMPLINGS
) - frozenset(("to",))


def _is_root(source: Source) -> bool:
    return source is UNKNOWN or not isinstance(source, Parameter | Buffer | Edge)


def _keep(node: Node, args: Any, kwargs: Any) -> Kept:
    count = 0

    def empty(value: Any) -> Any:
        nonlocal count
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        count += 1
        return Slot(count - 1)

    kept_args, kept_kwargs = pytree.tree_map(empty, (tuple(args), dict(kwargs)))
    function: Any = torch
    for name in node.target.split(".")[1:]:
        function = getattr(function, name)
    return Kept(function, kept_args, kept_kwargs, count)


def cast(example: Any, dtype: torch.dtype) -> Any:
    """The example with its floating tensors in another type."""
    return pytree.tree_map(
        lambda v: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v, example
    )


def copied(model: nn.Module) -> nn.Module:
    """A deep copy, also of a model that keeps computed tensors as attributes (as `weight_norm` does)."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, Tensor) and not value.is_leaf:  # which torch refuses to copy
                memo[id(value)] = value.detach().clone()
    return copy.deepcopy(model, memo)


def called(node: Node | str) -> str:
    """A node or module as messages call it."""
    if isinstance(node, str):
        return node or "the model"
    return f"{node.op} in {node.module or 'the model'}"


def why_not_module(observed: Observed, path: str) -> str | None:
    """Why a module may not be changed or replaced, or None."""
    module = observed.model.get_submodule(path)
    if not path:
        return "it is the model itself, which has no place to be replaced in"
    if isinstance(module, torch.jit.ScriptModule):
        return "it is scripted"
    calls = _calls(observed, path)
    if calls != 1:
        return "the example does not reach it" if calls == 0 else f"it is called {calls} times"
    if nn.utils.parametrize.is_parametrized(module):
        names = ", ".join(module.parametrizations)  # type: ignore[arg-type, operator]
        return f"its {names} is parametrized; take the parametrization off first"
    return why_hooked(observed.model, [path]) or why_branched(observed.graph, [path])


def _calls(observed: Observed, path: str) -> int:
    module = observed.model.get_submodule(path)
    paths = [p for p, m in observed.model.named_modules(remove_duplicate=False) if m is module]
    return len({node.call for p in paths for node in observed.graph.node_of(p)})


def why_hooked(model: nn.Module, paths: Iterable[str]) -> str | None:
    """Why hooks forbid that what lies between these modules changes: a hook would see other values.

    A module around all of them sees the same values as before; one around some of them, or that is the only
    one itself, does not.
    """
    paths = tuple(paths)
    for name, module in model.named_modules(remove_duplicate=False):
        inside = [path for path in paths if _within(path, name)]
        if not inside or (len(inside) == len(paths) and any(path != name for path in paths)):
            continue
        for attribute, words in _HOOKS.items():
            if getattr(module, attribute, None):
                return f"{words} on {called(name)} would see other values"
    return None


def why_branched(graph: Graph, paths: Iterable[str]) -> str | None:
    """Why a branch on data forbids to change these modules: other data may take another way through them."""
    for node in graph.nodes:
        if node.op in kinds.ESCAPES and graph.is_live(node):
            path = next((path for path in paths if _within(path, node.module)), None)
            if path is not None:
                return (
                    f"{called(node.module)} branches on data ({node.op}), so other data may take another way"
                )
    return None


def _within(path: str, ancestor: str) -> bool:
    return not ancestor or path == ancestor or path.startswith(f"{ancestor}.")


def why_not_parameter(observed: Observed, node: Node, role: str) -> str | None:
    """Why what an op takes as `role` (weight, bias) may not be changed, or None.

    It has to be a parameter itself, not computed from one, with one name, and read by this op alone.
    """
    sources = node.arguments.get(role, ())
    if len(sources) != 1 or not isinstance(sources[0], Parameter):
        return f"its {role} is not a parameter of its own but computed in the forward"
    name = sources[0].name
    names = next(group for group in observed.graph.parameters if group[0] == name)
    if len(names) > 1:
        return f"its {role} is tied: {', '.join(names)}"
    others = [n for n in observed.graph.consumers(sources[0]) if n.index != node.index]
    return f"its {role} is also read by {called(others[0])}" if others else None


def why_not_alone(graph: Graph, edge: Edge, readers: Iterable[Node]) -> str | None:
    """Why a value may not change: someone else than these nodes sees it."""
    if any(isinstance(s, Edge) and s.key == edge.key for s in graph.output):
        return f"the model returns the output of {called(graph.nodes[edge])}"
    allowed = {node.index for node in readers}
    others = [node for node in graph.consumers(edge) if node.index not in allowed]
    return f"the output of {called(graph.nodes[edge])} also goes to {called(others[0])}" if others else None


def replace_module(model: nn.Module, path: str, new: nn.Module) -> None:
    """Put a module into every slot that holds the one at `path`, in its mode."""
    old = model.get_submodule(path)
    new.train(old.training)
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is old:
                parent._modules[name] = new
