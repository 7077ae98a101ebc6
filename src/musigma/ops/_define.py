"""What an op is, and how one definition becomes eager, autograd, transforms, fake tensors and tests.

An op is two dispatcher ops, ``musigma::<name>`` and ``musigma::<name>_backward``, and one readable
reference for each. The ``Autograd`` key is registered by hand: ``torch.library.register_autograd`` refuses
``torch.func`` transforms and silently drops forward-mode tangents (pytorch#168393, #170834, #179652).

==========================  ==================================================================
dispatch key                what runs
==========================  ==================================================================
``Autograd``                under a functorch transform or forward AD: the differentiable reference;
                            else an ``autograd.Function`` that redispatches below autograd
``CompositeExplicit…``      the reference, until a kernel overrides it for its device
``FuncTorchBatched``        the reference (``vmap``)
fake                        shapes, dtypes and strides (``torch.compile``, ``torch.export``, meta)
``CPU``, ``AutogradCPU``    the native kernel, where it is built (`musigma.ops.kernels`)
==========================  ==================================================================

``<name>_reference`` and ``<name>_backward_reference`` are the references as ops of their own: what a native
kernel calls for arguments it does not take, for forward-mode tangents, and for derivatives of its backward.

The backward op follows the same table with the hand-derived backward as its reference. That backward is
itself written in differentiable PyTorch and recomputes what it needs from the inputs, so second and higher
derivatives are the reference's own and right to every order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

NAMESPACE = "musigma"
LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")  # lives as long as the process; the ops go with it


@dataclass(frozen=True)
class Sample:
    """One call of an op: its positional arguments, as the schema orders them."""

    args: tuple[Any, ...]
    name: str = ""


@dataclass(frozen=True)
class ErrorSample:
    """A call that must be refused: the arguments, the exception's class, and words it must say."""

    args: tuple[Any, ...]
    error: type[Exception]
    match: str
    name: str = ""


@dataclass(frozen=True)
class Op:
    """The definition of one differentiable op; everything else about it is derived from this.

    Args:
        name: the op's name; its backward is ``<name>_backward``.
        schema: arguments and results of the forward, in the dispatcher's language.
        backward_schema: the same of the backward. Its last argument is ``bool[] needs``, one flag for each
            differentiable input; a gradient not needed comes back as an empty tensor.
        check: raises for arguments that break the op's invariant, before anything is allocated.
        reference: the forward in differentiable PyTorch.
        backward: the hand-derived backward in differentiable PyTorch.
        fake: shapes of the forward's results.
        backward_fake: shapes of the backward's results.
        differentiable: positions of the inputs that get a gradient, in the order the backward returns them.
        gradients: for each of these its position in what the backward returns, where two inputs share a
            gradient; by default one after the other.
        differentiable_outputs: positions of the results that carry one.
        saved_outputs: positions of the results that the backward reads.
        backward_args: (output gradients, inputs, outputs, needs) to the backward's arguments.
        samples: calls for the generic tests, given (device, dtype).
        error_samples: calls that must be refused.
        tolerance: units in the last place of the largest value, forward and gradients, against float64.
    """

    name: str
    schema: str
    backward_schema: str
    check: Callable[..., None]
    reference: Callable[..., Any]
    backward: Callable[..., Any]
    fake: Callable[..., Any]
    backward_fake: Callable[..., Any]
    differentiable: tuple[int, ...]
    differentiable_outputs: tuple[int, ...]
    saved_outputs: tuple[int, ...]
    backward_args: Callable[..., tuple[Any, ...]]
    samples: Callable[..., Iterator[Sample]] = field(repr=False)
    error_samples: Callable[[], Iterator[ErrorSample]] = field(repr=False)
    tolerance: float = 4.0
    gradients: tuple[int, ...] = ()

    def __call__(self, *args: Any) -> Any:
        if leaves_home():
            self.check(*args)
            return self.reference(*args)
        entry = ENTRIES.get(self.name)
        if entry is None or torch.compiler.is_compiling():
            return self.overload(*args)
        return entry(*args)

    @property
    def overload(self) -> Any:
        """The dispatcher op, ``torch.ops.musigma.<name>.default``."""
        return getattr(getattr(torch.ops, NAMESPACE), self.name).default

    @property
    def backward_overload(self) -> Any:
        """The dispatcher op of the backward."""
        return getattr(getattr(torch.ops, NAMESPACE), f"{self.name}_backward").default


OPS: dict[str, Op] = {}
"""Every differentiable op, by name; the generic tests walk this."""

ENTRIES: dict[str, Callable[..., Any]] = {}
"""A faster way into the same dispatcher op, where the native kernels bring one."""


def leaves_home() -> bool:
    """Whether a call is written down to run elsewhere, without musigma: in torch's own ops, then.

    So do ``torch.export`` and ``torch.jit.trace``, and whatever is built on them (ONNX, AOTInductor).
    ``torch.compile`` does not: what it writes runs in this process.
    """
    return torch.compiler.is_exporting() or torch._C._get_tracing_state() is not None


def transforms_active() -> bool:
    """Whether a functorch transform or forward AD runs, which only differentiable PyTorch can follow."""
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0


def wants_grad(*args: Any) -> bool:
    """Whether autograd has to record a call with these arguments."""
    return torch.is_grad_enabled() and torch._C._any_requires_grad(
        *(a for a in args if isinstance(a, Tensor))
    )


