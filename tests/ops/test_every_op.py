"""What holds for every op, found by walking the definitions."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from musigma import ops
from musigma.ops import ErrorSample, Op, Sample

CALLS = [
    pytest.param(op, s, id=f"{op.name}-{s.name}")
    for op in ops.OPS.values()
    for s in op.samples("cpu", torch.float64)
]
FEW = [
    pytest.param(op, s, id=f"{op.name}-{s.name}")
    for op in ops.OPS.values()
    for s in itertools.islice((s for s in op.samples("cpu", torch.float64) if s.args[0].numel()), 0, None, 4)
]
REFUSED = [
    pytest.param(op, e, id=f"{op.name}-{e.name}") for op in ops.OPS.values() for e in op.error_samples()
]
EVERY = [pytest.param(op, id=op.name) for op in ops.OPS.values()]


def as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def function_of(op: Op, sample: Sample, run: Callable[..., Any] | None = None) -> tuple[Any, list[Tensor]]:
    """The call as a function of its differentiable inputs alone, and those inputs, ready for autograd."""
    places = [i for i in op.differentiable if sample.args[i] is not None]

    def call(*tensors: Tensor) -> tuple[Tensor, ...]:
        args = list(sample.args)
        for i, t in zip(places, tensors, strict=True):
            args[i] = t
        results = as_tuple((run or op)(*args))
        return tuple(results[i] for i in op.differentiable_outputs)

    return call, [sample.args[i].detach().clone().requires_grad_() for i in places]


def gradients(call: Any, inputs: list[Tensor], order: int = 1) -> list[Tensor]:
    """The `order`-th derivative of a fixed, uneven function of the outputs."""
    generator = torch.Generator().manual_seed(7)
    inputs = [t.detach().clone().requires_grad_() for t in inputs]
    # a cube keeps the higher derivatives of linear ops from vanishing
    scalar = sum(
        (o.pow(3) * torch.randn(o.shape, generator=generator, dtype=o.dtype)).sum() for o in call(*inputs)
    )
    for _ in range(order):
        grads = torch.autograd.grad(scalar, inputs, create_graph=True)
        scalar = sum((g * torch.randn(g.shape, generator=generator, dtype=g.dtype)).sum() for g in grads)
    return list(grads)


def assert_same(ours: Any, theirs: Any, rtol: float = 1e-10) -> None:
    for a, b in zip(as_tuple(ours), as_tuple(theirs), strict=True):
        # float64, a few hundred terms: 1e-10 leaves six digits for the cube above
        torch.testing.assert_close(
            a, b, rtol=rtol, atol=rtol * max(1.0, b.detach().abs().max().item() if b.numel() else 1.0)
        )


@pytest.mark.parametrize(("op", "sample"), CALLS)
def test_hand_derived_backward_is_the_references_derivative(op: Op, sample: Sample) -> None:
    ours, inputs = function_of(op, sample)
    reference, _ = function_of(op, sample, op.reference)
    assert_same(tuple(gradients(ours, inputs)), tuple(gradients(reference, inputs)))


@pytest.mark.parametrize(("op", "sample"), FEW)
def test_gradcheck_to_second_order(op: Op, sample: Sample) -> None:
    call, inputs = function_of(op, sample)
    assert torch.autograd.gradcheck(call, inputs, check_forward_ad=True, check_batched_grad=False)
    assert torch.autograd.gradgradcheck(call, inputs)


@pytest.mark.parametrize("order", [2, 3, 4])
@pytest.mark.parametrize(("op", "sample"), FEW)
def test_higher_derivatives_are_the_references(op: Op, sample: Sample, order: int) -> None:
    ours, inputs = function_of(op, sample)
    reference, _ = function_of(op, sample, op.reference)
    assert_same(tuple(gradients(ours, inputs, order)), tuple(gradients(reference, inputs, order)), rtol=1e-8)


@pytest.mark.parametrize(("op", "sample"), FEW)
def test_functorch_transforms_follow(op: Op, sample: Sample) -> None:
    ours, inputs = function_of(op, sample)
    reference, _ = function_of(op, sample, op.reference)
    inputs = [t.detach() for t in inputs]

    def loss(call: Any) -> Any:
        return lambda *t: sum(o.pow(3).sum() for o in call(*t))

    everything = tuple(range(len(inputs)))
    for transform in (torch.func.grad, torch.func.hessian):
        ours_t = transform(loss(ours), everything)(*inputs)
        theirs = transform(loss(reference), everything)(*inputs)
        for a, b in zip(
            torch.utils._pytree.tree_leaves(ours_t), torch.utils._pytree.tree_leaves(theirs), strict=True
        ):
            assert_same(a, b)
    tangents = tuple(t * 2 for t in inputs)
    assert_same(
        torch.func.jvp(ours, tuple(inputs), tangents)[1],
        torch.func.jvp(reference, tuple(inputs), tangents)[1],
    )


@pytest.mark.parametrize(("op", "sample"), FEW)
def test_vmap_is_a_loop(op: Op, sample: Sample) -> None:
    call, inputs = function_of(op, sample)
    stacked = [torch.stack([t.detach() * k for k in (0.5, 1.0, 2.0)]) for t in inputs]
    mapped = torch.vmap(call)(*stacked)
    for k in range(3):
        assert_same(tuple(m[k] for m in mapped), call(*(s[k] for s in stacked)))
    per_sample = torch.vmap(torch.func.grad(lambda *t: call(*t)[0].pow(3).sum()))(*stacked)
    one = torch.func.grad(lambda *t: call(*t)[0].pow(3).sum())(*(s[1] for s in stacked))
    assert_same(per_sample[1], one)


@pytest.mark.parametrize(("op", "sample"), FEW)
def test_opcheck(op: Op, sample: Sample) -> None:
    args = [
        a.detach().clone().requires_grad_() if i in op.differentiable and a is not None else a
        for i, a in enumerate(sample.args)
    ]
    torch.library.opcheck(op.overload, tuple(args))
    with torch.no_grad():
        outputs = as_tuple(op(*args))
    grads = [torch.ones_like(o) for o in outputs]
    needs = [args[i] is not None for i in op.differentiable]
    backward_args = op.backward_args(grads, args, dict(enumerate(outputs)), needs)
    torch.library.opcheck(op.backward_overload, backward_args)


@pytest.mark.parametrize(("op", "sample"), FEW)
def test_needs_switches_single_gradients_off(op: Op, sample: Sample) -> None:
    call, inputs = function_of(op, sample)
    full = torch.autograd.grad(sum(o.pow(2).sum() for o in call(*inputs)), inputs)
    for i in range(len(inputs)):
        only = [t.detach().clone().requires_grad_(j == i) for j, t in enumerate(inputs)]
        (grad,) = torch.autograd.grad(sum(o.pow(2).sum() for o in call(*only)), only[i])
        assert torch.equal(grad, full[i])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("op", EVERY)
def test_within_tolerance_of_float64_in_every_dtype(op: Op, dtype: torch.dtype) -> None:
    for sample in op.samples("cpu", dtype):
        if not sample.args[0].numel():
            continue
        exact = [a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in sample.args]
        for i in op.differentiable_outputs:
            got, want = as_tuple(op(*sample.args))[i], as_tuple(op.reference(*exact))[i]
            scale = want.abs().max()
            unit = torch.finfo(got.dtype).eps * scale
            assert (got.double() - want).abs().max() <= op.tolerance * unit + 1e-300, sample.name


@pytest.mark.parametrize(("op", "error"), REFUSED)
def test_bad_arguments_are_refused_with_a_reason(op: Op, error: ErrorSample) -> None:
    with pytest.raises(error.error, match=error.match):
        op(*error.args)
    with pytest.raises(error.error, match=error.match):
        op(
            *(
                a.requires_grad_() if isinstance(a, Tensor) and a.is_floating_point() else a
                for a in error.args
            )
        )


@pytest.mark.parametrize(("op", "sample"), FEW)
def test_fake_and_meta_tell_the_truth_about_shape_dtype_and_strides(op: Op, sample: Sample) -> None:
    with torch.no_grad():
        real = as_tuple(op(*sample.args))
        meta = as_tuple(op(*(a.to("meta") if isinstance(a, Tensor) else a for a in sample.args)))
    for r, m in zip(real, meta, strict=True):
        assert (r.shape, r.dtype, r.stride()) == (m.shape, m.dtype, m.stride())


@pytest.mark.parametrize("op", EVERY)
def test_traced_graphs_keep_the_op_whole(op: Op) -> None:
    sample = next(s for s in op.samples() if s.args[0].numel())
    call, inputs = function_of(op, sample)
    traced = make_fx(lambda *t: torch.autograd.grad(call(*t)[0].sum(), t[0])[0], tracing_mode="symbolic")(
        *inputs
    )
    assert f"musigma.{op.name}." in traced.code
    assert f"musigma.{op.name}_backward" in traced.code


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("op", EVERY)
def test_activation_checkpointing_gives_the_same_gradients(op: Op, reentrant: bool) -> None:
    call, inputs = function_of(op, next(s for s in op.samples() if s.args[0].numel()))

    def checkpointed(*t: Tensor) -> Any:
        return torch.utils.checkpoint.checkpoint(call, *t, use_reentrant=reentrant)

    def first(run: Any) -> list[Tensor]:
        fresh = [t.detach().clone().requires_grad_() for t in inputs]
        sum(o.pow(3).sum() for o in run(*fresh)).backward()
        return [t.grad for t in fresh]

    for a, b in zip(first(checkpointed), first(call), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("op", EVERY)
def test_an_input_or_result_changed_before_backward_is_noticed_or_not_read(op: Op) -> None:
    call, inputs = function_of(op, next(s for s in op.samples() if s.args[0].numel()))
    want = torch.autograd.grad(sum(o.pow(3).sum() for o in call(*inputs)), inputs[0])[0]
    noticed = 0
    for place in range(1 + len(op.differentiable_outputs)):
        first = inputs[0] * 1
        results = call(first, *inputs[1:])
        scalar = sum((o * 1).pow(3).sum() for o in results)
        with torch.no_grad():
            (first, *results)[place].add_(1)
        try:
            (got,) = torch.autograd.grad(scalar, inputs[0])
        except RuntimeError as error:
            noticed += "modified by an inplace operation" in str(error)
        else:
            assert torch.equal(got, want)
    assert noticed


@pytest.mark.compile
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("op", EVERY)
def test_compiles_in_one_graph(op: Op, dynamic: bool | None) -> None:
    call, inputs = function_of(op, next(s for s in op.samples() if s.args[0].numel()))
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=dynamic)

    def run(f: Any) -> list[Tensor]:
        fresh = [t.detach().clone().requires_grad_() for t in inputs]
        sum(o.pow(3).sum() for o in f(*fresh)).backward()
        return [t.grad for t in fresh]

    for a, b in zip(run(compiled), run(call), strict=True):
        assert_same(a, b)
    torch._dynamo.reset()


def test_a_name_is_defined_once() -> None:
    with pytest.raises(ValueError, match="unique"):
        ops._define.define(ops.row_norm)
