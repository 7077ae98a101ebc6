"""One torch call while it happens: what it is given, what it writes, what it makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from torch import Tensor

from musigma.graph import _kinds as kinds
from musigma.graph import _names as names
from musigma.graph._binding import bind, mutable_arguments, with_defaults
from musigma.graph._memory import Memory, Region
from musigma.graph._nodes import Buffer, Edge, Node, Parameter, Recipe, Source, TensorSpec
from musigma.graph._recipes import recipe
from musigma.graph._tensors import is_plain, tensors

# Calls that may return a tensor, but neither compute nor view one.
_SILENT: Final = kinds.ops("""
    requires_grad set_requires_grad retain_grad register_hook get_grad set_grad share_memory rename
    set_names
    """)

# Calls that hand out the memory itself.
_EXPOSING: Final = frozenset(("numpy", "dlpack"))

# Calls that make memory for someone to write into.
_UNWRITTEN: Final = kinds.ops("empty empty_like empty_strided new_empty new_empty_strided")


class Call:
    """The books on one call: made before it, finished after it, and turned into a node.

    Args:
        op: the normalized name.
        target: the function's name in torch.
        named: the arguments by name.
        memory: what the recorder knows of the tensors so far.
        targets: arguments that the function's name says it overwrites.
        options: the arguments that are plain data, defaults included.
    """

    def __init__(
        self,
        op: str,
        target: str,
        named: Mapping[str, Any],
        memory: Memory,
        *,
        targets: Sequence[Tensor] = (),
        options: Mapping[str, object] | None = None,
    ) -> None:
        self.op, self.target, self.targets = op, target, tuple(targets)
        self.options = dict(options or {})
        self._memory = memory
        self.recipe: Recipe | None = None
        given = {} if op in kinds.SHAPE_READERS else named
        self._read = [(name, tensor) for name, value in given.items() for tensor in tensors(value)]
        self._sources = [memory.source(tensor) for _, tensor in self._read]
        self._versions = [_version(tensor) for _, tensor in self._read]
        self._whole = named.get("out") is not None or op in kinds.OVERWRITES or _sets_all(op, named)
        self._parameters = _union([memory.names(tensor, Parameter) for _, tensor in self._read])
        self._buffers = _union([memory.names(tensor, Buffer) for _, tensor in self._read])
        self.written: dict[int, tuple[str, Tensor]] = {}
        self.outputs: tuple[Tensor, ...] = ()
        self._views: set[int] = set()

    @classmethod
    def of(
        cls, function: names.Function, args: tuple[Any, ...], kwargs: Mapping[str, Any], memory: Memory
    ) -> Call:
        """The call of a function that a `TorchFunctionMode` was handed."""
        named = bind(function, args, kwargs)
        filled = with_defaults(function, named)
        targets = tensors([kwargs.get("out"), *(named.get(name) for name in mutable_arguments(function))])
        if names.overwrites_by_name(function) or filled.get("inplace") is True:
            targets += tensors(args[0] if args else kwargs.get("input"))
        if filled.get("max_norm") is not None:  # an embedding shortens its rows in place
            targets += tensors(named.get("weight"))
        options = {
            name: value
            for name, value in filled.items()
            if name != "out" and not name.startswith("_") and is_plain(value)
        }
        op, target = names.op_name(function), names.qualified(function)
        call = cls(op, target, named, memory, targets=targets, options=options)
        call.recipe = recipe(op, target, args, kwargs, memory)
        return call

    def finish(self, result: Any) -> None:
        """Look at what came back, and at the version counters of what went in."""
        made = tensors(result)
        raised = [
            (name, tensor)
            for (name, tensor), before in zip(self._read, self._versions, strict=True)
            if _raised(tensor, before, self.targets)
        ]
        self.written = {id(tensor): (name, tensor) for name, tensor in reversed(self._narrowed(raised))}
        returned = {id(tensor) for tensor in made}
        self.outputs = (*made, *(t for key, (_, t) in self.written.items() if key not in returned))
        self._views = {
            id(tensor)
            for tensor in made
            if id(tensor) not in self.written
            and any(self._memory.share(tensor, argument) for _, argument in self._read)
        }

    def is_op(self) -> bool:
        """Whether the call belongs into a graph."""
        if self.op == "data_ptr":
            self._expose_unwritten()
        return self.op not in _SILENT and (bool(self.outputs) or self.op in kinds.ESCAPES)

    def node(self, index: int, module: str, module_type: str, call: int) -> Node:
        """The finished call as a node."""
        arguments = self._arguments()
        return Node(
            index=index,
            op=self.op,
            module=module,
            module_type=module_type,
            call=call,
            parameters=self._parameters,
            buffers=self._buffers,
            inputs=tuple(source for group in arguments.values() for source in group),
            arguments={name: tuple(group) for name, group in arguments.items()},
            outputs=tuple(TensorSpec.of(tensor) for tensor in self.outputs),
            options=self.options,
            writes=tuple(dict.fromkeys(name for name, _ in self.written.values())),
            view=bool(self._views)
            and not self.written
            and len(self._views) == len(set(map(id, self.outputs))),
            target=self.target,
            recipe=self.recipe,
        )

    def settle(self, index: int) -> None:
        """Tell the memory who made and who wrote what."""
        for position, tensor in enumerate(self.outputs):
            self._memory.made(tensor, Edge(index, position), written=id(tensor) not in self._views)
        if self.op in _EXPOSING:
            for _, tensor in self._read:
                self._memory.expose(tensor)
        self._memory.ran(index, self._sources, unwritten=self.op in _UNWRITTEN)

    def _expose_unwritten(self) -> None:
        # A kernel that is launched on raw pointers (Triton) writes into memory made by `empty`.
        for (_, tensor), source in zip(self._read, self._sources, strict=True):
            if self._memory.is_unwritten(source):
                self._memory.expose(tensor)

    def _narrowed(self, raised: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        # Views of one tensor share its version counter: in `q.add_(k)` of two halves only q is written.
        def innocent(tensor: Tensor) -> bool:
            return not _among(tensor, self.targets) and any(
                self._memory.share(tensor, target) for target in self.targets
            )

        return [(name, tensor) for name, tensor in raised if not innocent(tensor)]

    def _arguments(self) -> dict[str, list[Source]]:
        arguments: dict[str, list[Source]] = {}
        for (name, tensor), source in zip(self._read, self._sources, strict=True):
            if not (id(tensor) in self.written and self._overwrites(tensor)):
                arguments.setdefault(name, []).append(source)
        # A write into a part of some memory hands on the other parts too, so whoever reads all of it
        # must find the earlier writers behind this one.
        for name, tensor in self.written.values():
            state = None if self._overwrites(tensor) else self._memory.state(tensor)
            behind = [self._memory.behind(source) for source in arguments.get(name, [])]
            if state is not None and state not in behind:
                arguments.setdefault(name, []).append(state)
        return arguments

    def _overwrites(self, tensor: Tensor) -> bool:
        region = Region.of(tensor)
        return self._whole and region is not None and region.fills_storage()


def _sets_all(op: str, named: Mapping[str, Any]) -> bool:
    return op == "setitem" and any(
        value is ... or value == slice(None) for value in named.values() if not tensors(value)
    )


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _raised(tensor: Tensor, before: int | None, targets: Sequence[Tensor]) -> bool:
    now = _version(tensor)
    # Inference tensors count no versions: the name of the function must do.
    return _among(tensor, targets) if before is None or now is None else now != before


def _among(tensor: Tensor, others: Sequence[Tensor]) -> bool:
    return any(tensor is other for other in others)


def _union(groups: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for group in groups for name in group))
