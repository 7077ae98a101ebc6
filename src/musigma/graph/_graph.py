"""The recorded graph, and the questions that the other floors ask of it."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from musigma.graph import _kinds as kinds
from musigma.graph._activations import Activation, find_activation
from musigma.graph._nodes import UNKNOWN, Buffer, Edge, Input, Node, Parameter, Source, TensorSpec
from musigma.graph._norms import Norm, NormPath, find_norm, find_norms
from musigma.graph._residual import Branch, find_branches


@dataclass(frozen=True)
class Graph:
    """What a model did with one example: nodes in execution order, tied together by their inputs.

    A graph holds names, shapes and numbers, no tensors and no modules: it can be kept, copied and
    pickled. Iterating gives the nodes.

    Attributes:
        nodes: every recorded op.
        output: where each tensor that the model returned came from.
        output_names: the expressions that reach those tensors in what was returned (`""` if it is one).
        inputs: names of the example's tensors.
        parameters: all parameters of the model, each as the tuple of its names.
        buffers: the same for buffers.
        specs: shape, dtype and device of every parameter and buffer, by its first name.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from musigma.graph import record
        >>> block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
        >>> graph = record(block.eval(), torch.zeros(3, 4))
        >>> [node.op for node in graph]
        ['linear', 'batch_norm', 'relu', 'linear']
        >>> graph.producer(graph.output[0]).module
        '3'
        >>> [node.op for node in graph.consumers("0.weight")]
        ['linear']
        >>> graph.following_activation("0.weight").name
        'relu'
        >>> graph.norm_after("0.bias").module
        '1'
        >>> [graph.weights(node) for node in graph.weight_layers()]
        [('0.weight',), ('3.weight',)]
        >>> [graph.depth(node) for node in graph]
        [1, 2, 3, 4]
    """

    nodes: tuple[Node, ...]
    output: tuple[Source, ...]
    output_names: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    parameters: tuple[tuple[str, ...], ...] = ()
    buffers: tuple[tuple[str, ...], ...] = ()
    specs: Mapping[str, TensorSpec] = field(default_factory=dict, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    def __getitem__(self, index: int) -> Node:
        return self.nodes[index]

    def __repr__(self) -> str:
        return (
            f"Graph({len(self.nodes)} nodes, inputs=({', '.join(self.inputs)}), "
            f"{len(self.parameters)} parameters, {len(self.output)} outputs)"
        )

    def __str__(self) -> str:
        returned = ", ".join(
            f"{name}={source}" if name else str(source)
            for name, source in zip(self.output_names, self.output, strict=True)
        )
        return "\n".join([*map(str, self.nodes), f"return {returned or None}"])

    def producer(self, source: Source | Node) -> Node | None:
        """The node that made a value.

        Args:
            source: an entry of `node.inputs` or `graph.output`. A node is asked for its first input.

        Returns:
            The node; None for inputs, parameters, buffers, `UNKNOWN`, and a node without inputs.
        """
        if isinstance(source, Node):
            return self.producer(source.inputs[0]) if source.inputs else None
        return self.nodes[source] if isinstance(source, int) else None

    def consumers(self, source: Source | Node | int | str) -> tuple[Node, ...]:
        """The nodes that read a value, in execution order.

        Args:
            source: a node or its index for the readers of any of its outputs; an `Edge` taken from
                `node.inputs` for those of that output; an `Input`, `Parameter` or `Buffer`, or
                the name of a parameter, buffer or input.

        Returns:
            Each reading node once.
        """
        return tuple(self.nodes[index] for index in self._readers.get(self._key(source), ()))

    def node_of(self, module: str) -> list[Node]:
        """The nodes that a module ran itself, in execution order.

        A module that another one runs in its place (the output projection of `nn.MultiheadAttention`)
        gives the nodes that read its parameters.

        Args:
            module: qualified path; `""` for the model itself.

        Returns:
            The nodes, of all calls; empty for a container that computes nothing.
        """
        own = [node for node in self.nodes if node.module == module]
        if own or not module:
            return own
        prefix = f"{module}."
        inside = any(node.module.startswith(prefix) for node in self.nodes)
        return [] if inside else [n for n in self.nodes if any(p.startswith(prefix) for p in n.parameters)]

    def uses(self, parameter: str) -> tuple[Node, ...]:
        """The nodes in which a parameter meets the signal.

        Views of the parameter and expressions of parameters alone (weight norm, a sum of two
        weights) are walked through.

        Args:
            parameter: qualified name; of a tied parameter any of its names.

        Returns:
            The nodes, in execution order; empty if the forward did not read the parameter.

        Raises:
            ValueError: the model has no such parameter.
        """
        found: set[int] = set()
        pending = [node.index for node in self.consumers(Parameter(self.canonical(parameter)))]
        seen = set(pending)
        while pending:
            node = self.nodes[pending.pop()]
            readers = self.consumers(node)
            if self.is_live(node) or not readers or node.arguments.get("weight"):
                found.add(node.index)
                continue
            pending += [reader.index for reader in readers if reader.index not in seen]
            seen |= {reader.index for reader in readers}
        return tuple(self.nodes[index] for index in sorted(found))

    def weights(self, node: Node) -> tuple[str, ...]:
        """The weight parameters that a node mixes features with, biases left out.

        Args:
            node: a node of this graph.

        Returns:
            Qualified names, also of weights that reach the node through views or weight norm; empty
            for ops that are no sums of products, and for products of two signals.
        """
        if node.op not in kinds.WEIGHT_OPS:
            return ()
        roles = [name for name in node.arguments if "weight" in name or name in ("params", "w_ih", "w_hh")]
        if not roles and not self.is_live(node):
            return ()  # an expression of weights, which is part of the layer that uses it
        added = ("bias", "input") if node.op in ("addmm", "addmv", "addbmm", "baddbmm") else ("bias",)
        names: dict[str, None] = {}
        for role in roles or [name for name in node.arguments if name not in added]:
            for source in node.arguments[role]:
                names |= dict.fromkeys(self._static_parameters(source))
        # A recurrent op takes its weights and biases as one list.
        return tuple(
            n for n in names if "params" not in roles or len(self.specs[self.canonical(n)].shape) > 1
        )

    def weight_layers(self) -> tuple[Node, ...]:
        """The nodes that mix features with a weight parameter, in execution order."""
        return tuple(node for node in self.nodes if self.weights(node))

    def is_live(self, source: Source | Node) -> bool:
        """Whether a value depends on the example (or on something unknown), not on parameters alone."""
        if isinstance(source, Node):
            return source.index in self._live
        if isinstance(source, int):
            return int(source) in self._live
        return isinstance(source, Input) or source is UNKNOWN

    def depth(self, node: Node | int) -> int:
        """How many nodes the longest path from an input to a node has, itself included.

        Expressions of parameters alone have depth 0.
        """
        return self._depths[node.index if isinstance(node, Node) else node]

    def ancestors(self, source: Source | Node) -> frozenset[int]:
        """Indices of the nodes that a value depends on, its own node included."""
        start = source.index if isinstance(source, Node) else source
        if not isinstance(start, int):
            return frozenset()
        found, pending = {int(start)}, [int(start)]
        while pending:
            behind = {
                int(edge) for edge in self.nodes[pending.pop()].inputs if isinstance(edge, Edge)
            } - found
            found |= behind
            pending += behind
        return frozenset(found)

    def descendants(self, source: Source | Node | int | str) -> frozenset[int]:
        """Indices of the nodes that depend on a value; a node is not its own descendant.

        `descendants(UNKNOWN)` is what nobody may change a model on.
        """
        pending = [node.index for node in self.consumers(source)]
        found = set(pending)
        while pending:
            ahead = {node.index for node in self.consumers(pending.pop())} - found
            found |= ahead
            pending += ahead
        return frozenset(found)

    def following_activation(self, parameter: str) -> Activation | None:
        """The activation that the output of the op using a parameter goes into.

        May lie between: views, casts, dropout, pooling, norms, biases and scales, and a sum with another
        signal that goes nowhere but into the activation. A product of two signals ends the way.

        Args:
            parameter: qualified name, as in `model.named_parameters()`.

        Returns:
            The nearest activation; None if a weight layer, a product of two signals, a softmax or the
            end of the model comes first.

        Raises:
            ValueError: the model has no such parameter.
        """
        return find_activation(self, parameter)

    def norm_after(self, parameter: str, *, only: bool = True) -> Node | None:
        """The normalization that the output of the op using a parameter feeds, values unchanged.

        Views, casts and inactive dropout may lie between; additions and pooling may not.

        Args:
            parameter: qualified name.
            only: accept the norm only if the output goes nowhere else, and so at every use.

        Returns:
            The norm node of the first use, or None. `norm_path` tells what lies between.

        Raises:
            ValueError: the model has no such parameter.
        """
        path = find_norm(self, parameter)
        return path.norm if path is not None and (path.only or not only) else None

    def norm_path(self, parameter: str) -> NormPath | None:
        """Like `norm_after(only=False)`, with the nodes between and whether nothing else is fed."""
        return find_norm(self, parameter)

    def norms(self) -> tuple[Norm, ...]:
        """Every normalization in execution order, those written out in arithmetic included.

        Example:
            >>> import torch
            >>> from torch import nn
            >>> from musigma.graph import record
            >>> class Unit(nn.Module):
            ...     def forward(self, x):
            ...         return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
            >>> [(norm.node.index, norm.centered) for norm in record(Unit(), torch.ones(2, 4)).norms()]
            [(4, False)]
        """
        return self._norms

    def residual_branches(self) -> tuple[Branch, ...]:
        """Every sum of a skip path and a branch, in execution order of the sums.

        A skip path may be scaled by a constant, subsampled, or projected by one weight layer and a norm.
        Sums of gates, of embeddings and of rotary halves are none, and neither is a concatenation.

        Returns:
            A `Branch` each; what is skipped over by parallel branches appears once for each of them.

        Example:
            >>> import torch
            >>> from torch import nn
            >>> from musigma.graph import record
            >>> layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)
            >>> graph = record(layer, torch.zeros(1, 3, 8))
            >>> [(branch.last_parameter, len(branch.norms)) for branch in graph.residual_branches()]
            [('self_attn.out_proj.weight', 1), ('linear2.weight', 1)]
        """
        return self._branches

    def canonical(self, parameter: str) -> str:
        """The first name of a parameter.

        Raises:
            ValueError: the model has no such parameter.
        """
        if parameter not in self._canonical:
            close = difflib.get_close_matches(parameter, self._canonical, n=3)
            hint = f"did you mean {' or '.join(map(repr, close))}?" if close else "see graph.parameters"
            raise ValueError(
                f"parameter must be a name from model.named_parameters(), got {parameter!r}; {hint}"
            )
        return self._canonical[parameter]

    def __getstate__(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @cached_property
    def _canonical(self) -> dict[str, str]:
        return {name: group[0] for group in self.parameters for name in group}

    @cached_property
    def _norms(self) -> tuple[Norm, ...]:
        return find_norms(self)

    @cached_property
    def _branches(self) -> tuple[Branch, ...]:
        return find_branches(self)

    @cached_property
    def _readers(self) -> dict[object, tuple[int, ...]]:
        readers: dict[object, dict[int, None]] = {}
        for node in self.nodes:
            for source in node.inputs:
                readers.setdefault(source.key if isinstance(source, Edge) else source, {})[node.index] = None
                if isinstance(source, Edge):
                    readers.setdefault(int(source), {})[node.index] = None
        return {key: tuple(found) for key, found in readers.items()}

    @cached_property
    def _live(self) -> frozenset[int]:
        live: set[int] = set()
        for node in self.nodes:
            if any(int(s) in live if isinstance(s, Edge) else self.is_live(s) for s in node.inputs):
                live.add(node.index)
        return frozenset(live)

    @cached_property
    def _depths(self) -> tuple[int, ...]:
        depths: list[int] = []
        for node in self.nodes:
            behind = max((depths[source] for source in node.inputs if isinstance(source, Edge)), default=0)
            depths.append(behind + 1 if node.index in self._live else 0)
        return tuple(depths)

    def _key(self, source: Source | Node | int | str) -> object:
        if isinstance(source, Node):
            return source.index
        if isinstance(source, Edge):
            return source.key
        if isinstance(source, str):
            return self._named(source)
        return source

    def _named(self, name: str) -> Source:
        if name in self.inputs:
            return Input(name)
        for group in self.buffers:
            if name in group:
                return Buffer(group[0])
        return Parameter(self.canonical(name))

    def _static_parameters(self, source: Source) -> tuple[str, ...]:
        """The parameters that a value without live parts is made from."""
        if isinstance(source, Parameter):
            return next((group for group in self.parameters if group[0] == source.name), (source.name,))
        if not isinstance(source, Edge) or self.is_live(source):
            return ()
        return tuple(
            dict.fromkeys(
                name for index in sorted(self.ancestors(source)) for name in self.nodes[index].parameters
            )
        )
