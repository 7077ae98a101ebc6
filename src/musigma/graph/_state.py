"""Leaving a model as it was found, whatever its forward does.

Buffers are not copied back but swapped out: while the model runs, modules hold clones, and afterwards
the originals return to their places. So values, identity, version counters and saved tensors of the
originals are untouched, and a backward pass through the recorded forward still finds the values that
the forward used.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from musigma.graph._sharded import reshard, unshard

_ACCELERATORS = ("cuda", "xpu", "mps")


class Untouched:
    """A context in which a model may run, and after which it is what it was.

    Kept: the attributes of every module (`training`, hooks, registrations, plain attributes), buffers,
    gradients, `requires_grad`, and the states of torch's, Python's and NumPy's global generators. What
    would be overwritten in place by an op that the recorder sees is kept by `protect`.

    Raises:
        ValueError: a parameter or buffer of the model is not initialized yet (a lazy module).
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._undo = ExitStack()
        self._protected: set[int] = set()
        _refuse_lazy(model)

    def __enter__(self) -> Untouched:
        reshard(self._model)
        with ExitStack() as undo:
            undo.callback(_restore_generators, _generators())
            for module in self._model.modules():
                if not isinstance(module, torch.jit.ScriptModule):
                    undo.callback(_restore_attributes, module, *_attributes(module))
            _put_buffers_away(self._model, undo)
            _put_gradients_away(self._model, undo)
            undo.callback(reshard, self._model)
            unshard(self._model)
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._undo.close()

    def is_protected(self, value: Tensor) -> bool:
        """Whether `protect` remembers a tensor."""
        return id(value) in self._protected

    def protect(self, value: Tensor | torch.Generator) -> None:
        """Remember a tensor that is about to be overwritten, or a generator about to be drawn from."""
        if id(value) in self._protected:
            return
        self._protected.add(id(value))
        if isinstance(value, torch.Generator):
            self._undo.callback(value.set_state, value.get_state())
        else:
            # Inside torch.func.grad and the like every result is wrapped, and dead once the transform ends.
            with temporarily_clear_interpreter_stack():
                self._undo.callback(_copy_back, value, value.detach(), value.detach().clone())


def _refuse_lazy(model: nn.Module) -> None:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    lazy = [name for name, tensor in tensors if nn.parameter.is_lazy(tensor)]
    if lazy:
        raise ValueError(
            f"the model must have all its parameters before it is recorded; {', '.join(lazy)} "
            f"{'is' if len(lazy) == 1 else 'are'} uninitialized: call the model once on an example first"
        )


Container = dict[Any, Any] | list[Any] | set[Any]


def _attributes(module: nn.Module) -> tuple[dict[str, Any], dict[str, Container]]:
    attributes = dict(module.__dict__)
    # One level deep: registrations, hooks, and the lists and tables that a forward may add to.
    contents: dict[str, Container] = {}
    for name, value in attributes.items():
        for kind in (dict, list, set):
            if isinstance(value, kind):
                contents[name] = kind(value)
    return attributes, contents


def _restore_attributes(
    module: nn.Module, attributes: dict[str, Any], contents: dict[str, Container]
) -> None:
    # Through __dict__, not setattr: torch's own __setattr__ registers, and a subclass's may do anything.
    module.__dict__.clear()
    module.__dict__.update(attributes)
    for name, content in contents.items():
        container = attributes[name]
        if not _same_items(container, content):
            container.clear()
            container.extend(content) if isinstance(container, list) else container.update(content)


def _same_items(left: Container, right: Container) -> bool:
    # By identity: what `==` means between the items of a stranger is not ours to ask.
    if isinstance(left, dict) and isinstance(right, dict):
        return list(map(id, left)) == list(map(id, right)) and _same_items(
            [*left.values()], [*right.values()]
        )
    if isinstance(left, set):
        return {id(item) for item in left} == {id(item) for item in right}
    return list(map(id, left)) == list(map(id, right))


def _put_buffers_away(model: nn.Module, undo: ExitStack) -> None:
    scripted = {id(m) for m in model.modules() if isinstance(m, torch.jit.ScriptModule)}
    crowded = _shared_storages([*model.parameters(), *model.buffers()])
    clones: dict[int, Tensor] = {}
    for module in model.modules():
        for name, buffer in [] if id(module) in scripted else list(module._buffers.items()):
            if buffer is None or not buffer.is_leaf or _storage(buffer) in crowded:
                continue  # an alias of another tensor must stay one: it is copied back below
            module._buffers[name] = clones.setdefault(id(buffer), _clone(buffer))
    for buffer in model.buffers():
        if not any(buffer is clone for clone in clones.values()):
            undo.callback(_copy_back, buffer, buffer.detach(), buffer.detach().clone())


def _clone(buffer: Tensor) -> Tensor:
    clone = buffer.detach().clone().requires_grad_(buffer.requires_grad)
    clone.__dict__.update(buffer.__dict__)
    return clone


def _storage(tensor: Tensor) -> int | None:
    try:
        return tensor.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):
        return None


def _shared_storages(tensors: Iterable[Tensor]) -> set[int | None]:
    owners: dict[int | None, set[int]] = {}
    for tensor in tensors:
        owners.setdefault(_storage(tensor), set()).add(id(tensor))
    return {storage for storage, ids in owners.items() if storage is not None and len(ids) > 1}


def _put_gradients_away(model: nn.Module, undo: ExitStack) -> None:
    # A backward pass inside forward then accumulates into nothing of the caller's.
    for parameter in model.parameters():
        undo.callback(_restore_gradient, parameter, parameter.grad, parameter.requires_grad)
        parameter.grad = None


def _restore_gradient(parameter: Tensor, grad: Tensor | None, requires_grad: bool) -> None:
    parameter.grad = grad
    if parameter.requires_grad != requires_grad:
        parameter.requires_grad_(requires_grad)


def _copy_back(tensor: Tensor, memory: Tensor, values: Tensor) -> None:
    # `.data` has a version counter of its own: graphs that saved the tensor are not told of a change
    # that is none. `memory` is what the tensor held, should `tensor.data = other` have replaced it.
    with torch.no_grad():
        if _storage(tensor) != _storage(memory):
            tensor.data = memory
        if not memory.is_meta and not _identical(memory, values):
            memory.data.copy_(values)


def _identical(left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape and bool(((left == right) | ((left != left) & (right != right))).all())


def _generators() -> list[tuple[Callable[[Any], object], Any]]:
    states: list[tuple[Callable[[Any], object], Any]] = [
        (torch.set_rng_state, torch.get_rng_state()),
        (random.setstate, random.getstate()),
    ]
    if "numpy" in sys.modules:
        numpy_random = sys.modules["numpy"].random
        states.append((numpy_random.set_state, numpy_random.get_state()))
    for name in _ACCELERATORS:
        states += _device_generators(name)
    return states


def _device_generators(name: str) -> list[tuple[Callable[[Any], object], Any]]:
    device = getattr(torch, name, None)
    if name == "mps":
        ready = torch.backends.mps.is_available()
        return [(torch.mps.set_rng_state, torch.mps.get_rng_state())] if ready else []
    if device is None or not device.is_initialized():
        return []
    return [(device.set_rng_state_all, device.get_rng_state_all())]


def _restore_generators(states: list[tuple[Callable[[Any], object], Any]]) -> None:
    for restore, state in states:
        restore(state)
