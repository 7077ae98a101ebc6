"""Run a model once and write down every op: which, where, on what, from whom."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import GeneratorType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from musigma._errors import MusigmaWarning
from musigma.graph import _kinds as kinds
from musigma.graph import _names as names
from musigma.graph._call import Call
from musigma.graph._example import Example, arguments, describe_call, input_names
from musigma.graph._graph import Graph
from musigma.graph._memory import Memory
from musigma.graph._modules import Frame, ModuleStack
from musigma.graph._nodes import Buffer, Input, Node, Parameter, TensorSpec
from musigma.graph._state import Untouched
from musigma.graph._tensors import named_tensors

Listener = Callable[[Node, tuple[Any, ...], dict[str, Any], tuple[Tensor, ...]], object]

# Calls that only ask about a tensor: no graph needs them, and they are most of all calls.
_QUESTIONS: Final = kinds.ops("""
    size dim shape dtype device numel ndim stride layout names itemsize nbytes nelement ndimension
    is_cuda is_cpu is_meta is_xpu is_mps is_nested is_sparse is_quantized is_complex
    is_floating_point is_contiguous is_leaf is_conj is_neg is_inference is_tensor requires_grad
    grad_fn get_device element_size storage_offset untyped_storage __len__ __repr__
    __str__ __format__ __hash__ _version _set_grad_enabled _is_view output_nr
    """)


# Buffers are swapped out and generators put back: two recordings at once would restore each other's states.
_ONE_AT_A_TIME: Final = threading.RLock()


def record(model: nn.Module, example: Example, *, listen: Listener | None = None) -> Graph:
    """Run the model once on an example and return the graph of what it did.

    The model runs as it is: in its present `training` modes and in the caller's grad mode. Afterwards
    buffers, parameters, gradients, module attributes, the example and the states of the random
    generators are as before, also when `forward` raises. `DataParallel`, `DistributedDataParallel` and
    `torch.compile` wrappers are taken off (paths and names are those of the model inside), and compiled
    parts run eagerly. All tensors of the forward stay alive until it ends, as they do in training.
    Recordings of several threads wait for each other.

    Args:
        model: any `nn.Module`.
        example: a tensor, a tuple of positional arguments or a dict of keyword arguments.
        listen: called as `listen(node, args, kwargs, outputs)` right after each recorded op, with the
            live arguments of the call and the tensors that `node.outputs` describes.

    Returns:
        The `Graph`.

    Raises:
        TypeError: the model is no module, or the example none of the three.
        ValueError: a lazy module of the model is not initialized yet.
        Exception: whatever `forward` raises, with its own traceback and a note on the call.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
        >>> print(record(model, torch.zeros(2, 4)))
        %0 = linear(input, weight=0.weight, bias=0.bias) -> float32[2, 3]  [0: Linear]
        %1 = relu(%0) -> float32[2, 3]  [1: ReLU]
        return %1
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    args, kwargs = arguments(example)
    model = unwrap(model)
    with _ONE_AT_A_TIME, Untouched(model) as state:
        recorder = _Recorder(model, input_names(model, args, kwargs), state, listen)
        try:
            with _eager(), recorder.following():
                result = model(*args, **kwargs)
                if isinstance(result, GeneratorType):  # its body runs only when it is asked
                    result = tuple(result)
        except Exception as error:
            error.add_note(recorder.note(describe_call(model, args, kwargs)))
            raise
        return recorder.graph(result)


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside `DataParallel`, `DistributedDataParallel` and `torch.compile` wrappers.

    Args:
        model: any module.

    Returns:
        The innermost module that is none of these wrappers.

    Example:
        >>> inner = nn.Linear(2, 2)
        >>> unwrap(nn.DataParallel(inner)) is inner
        True
    """
    while True:
        if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
        elif type(model).__name__ == "OptimizedModule":  # importing its class would import dynamo
            model = model.get_submodule("_orig_mod")
        else:
            return model


@contextmanager
def _eager() -> Iterator[None]:
    # Importing dynamo costs more than recording; who has compiled anything has imported it.
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        # Our hooks do see the wrapper and the module in it; both have a path, so nothing counts twice.
        warnings.filterwarnings(
            "ignore", message=r"Using `torch.compile\(module\)` when there are global hooks"
        )
        yield


class _Recorder(TorchFunctionMode):
    """Sees every torch call of one forward, and keeps the books."""

    def __init__(
        self, model: nn.Module, inputs: list[tuple[str, Tensor]], state: Untouched, listen: Listener | None
    ) -> None:
        super().__init__()
        self._state, self._listen = state, listen
        self._stack = ModuleStack(model)
        self._memory = Memory()
        self._nodes: list[Node] = []
        self._inputs = tuple(dict.fromkeys(name for name, _ in inputs))
        self._parameters = _grouped(model.named_parameters(remove_duplicate=False))
        self._buffers = _grouped(model.named_buffers(remove_duplicate=False))
        for tensor, all_names in self._parameters:
            self._memory.add_root(tensor, Parameter(all_names[0]), all_names)
        for tensor, all_names in self._buffers:
            self._memory.add_root(tensor, Buffer(all_names[0]), all_names)
        for name, tensor in inputs:
            self._memory.add_root(tensor, Input(name), (name,))
        self._guarded = {id(tensor) for tensor, _ in self._parameters} | {id(t) for _, t in inputs}

    @contextmanager
    def following(self) -> Iterator[None]:
        """Record what runs inside."""
        with ExitStack() as stack:
            stack.enter_context(self._stack.following(self._after_module))
            stack.enter_context(self)
            yield

    def graph(self, result: Any) -> Graph:
        """The finished graph of a forward that returned `result`."""
        returned = list(named_tensors(result))
        return Graph(
            nodes=tuple(self._nodes),
            output=tuple(self._memory.source(tensor) for _, tensor in returned),
            output_names=tuple(name for name, _ in returned),
            inputs=self._inputs,
            parameters=tuple(all_names for _, all_names in self._parameters),
            buffers=tuple(all_names for _, all_names in self._buffers),
            specs={
                all_names[0]: TensorSpec.of(tensor)
                for tensor, all_names in (*self._parameters, *self._buffers)
            },
        )

    def note(self, call: str) -> str:
        """What to tell whoever sees the traceback of a failed forward."""
        last = f"after {self._nodes[-1]}" if self._nodes else "before its first op"
        return (
            f"musigma.graph.record called {call}. It failed {last}. The example may be a tensor, a tuple of "
            "positional arguments or a dict of keyword arguments; the model was left as it was."
        )

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if names.spelled(func) in _QUESTIONS:
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            call = Call.of(func, args, kwargs, self._memory)
            self._guard(call, (*args, *kwargs.values()))
        result = func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            call.finish(result)
            self._warn_of_lost(call)
            node = self._add(call, self._stack.innermost) if call.is_op() else None
        if node is not None:
            self._hear(node, args, kwargs, call.outputs)
        return result

    def _add(self, call: Call, frame: Frame) -> Node:
        node = call.node(len(self._nodes), frame.path, frame.module_type, frame.call)
        self._nodes.append(node)
        call.settle(node.index)
        return node

    def _guard(self, call: Call, values: Sequence[Any]) -> None:
        for value in values:
            if isinstance(value, torch.Generator):
                self._state.protect(value)
        for tensor in call.targets:
            for _, root in self._memory.roots(tensor):
                if id(root) in self._guarded:
                    self._state.protect(root)

    def _warn_of_lost(self, call: Call) -> None:
        for _, tensor in call.written.values():
            for name, root in self._memory.roots(tensor):
                if id(root) in self._guarded and not self._state.is_protected(root):
                    self._guarded.discard(id(root))
                    warnings.warn(
                        f"{name} was overwritten by {call.target}, though its name and schema don't say so, "
                        "and is not as it was before the recording: record a copy of the model instead",
                        MusigmaWarning,
                        stacklevel=3,
                    )

    def _after_module(self, frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        # A script module runs in an interpreter that no mode sees: it is one op, of all its parameters.
        if not isinstance(frame.module, torch.jit.ScriptModule):
            return
        named = {"input" if index == 0 else str(index): value for index, value in enumerate(args)}
        state = (*frame.module.named_parameters(), *frame.module.named_buffers())
        named |= {**kwargs, **{f"self.{name}": tensor for name, tensor in state}}
        with torch._C.DisableTorchFunction():  # of modes too: nobody but us may see the bookkeeping
            call = Call("script", frame.module_type, named, self._memory)
            call.finish(result)
            if call.is_op():
                self._hear(self._add(call, frame), args, kwargs, call.outputs)

    def _hear(self, node: Node, args: Any, kwargs: dict[str, Any], outputs: tuple[Tensor, ...]) -> None:
        if self._listen is not None:
            self._listen(node, args, kwargs, outputs)


def _grouped(named: Iterable[tuple[str, Tensor]]) -> list[tuple[Tensor, tuple[str, ...]]]:
    """Each tensor once, with all its names."""
    groups: dict[int, tuple[Tensor, list[str]]] = {}
    for name, tensor in named:
        groups.setdefault(id(tensor), (tensor, []))[1].append(name)
    return [(tensor, tuple(all_names)) for tensor, all_names in groups.values()]
