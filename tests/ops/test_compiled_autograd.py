"""Compiled autograd records every op's backward, with what is hooked to it and added up behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from musigma import ops
from musigma.ops import Op, Sample

pytestmark = pytest.mark.compile


def richest(op: Op) -> Sample:
    """The sample with most of the optional tensors."""
    samples = (s for s in op.samples("cpu", torch.float32) if s.args[0].numel())
    return max(samples, key=lambda s: sum(isinstance(a, Tensor) for a in s.args))


def plainest(op: Op) -> Sample:
    return next(s for s in op.samples("cpu", torch.float32) if s.args[0].numel())


CALLS = [
    pytest.param(op, s, id=f"{op.name}-{s.name}")
    for op in ops.OPS.values()
    for s in (plainest(op), richest(op))
]
EVERY = [pytest.param(op, id=op.name) for op in ops.OPS.values()]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def enabled(backend: str = "eager") -> Any:
    return torch._dynamo.compiled_autograd._enable(torch.compile(backend=backend, fullgraph=True))


def train(op: Op, sample: Sample, inside: Callable[[], Any], times: int = 2) -> list[Any]:
    """Gradients after `times` backward passes, each through hooks on a result and an input."""
    places = [i for i in op.differentiable if sample.args[i] is not None]
    args = list(sample.args)
    leaves = [sample.args[i].detach().clone().requires_grad_() for i in places]
    for i, leaf in zip(places, leaves, strict=True):
        args[i] = leaf
    with inside():
        for _ in range(times):
            results = op(*args)
            results = results if isinstance(results, tuple) else (results,)
            results = [results[i] for i in op.differentiable_outputs]
            results[0].register_hook(lambda g: g * 2)
            leaves[0].register_hook(lambda g: g + 1)
            sum(r.pow(2).sum() for r in results).backward()
    return [leaf.grad for leaf in leaves]


def assert_equal(got: list[Tensor], want: list[Tensor]) -> None:
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        # the same kernels in the same order
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("op", "sample"), CALLS)
def test_hooks_and_accumulated_gradients(op: Op, sample: Sample) -> None:
    assert_equal(train(op, sample, enabled), train(op, sample, nullcontext))
    assert counters["compiled_autograd"]["captures"]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("op", EVERY)
def test_every_backend(op: Op, backend: str) -> None:
    sample = richest(op)
    got = train(op, sample, lambda: enabled(backend), times=1)
    assert_equal(got, train(op, sample, nullcontext, times=1))


@pytest.mark.parametrize("op", EVERY)
def test_one_needed_gradient_at_a_time(op: Op) -> None:
    """Which gradients are needed is part of what a graph was compiled for."""
    sample = richest(op)
    places = [i for i in op.differentiable if sample.args[i] is not None]

    def grads(inside: Any) -> list[Tensor]:
        found = []
        with inside:
            for chosen in places:
                args = list(sample.args)
                args[chosen] = args[chosen].detach().clone().requires_grad_()
                results = op(*args)
                results = results if isinstance(results, tuple) else (results,)
                sum(results[i].pow(2).sum() for i in op.differentiable_outputs).backward()
                found.append(args[chosen].grad)
        return found

    assert_equal(grads(enabled()), grads(nullcontext()))


def test_another_constant_is_another_graph() -> None:
    """eps, center and the like are baked into a graph, which must not serve a call with others."""
    x, weight = torch.randn(4, 6), torch.rand(6) + 0.5

    def grads(inside: Any) -> list[Tensor]:
        found = []
        with inside:
            for n_dims, eps, center in ((1, 1e-5, True), (1, 1.0, True), (1, 1.0, False), (1, 1e-5, True)):
                leaf = x.clone().requires_grad_()
                sample = list(next(ops.row_norm.samples("cpu", torch.float32)).args)
                sample[:6] = [leaf, n_dims, weight, None, eps, center]
                ops.row_norm(*sample)[0].pow(2).sum().backward()
                found.append(leaf.grad)
        return found

    assert_equal(grads(enabled()), grads(nullcontext()))
