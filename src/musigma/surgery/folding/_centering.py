"""LayerNorm's centering into whatever writes its input, so that an RMSNorm is left.

    LayerNorm(x) = RMSNorm(x − mean(x)),   x − mean(x) = Σᵢ (xᵢ − mean(xᵢ))   over the writers of a stream

So if everything that is added to a residual stream has mean 0 along its features, and nothing but LayerNorms
reads the stream, none of them has to subtract a mean any more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

import musigma.nn as ours
from musigma.graph import Buffer, Edge, Node, Parameter, Source, kinds
from musigma.surgery._places import (
    Observed,
    called,
    replace_module,
    why_branched,
    why_hooked,
    why_not_module,
)
from musigma.surgery.folding._affine import RefusalError, neutral
from musigma.surgery.folding._layers import (
    Edit,
    Layer,
    can_untie,
    center_outputs,
    center_tensor,
    layer_of,
    untie,
    why_not_layer,
)
from musigma.surgery.folding._moves import shape_of, sources_of
from musigma.surgery.folding._place import Place, Plan, names

_RMS: dict[type[nn.Module], type[nn.RMSNorm]] = {nn.LayerNorm: nn.RMSNorm, ours.LayerNorm: ours.RMSNorm}
_NORMS = frozenset(("layer_norm", "add_layer_norm"))
_NO_MOVERS = kinds.POOLINGS | kinds.UPSAMPLINGS | kinds.PADDINGS


def fold_centering(plan: Plan) -> None:
    """Add the places of every LayerNorm that can become an RMSNorm, a whole stream at a time."""
    seen: set[int] = set()
    for node in plan.observed.graph.nodes:
        if node.op not in _NORMS or node.index in seen:
            continue
        stream = _Stream(plan, int(node.outputs[0].shape[-1]))
        try:
            stream.explore(node)
            plan.places += stream.places()
        except RefusalError as refusal:
            plan.refuse(node.module or "the model", f"it keeps its centering: {refusal}")
        else:
            seen |= {norm.index for norm in stream.norms}


@dataclass(frozen=True)
class _Value:
    """A part of a stream; its features lie along `axis`, counted from the end."""

    source: Source
    axis: int

    @property
    def key(self) -> object:
        return self.source.key if isinstance(self.source, Edge) else self.source


@dataclass
class _Stream:
    """Everything that is added up before some LayerNorms, and who reads it."""

    plan: Plan
    size: int
    norms: list[Node] = field(default_factory=list)
    writers: dict[str, Layer] = field(default_factory=dict)
    constants: dict[str, int] = field(default_factory=dict)
    visited: set[int] = field(default_factory=set)

    @property
    def observed(self) -> Observed:
        return self.plan.observed

    def explore(self, start: Node) -> None:
        """Follow the stream from a norm's input, against the data and with it.

        Raises:
            RefusalError: something writes or reads it for which the mean matters.
        """
        if self.size < 2:
            raise RefusalError("it normalizes single values")
        pending = deque(
            _Value(s, -1) for role in ("input", "residual") for s in start.arguments.get(role, ())
        )
        seen: set[object] = set()
        while pending:
            value = pending.popleft()
            if value.key not in seen:
                seen.add(value.key)
                pending.extend(self._behind(value))
                pending.extend(self._ahead(value))

    def _behind(self, value: _Value) -> Iterator[_Value]:
        """The values that one is made of."""
        source = value.source
        if isinstance(source, Parameter | Buffer):
            self.constants[source.name] = value.axis
            return
        if not isinstance(source, Edge):
            raise RefusalError(f"{source}, which no layer made, is part of its input")
        node = self.observed.graph.nodes[source]
        self.visited.add(node.index)
        layer = layer_of(self.observed, node)
        if layer is not None and source.output == 0:
            self._write(layer, value)
        elif self._scales(node):
            yield _Value(self._signal(node), value.axis)
        elif self._adds(node, value.axis):
            yield from (_Value(s, value.axis) for s in node.inputs)
        elif node.op == "add_layer_norm" and source.output == 1:
            yield from (_Value(s, -1) for role in ("input", "residual") for s in node.arguments[role])
        elif self._moves(node):
            sources = sources_of(self.observed, node)
            for axis in range(-len(shape_of(self.observed, sources[0])), 0):
                if (source.output, value.axis) in self._moved(node, axis):
                    yield from (_Value(s, axis) for s in sources)
                    return
            raise RefusalError(f"{called(node)} mixes its features")
        else:
            raise RefusalError(f"{called(node)} is part of its input, whose mean can't be taken out before")

    def _ahead(self, value: _Value) -> Iterator[_Value]:
        """The values that one becomes part of."""
        graph = self.observed.graph
        if isinstance(value.source, Parameter | Buffer):
            return  # its other readers are looked at in the end
        if any(isinstance(s, Edge) and s.key == value.key for s in graph.output):
            raise RefusalError("the model returns what it normalizes")
        for node in graph.consumers(value.source):
            self.visited.add(node.index)
            if node.writes and node.op not in ("add", "dropout"):
                raise RefusalError(f"{called(node)} overwrites what it normalizes")
            if node.op in _NORMS and self._reads(node, value):
                self.norms += [node] if node not in self.norms else []
                yield from ([_Value(Edge(node.index, 1), -1)] if node.op == "add_layer_norm" else [])
            elif self._scales(node) or self._adds(node, value.axis):
                yield _Value(Edge(node.index), value.axis)
            elif self._moves(node):
                moved = self._moved(node, value.axis)
                if len(moved) < len(node.outputs):
                    raise RefusalError(f"{called(node)} mixes its features")
                yield from (_Value(Edge(node.index, position), axis) for position, axis in moved)
            else:
                raise RefusalError(f"{called(node)} also reads what it normalizes, mean and all")

    def _reads(self, node: Node, value: _Value) -> bool:
        """Whether a LayerNorm normalizes the features, and reads the value as nothing else."""
        roles = {role for role, sources in node.arguments.items() if value.source in sources}
        return (
            roles <= {"input", "residual"} and value.axis == -1 and tuple(_normalized(node)) == (self.size,)
        )

    def _scales(self, node: Node) -> bool:
        """Whether an op hands the value on as it is, or times one number: a mean of 0 stays one."""
        if node.index in self.plan.removed or neutral(self.observed, node):
            return True
        if node.op not in ("mul", "div") or node.options.get("rounding_mode") is not None:
            return False
        others = [s for s in node.inputs if s is not self._signal(node)]
        numbers = [self.observed.value(s) for s in others]
        alone = not numbers and isinstance(node.options.get("other"), int | float)
        return alone or (len(numbers) == 1 and numbers[0] is not None and numbers[0].numel() == 1)

    def _signal(self, node: Node) -> Source:
        live = [s for s in node.inputs if self.observed.graph.is_live(s)]
        return live[0] if live else node.inputs[0]

    def _adds(self, node: Node, axis: int) -> bool:
        """Whether an op adds two values that both have the features along one axis."""
        if node.op not in ("add", "sub") or len(node.inputs) != 2:
            return False
        shapes = [shape_of(self.observed, s) for s in node.inputs]
        return all(len(shape) >= -axis and shape[axis] == self.size for shape in shapes)

    def _moves(self, node: Node) -> bool:
        return node.index in self.observed.kept and node.op not in _NO_MOVERS

    def _moved(self, node: Node, axis: int) -> list[tuple[int, int]]:
        """Where the features of a view's inputs lie in its outputs: position and axis of each."""
        marked = []
        for source in sources_of(self.observed, node):
            shape = shape_of(self.observed, source)
            if len(shape) < -axis or shape[axis] != self.size:
                return []
            marked.append(_features(shape, axis))
        result = self.observed.kept[node.index](*marked)
        outputs = [result] if isinstance(result, Tensor) else list(result)
        return [
            (position, axis)
            for position, output in enumerate(outputs)
            for axis in range(-output.ndim, 0)
            if output.shape[axis] == self.size and torch.equal(output, _features(tuple(output.shape), axis))
        ]

    def _write(self, layer: Layer, value: _Value) -> None:
        axis = layer.axis(len(shape_of(self.observed, value.source))) - len(
            shape_of(self.observed, value.source)
        )
        if axis != value.axis:
            raise RefusalError(f"{called(layer.node)} writes its features along another axis")
        self.writers[layer.weight] = layer

    def places(self) -> list[Place]:
        """A place for every norm of the stream; the first holds what is done to the writers.

        Raises:
            RefusalError: a writer or a norm can't be changed.
        """
        untied: set[str] = set()
        edits: list[Edit] = []
        for layer in self.writers.values():
            edits += self._center(layer, untied)
        edits += [self._center_constant(name, axis) for name, axis in self.constants.items()]
        swaps = [self._swap(norm) for norm in self.norms]
        paths = [n.module for n in self.norms] + [layer.node.module for layer in self.writers.values()]
        paths += [self.observed.graph.nodes[index].module for index in self.visited]
        graph, model = self.observed.graph, self.observed.model
        reason = why_hooked(model, paths) or why_branched(graph, paths)
        if reason is not None:
            raise RefusalError(reason)
        between = frozenset(paths) - {"", *(n.module for n in self.norms)}
        written = names([name.rpartition(".")[0] or name for name in self.writers] + list(self.constants))
        found: list[Place] = []
        for norm, swap in zip(self.norms, swaps, strict=True):
            own = (swap,) if found else (*edits, swap)
            line = "becomes an RMSNorm" + ("" if found else f": the mean is taken out of {written}")
            own_untied = frozenset() if found else frozenset(untied)
            found.append(
                Place(norm.module, line, own, (norm.module,), frozenset(), between, own_untied, "centering")
            )
        return found

    def _center(self, layer: Layer, untied: set[str]) -> Iterator[Edit]:
        shifts = bool(layer.node.arguments.get(layer.bias_role))
        done = self.plan.untied | untied
        group = next(g for g in self.observed.graph.parameters if layer.weight in g)
        for node in self.observed.graph.consumers(Parameter(group[0])):
            other = layer_of(self.observed, node)
            if node.index == layer.node.index or node.module in done or other is None:
                continue
            if can_untie(self.observed, other):
                untied.add(node.module)
                yield untie(other)
        loose = self.plan.untied | untied
        alone = {n.rpartition(".")[0] for n in group} - loose == {layer.weight.rpartition(".")[0]}
        mine = frozenset([layer.node.module]) if alone and loose else frozenset()
        reason = why_not_layer(self.observed, layer, shifts=shifts, untied=mine)
        if reason is not None:
            raise RefusalError(f"{layer.node.module or 'the model'} can't take it: {reason}")
        yield center_outputs(layer)

    def _center_constant(self, name: str, axis: int) -> Edit:
        graph = self.observed.graph
        group = next(g for g in (*graph.parameters, *graph.buffers) if g[0] == name)
        if len(group) > 1:
            raise RefusalError(f"{name} is tied: {', '.join(group)}")
        others = [n for n in graph.consumers(name) if n.index not in self.visited]
        if others:
            raise RefusalError(f"{name} is also read by {called(others[0])}")
        return center_tensor(name, axis)

    def _swap(self, norm: Node) -> Edit:
        """Put an RMSNorm in the place of a LayerNorm that has no bias, or none any more."""
        path = norm.module
        if f"{path} (centering)" in self.plan.excluded:
            raise RefusalError(self.plan.excluded[f"{path} (centering)"])
        module = self.observed.model.get_submodule(path)
        kind = _RMS.get(type(module))
        reason = why_not_module(self.observed, path)
        if kind is None:
            raise RefusalError(f"{called(norm)} is no LayerNorm that an RMSNorm can replace")
        parent = self.observed.model.get_submodule(path.rpartition(".")[0])
        if isinstance(parent, nn.TransformerEncoderLayer):
            reason = reason or "its fast path computes a LayerNorm of its own"
        bias = getattr(module, "bias", None)
        if bias is not None and bool((bias != 0).any()) and path not in self.plan.done:
            reason = reason or f"{path} has a bias, which an RMSNorm has no place for"
        if reason is not None:
            raise RefusalError(reason)

        def edit(model: nn.Module) -> None:
            old = model.get_submodule(path)
            shape, eps, weight = old.normalized_shape, old.eps, old._parameters.get("weight")
            new = kind(shape, eps=eps, elementwise_affine=weight is not None)  # type: ignore[arg-type]
            if weight is not None:
                new.register_parameter("weight", weight)
            replace_module(model, path, new)

        return edit


def _normalized(node: Node) -> tuple[int, ...]:
    shape = node.options.get("normalized_shape")
    return tuple(shape) if isinstance(shape, list | tuple) else ()


def _features(shape: tuple[int, ...], axis: int) -> Tensor:
    along = [1] * len(shape)
    along[axis] = -1
    return torch.arange(shape[axis], dtype=torch.float64).reshape(along).expand(shape)
