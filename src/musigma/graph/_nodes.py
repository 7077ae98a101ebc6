"""The parts of a graph: nodes, and the sources that their inputs come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType

import torch

from musigma.graph._kinds import ops


class Edge(int):
    """The index of the node that made a value, and which of its outputs the value is.

    An edge compares, hashes and indexes as the plain node index, so `0 in node.inputs` and
    `graph.nodes[edge]` read as they should; `edge.output` tells the halves of a `chunk` apart.

    Example:
        >>> Edge(4) == 4, Edge(4, output=1).output, Edge(4, output=1)
        (True, 1, Edge(4, output=1))
    """

    output: int

    def __new__(cls, node: int, output: int = 0) -> Edge:
        self = super().__new__(cls, node)
        self.output = output
        return self

    def __reduce__(self) -> tuple[type[Edge], tuple[int, int]]:
        return Edge, self.key

    @property
    def key(self) -> tuple[int, int]:
        """Node and output as a pair, for sets in which different outputs must differ."""
        return int(self), self.output

    def __repr__(self) -> str:
        return f"Edge({int(self)})" if self.output == 0 else f"Edge({int(self)}, output={self.output})"

    def __str__(self) -> str:
        return f"%{int(self)}" if self.output == 0 else f"%{int(self)}.{self.output}"


@dataclass(frozen=True)
class Input:
    """A tensor of the example, under the name that `forward` gives it (`x`, `batch['image']`)."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Parameter:
    """A parameter, under its first qualified name (`Node.parameters` lists the tied ones too)."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Buffer:
    """A buffer, under its first qualified name."""

    name: str

    def __str__(self) -> str:
        return self.name


class Unknown(Enum):
    """The type of `UNKNOWN`."""

    UNKNOWN = "?"

    def __repr__(self) -> str:
        return "UNKNOWN"

    def __str__(self) -> str:
        return "?"


UNKNOWN = Unknown.UNKNOWN
"""A tensor that is no input, parameter, buffer or recorded output: whoever changes a model refuses
what lies downstream of it."""

Source = Edge | Input | Parameter | Buffer | Unknown


@dataclass(frozen=True)
class TensorSpec:
    """What is known of a tensor after it is gone."""

    shape: tuple[int | torch.SymInt, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        """The spec of a live tensor."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.device)

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Slot:
    """The place of a tensor in a recipe."""

    position: int


@dataclass(frozen=True)
class Recipe:
    """How to run an elementwise op again: its function and arguments, with slots where tensors stood.

    Attributes:
        target: the function, as torch spells it.
        args: positional arguments.
        kwargs: keyword arguments.
        operands: what stood in each slot: a source, or the number that a constant tensor held everywhere.
    """

    target: str
    args: tuple[object, ...]
    kwargs: Mapping[str, object]
    operands: tuple[Source | float, ...]


@dataclass(frozen=True)
class Node:
    """One call of one op.

    Attributes:
        index: its place in `graph.nodes`, which is execution order.
        op: the normalized name: `relu` for `F.relu`, `torch.relu_`, `Tensor.relu` and `nn.ReLU`.
        module: qualified path of the innermost registered module that was running; `""` is the model.
        module_type: class name of that module.
        call: how often that module had been called before this call: 0 in its first call.
        parameters: qualified names of the parameters whose memory this call read, itself or through a
            view; of a tied parameter every name.
        buffers: the same for buffers.
        inputs: where each tensor argument came from, in argument order.
        arguments: the same by argument name: `{"input": (Edge(0),), "weight": (Parameter("w"),)}`.
        outputs: the result's tensors, then those that were written and not returned.
        options: the arguments that hold no tensor, by name, where they are plain data.
        writes: names of the arguments whose memory this call changed.
        view: the result shares the memory of an argument, and nothing was written.
        target: the function that ran, as torch spells it (`torch.nn.functional.relu`).
        recipe: for elementwise ops what it takes to run them again.
    """

    index: int
    op: str
    module: str
    module_type: str
    call: int
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    inputs: tuple[Source, ...]
    arguments: Mapping[str, tuple[Source, ...]]
    outputs: tuple[TensorSpec, ...]
    options: Mapping[str, object] = field(default_factory=dict)
    writes: tuple[str, ...] = ()
    view: bool = False
    target: str = ""
    recipe: Recipe | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "arguments", MappingProxyType(dict(self.arguments)))
        object.__setattr__(self, "options", MappingProxyType(dict(self.options)))

    def __hash__(self) -> int:
        return hash((self.index, self.op, self.module))

    def __reduce__(self) -> tuple[object, ...]:
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        values["arguments"], values["options"] = dict(self.arguments), dict(self.options)
        return _rebuild, (values,)

    @property
    def shapes(self) -> tuple[tuple[int | torch.SymInt, ...], ...]:
        """The shape of each output."""
        return tuple(spec.shape for spec in self.outputs)

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtype of each output."""
        return tuple(spec.dtype for spec in self.outputs)

    @property
    def inplace(self) -> bool:
        """Whether the call wrote over its own first argument (`relu_`, `x += y`, `x[0] = y`)."""
        return "input" in self.writes

    def __repr__(self) -> str:
        return f"<Node {self}>"

    def __str__(self) -> str:
        operands = [
            _join(sources) if name in _PLAIN_ARGUMENTS else f"{name}={_join(sources)}"
            for name, sources in self.arguments.items()
        ]
        for name, value in self.options.items():
            if name in _TOLD and not (value is None or value in _NEUTRAL.get(name, ())):
                operands.append(str(value) if name in _PLAIN_ARGUMENTS else f"{name}={value}")
        where = f"{self.module or '(model)'}: {self.module_type}" + (f" #{self.call}" if self.call else "")
        results = ", ".join(map(str, self.outputs)) or "-"
        name = f"{self.op}{'_' if self.inplace else ''}"
        return f"%{self.index} = {name}({', '.join(operands)}) -> {results}  [{where}]"


# Arguments that need no name in print: the signal.
_PLAIN_ARGUMENTS = frozenset(("input", "other", "tensors"))

# Numbers that say what an op does; sizes can be seen in the shapes, and switches are most often off.
_TOLD = ops(
    """
    other alpha exponent negative_slope min max p dim dim0 dim1 dims kernel_size stride groups num_groups
    chunks index approximate value
    """
)
_ONES: tuple[object, ...] = (1, (1,), (1, 1), (1, 1, 1))
_NEUTRAL = {"alpha": _ONES, "stride": _ONES, "groups": _ONES, "approximate": ("none",)}


def _rebuild(values: dict[str, object]) -> Node:
    return Node(**values)  # type: ignore[arg-type]  # the fields of a Node, as __reduce__ stored them


def _join(sources: tuple[Source, ...]) -> str:
    return str(sources[0]) if len(sources) == 1 else "(" + ", ".join(map(str, sources)) + ")"
