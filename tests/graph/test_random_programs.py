"""Edges of random programs against two judges that know nothing of graphs: autograd, and trying it out."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from musigma.graph import UNKNOWN, Edge, Graph, Input, Source, record

INPUTS = 3
SHAPE = (2, 4, 6)

Step = tuple[str, int, int, int]

FUNCTIONAL = ("scale", "add", "sub", "clone", "transpose", "chunk", "cat", "stack", "linear")
MUTATING = ("add_", "mul_", "copy_", "setitem", "rows", "view_add_", "half_mul_", "out", "zero_", "data")


def steps(ops: tuple[str, ...]) -> st.SearchStrategy[list[Step]]:
    """Programs: each step names an op and picks its operands among the values so far."""
    pick = st.integers(0, 31)
    return st.lists(st.tuples(st.sampled_from(ops), pick, pick, pick), min_size=1, max_size=12)


class Program(nn.Module):
    """Runs steps over a growing list of tensors of one shape; every value is returned."""

    def __init__(self, program: list[Step]) -> None:
        super().__init__()
        self.program = program
        self.register_buffer("matrix", torch.linspace(-1, 1, 36, dtype=torch.float64).reshape(6, 6))

    def forward(self, *xs: Tensor) -> list[Tensor]:
        values = [x * (1.1 + index) for index, x in enumerate(xs)]
        for number, (op, *picks) in enumerate(self.program):
            a, b, c = (values[pick % len(values)] for pick in picks)
            # Generic factors, so that nothing cancels by chance.
            factor = 0.37 + 0.211 * number
            values += getattr(self, f"_{op.rstrip('_')}{'_inplace' if op.endswith('_') else ''}")(
                a, b, c, factor
            )
        return values

    def _scale(self, a: Tensor, b: Tensor, c: Tensor, factor: float) -> list[Tensor]:
        return [a * factor]

    def _add(self, a: Tensor, b: Tensor, c: Tensor, factor: float) -> list[Tensor]:
        return [a + factor * b]

    def _sub(self, a: Tensor, b: Tensor, c: Tensor, factor: float) -> list[Tensor]:
        return [factor - a - factor * b]

    def _clone(self, a: Tensor, b: Tensor, c: Tensor, factor: float) -> list[Tensor]:
        return [a.clone()]

    def _transpose(self, a: Tensor, b: Tensor, c: Tensor, factor: float) -> list[Tensor]:
        return [a.mT.reshape(SHAPE)]

    def _chunk(self, a: Tensor, b: Tensor, c: Tensor, factor: float) -> list[Tensor]:
        left, right = a.chunk(2, -1)
        return [torch.cat([left * factor, right], -1)]

    def _cat(self, a: Tensor, b: Tensor, c: Tensor, factor: float) -> list[Tensor]:
        return [torch.cat([a, b], 0)[::2] * factor]

    def _stack(self, a: Tensor, b: Tensor, c: Tensor, factor: float) -> list[Tensor]:
        return [torch.stack([a, b, c]).sum(0) * factor]

    def _linear(self, a: Tensor, b: Tensor, c: Tensor, factor: float) -> list[Tensor]:
        return [torch.nn.functional.linear(a, self.matrix * factor)]

    def _add_inplace(self, a: Tensor, b: Tensor, c: Tensor, factor: float) -> list[Tensor]:
        a += factor * b
        return []

    def _mul_inplace(self, a: Tensor, b: Tensor, c: Tensor, factor: float) -> list[Tensor]:
        return [a.mul_(factor)]

    def _copy_inplace(self, a: Tensor, b: Tensor, c: Tensor, factor: float) -> list[Tensor]:
        a.copy_(b * factor)
        return []

    def _setitem(self, a: Tensor, b: Tensor, c: Tensor, factor: float) -> list[Tensor]:
        a[:, 1] = b[:, 2] * factor
        return []

    def _rows(self, a: Tensor, b: Tensor, c: Tensor, factor: float) -> list[Tensor]:
        for row in a.unbind(1):
            row.add_(b[:, 0], alpha=factor)
        return []

    def _view_add_inplace(self, a: Tensor, b: Tensor, c: Tensor, factor: float) -> list[Tensor]:
        a.view(2, 24)[:, ::3].add_(b.reshape(2, 24)[:, :8], alpha=factor)
        return []

    def _half_mul_inplace(self, a: Tensor, b: Tensor, c: Tensor, factor: float) -> list[Tensor]:
        left, right = a.chunk(2, -1)
        left.mul_(factor)
        return [torch.cat([right, left], -1)]

    def _out(self, a: Tensor, b: Tensor, c: Tensor, factor: float) -> list[Tensor]:
        target = torch.zeros(SHAPE, dtype=torch.float64)
        torch.add(a, b, alpha=factor, out=target)
        return [target]

    def _zero_inplace(self, a: Tensor, b: Tensor, c: Tensor, factor: float) -> list[Tensor]:
        a.zero_()
        return [a + b]

    def _data(self, a: Tensor, b: Tensor, c: Tensor, factor: float) -> list[Tensor]:
        a.data.add_(b, alpha=factor)
        return []


def example(seed: int = 0) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(SHAPE, generator=g, dtype=torch.float64) for _ in range(INPUTS))


def reaching(graph: Graph, source: Source) -> set[int]:
    """The inputs that a value depends on, as the graph says."""
    assert source is not UNKNOWN
    sources: set[Source] = {source}
    if isinstance(source, Edge):
        sources = {behind for index in graph.ancestors(source) for behind in graph.nodes[index].inputs}
    assert UNKNOWN not in sources
    return {graph.inputs.index(s.name) for s in sources if isinstance(s, Input)}


def influences(model: Program, xs: tuple[Tensor, ...]) -> list[set[int]]:
    """The inputs that each output really depends on: change one and see what moves."""
    with torch.no_grad():
        base = [y.clone() for y in model(*xs)]
        found: list[set[int]] = [set() for _ in base]
        for index in range(INPUTS):
            moved = [x + 1.3 if i == index else x for i, x in enumerate(xs)]
            for which, (before, after) in enumerate(zip(base, model(*moved), strict=True)):
                if not torch.equal(before, after):
                    found[which].add(index)
    return found


@given(steps(FUNCTIONAL))
def test_functional_edges_are_autograds(program: list[Step]) -> None:
    model, xs = Program(program), tuple(x.requires_grad_() for x in example())
    graph = record(model, xs)
    for source, y in zip(graph.output, model(*xs), strict=True):
        grads = torch.autograd.grad(y.sum(), xs, allow_unused=True, retain_graph=True)
        assert reaching(graph, source) == {i for i, g in enumerate(grads) if g is not None}


@settings(max_examples=40)
@given(steps(FUNCTIONAL + MUTATING))
def test_no_influence_is_missed_when_memory_is_written(program: list[Step]) -> None:
    model, xs = Program(program), example()
    with torch.no_grad():
        graph = record(model, xs)
    for source, real in zip(graph.output, influences(model, xs), strict=True):
        assert real <= reaching(graph, source)


WHOLE = ("scale", "add", "sub", "clone", "add_", "mul_", "copy_", "zero_", "out", "data", "linear")


@given(steps(WHOLE))
def test_writes_of_whole_tensors_leave_exact_edges(program: list[Step]) -> None:
    model, xs = Program(program), example()
    with torch.no_grad():
        graph = record(model, xs)
    for source, real in zip(graph.output, influences(model, xs), strict=True):
        assert reaching(graph, source) == real


@given(steps((*WHOLE, *FUNCTIONAL)))
def test_edges_lead_to_the_very_values(program: list[Step]) -> None:
    model, xs = Program(program), example()
    with torch.no_grad():
        plain = [y.clone() for y in model(*xs)]
        heard: dict[tuple[int, int], Tensor] = {}

        def listen(node: object, args: object, kwargs: object, outputs: tuple[Tensor, ...]) -> None:
            for position, output in enumerate(outputs):
                heard[(node.index, position)] = output  # type: ignore[attr-defined]

        graph = record(model, xs, listen=listen)
    for source, y in zip(graph.output, plain, strict=True):
        assert isinstance(source, Edge)
        assert torch.equal(heard[source.key], y)
    assert all(torch.equal(x, fresh) for x, fresh in zip(xs, example(), strict=True))