def define(op: Op) -> Op:
    """Register an op and its backward with the dispatcher, and enter it in `OPS`.

    Raises:
        ValueError: the name is taken.
    """
    if op.name in OPS:
        raise ValueError(f"an op's name must be unique; {op.name!r} is defined already")
    backward = f"{op.name}_backward"
    LIBRARY.define(f"{op.name}{op.schema}")
    LIBRARY.define(f"{backward}{op.backward_schema}")
    for name, schema, run in (
        (op.name, op.schema, _checked(op)),
        (backward, op.backward_schema, op.backward),
    ):
        LIBRARY.define(f"{name}_reference{schema}")
        LIBRARY.impl(f"{name}_reference", run, "CompositeImplicitAutograd")
    LIBRARY.impl(op.name, _checked(op), "CompositeExplicitAutograd")
    LIBRARY.impl(backward, op.backward, "CompositeExplicitAutograd")
    LIBRARY.impl(op.name, _checked(op), "FuncTorchBatched")
    LIBRARY.impl(backward, op.backward, "FuncTorchBatched")
    torch.library.register_fake(f"{NAMESPACE}::{op.name}", _on_one_device(op), lib=LIBRARY)
    torch.library.register_fake(f"{NAMESPACE}::{backward}", op.backward_fake, lib=LIBRARY)
    LIBRARY.impl(op.name, _autograd(op), "Autograd", with_keyset=True)
    LIBRARY.impl(backward, _autograd_of_backward(op), "Autograd", with_keyset=True)
    # What help() shows of an op is what it computes, not what the (frozen) dataclass is.
    object.__setattr__(op, "__doc__", f"{op.name}{op.schema}\n\n    {op.reference.__doc__}")
    OPS[op.name] = op
    return op


def _checked(op: Op) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        op.check(*args)
        _check_parameters(op, args)
        return op.reference(*args)

    return run


def _check_parameters(op: Op, args: Sequence[Any]) -> None:
    """What stands beside x holds fractions: a complex one would lose its imaginary part without a word."""
    for i in op.differentiable[1:]:
        if i < len(args) and isinstance(args[i], Tensor) and not args[i].is_floating_point():
            name = op.overload._schema.arguments[i].name
            raise RuntimeError(f"{name} must be floating point, got {args[i].dtype}; convert it first")


def not_on_one_device(name: str, where: dict[str, torch.device]) -> str:
    """What to say of a call whose tensors lie in several places, one of which is "meta"."""
    told = ", ".join(f"{argument} on {device}" for argument, device in where.items())
    return (
        f"Expected all tensors to be on the same device, but {name} got {told}; a meta tensor has no values: "
        "load or initialize the module's tensors first (to_empty, load_state_dict(assign=True))"
    )


def _on_one_device(op: Op) -> Callable[..., Any]:
    """The fake forward. A meta tensor beside one with values brings the dispatcher here, wherever x is."""

    def run(*args: Any) -> Any:
        names = [argument.name for argument in op.overload._schema.arguments]
        where = {n: a.device for n, a in zip(names, args, strict=False) if isinstance(a, Tensor)}
        if len(set(where.values())) > 1:
            raise RuntimeError(not_on_one_device(op.name, where))
        _check_parameters(op, args)
        return op.fake(*args)

    return run


def _autograd(op: Op) -> Callable[..., Any]:
    record = _recorder(op)

    def run(keyset: Any, *args: Any) -> Any:
        # A gradient for an input that the backward op does not serve (a mask's weights) is the reference's.
        others = [a for i, a in enumerate(args) if i not in op.differentiable]
        if transforms_active() or wants_grad(*others):
            op.check(*args)
            return op.reference(*args)
        if wants_grad(*args):
            return record.apply(keyset, *args)
        with torch._C._AutoDispatchBelowAutograd():
            return op.overload.redispatch(keyset & torch._C._after_autograd_keyset, *args)

    return run


def _autograd_of_backward(op: Op) -> Callable[..., Any]:
    def run(keyset: Any, *args: Any) -> Any:
        if transforms_active() or wants_grad(*args):
            return op.backward(*args)
        with torch._C._AutoDispatchBelowAutograd():
            return op.backward_overload.redispatch(keyset & torch._C._after_autograd_keyset, *args)

    return run


def _recorder(op: Op) -> type[torch.autograd.Function]:
    """The ``autograd.Function`` of an op: run below autograd, save what the backward op asks for."""

    class Recorded(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, keyset: Any, *args: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                results = op.overload.redispatch(keyset & torch._C._after_autograd_keyset, *args)
            outputs = _as_tuple(results)
            ctx.mark_non_differentiable(
                *(o for i, o in enumerate(outputs) if i not in op.differentiable_outputs)
            )
            ctx.set_materialize_grads(False)
            ctx.plain = [None if isinstance(a, Tensor) else a for a in args]
            ctx.is_tensor = [isinstance(a, Tensor) for a in args]
            tensors = (a for a in args if isinstance(a, Tensor))
            ctx.save_for_backward(*tensors, *(outputs[i] for i in op.saved_outputs))
            return results

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> Any:
            given: list[Tensor | None] = [None] * (1 + len(ctx.plain))
            if all(grads[i] is None for i in op.differentiable_outputs):
                return tuple(given)
            saved = iter(ctx.saved_tensors)
            inputs = [next(saved) if t else p for t, p in zip(ctx.is_tensor, ctx.plain, strict=True)]
            outputs = dict(zip(op.saved_outputs, saved, strict=True))
            needs = [ctx.needs_input_grad[1 + i] for i in op.differentiable]
            results = _as_tuple(op.backward_overload(*op.backward_args(grads, inputs, outputs, needs)))
            places = op.gradients or range(len(results))
            for i, need, place in zip(op.differentiable, needs, places, strict=True):
                given[1 + i] = results[place] if need else None
            return tuple(given)

    Recorded.__name__ = Recorded.__qualname__ = "".join(part.title() for part in op.name.split("_"))
    return Recorded


def _as_tuple(results: Any) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)
