"""What a model's own code puts into its tensors, asked without touching the model."""

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from musigma.init._names import generator_for

# Methods by which modules fill themselves: torch.nn's, torchtune's, and what others call theirs.
_RESETS = ("reset_running_stats", "reset_parameters", "_reset_parameters", "reset_buffers", "rope_init")
# Constructor arguments that say where tensors go, not what is in them.
_PLACES: dict[str, object] = {"device": "cpu", "dtype": None}
Filler = Callable[[], object]


class NotRecomputableError(ValueError):
    """Nobody knows what a tensor holds; the message says why."""


class OwnCode:
    """A hollow copy of a model on which its own code can run, to see what it writes.

    Asked for a tensor, it lets run, each from the tensor's own random numbers: the reset methods of the
    module that holds it and of those around it, from the inside out, as constructors do; then the
    `_init_weights` in force for each of them, in the same order, as transformers does and
    `model.apply(model._init_weights)`. The last one that writes the tensor counts. Where none does, the
    module is constructed anew from the arguments that it keeps as attributes.

    Args:
        model: any module.
        seed: which of all possible initializations.

    Example:
        >>> norm = nn.BatchNorm1d(2, device="meta")
        >>> OwnCode(norm, seed=0).values("", norm, {"running_var": norm.running_var})
        ({'running_var': tensor([1., 1.])}, {})

    References:
        None.
    """

    def __init__(self, model: nn.Module, seed: int) -> None:
        self._seed = seed
        self._hollow = hollow(model)

    def values(
        self, path: str, module: nn.Module, wanted: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, str]]:
        """The values of tensors that one module holds on the meta device.

        Args:
            path: the module's path.
            module: the module.
            wanted: names inside it → the hollow parameters, buffers and plain attributes.

        Returns:
            Values on the CPU, floating-point ones in float32; and for the rest the reason why nobody knows.
        """
        fillers = list(self._fillers(path))
        known: dict[str, Tensor] = {}
        for name, tensor in wanted.items():
            # One at a time: the others are hollow, so that they use up no random numbers of this one's.
            known |= self._filled(path, {name: tensor}, fillers, f"{path}.{name}")
        if len(known) < len(wanted):
            # A table that is copied from another one needs both.
            known = self._filled(path, wanted, fillers, path) | known
        missing = {name: tensor for name, tensor in wanted.items() if name not in known}
        if not missing:
            return known, {}
        built, reasons = _from_constructor(module, missing, generator_for(self._seed, path))
        return known | built, reasons

    def _fillers(self, path: str) -> Iterator[Filler]:
        """What may write the tensors of a module, in the order in which the last word counts."""
        steps = path.split(".") if path else []
        around = [self._hollow.get_submodule(".".join(steps[:n])) for n in range(len(steps), -1, -1)]
        for module in around:
            for name in _RESETS:
                method = getattr(module, name, None)
                if callable(method) and _takes_nothing(method):
                    yield method
        for i, module in enumerate(around):
            writers = (getattr(outer, "_init_weights", None) for outer in around[i:])
            writer = next((w for w in writers if callable(w) and not isinstance(w, nn.Module)), None)
            if writer is not None:
                yield functools.partial(writer, module)

    def _filled(
        self, path: str, wanted: Mapping[str, Tensor], fillers: list[Filler], stream: str
    ) -> dict[str, Tensor]:
        holder = self._hollow.get_submodule(path)
        values: dict[str, Tensor] = {}
        before = {name: _held(holder, name) for name in wanted}
        for fill in fillers:
            blanks = {name: _blank(tensor) for name, tensor in wanted.items()}
            versions = {name: blank._version for name, blank in blanks.items()}
            for name, blank in blanks.items():
                _hold(holder, name, blank)
            try:
                with lent(generator_for(self._seed, stream.lstrip("."))), torch.no_grad():
                    fill()
            except Exception:
                continue  # what a method can't do on a stand-in it doesn't do
            for name, blank in blanks.items():
                value = _held(holder, name)
                new = value is not blank or blank._version > versions[name]
                if new and isinstance(value, Tensor) and _is_whole(value, blank):
                    values[name] = value.detach()
        for name, tensor in before.items():
            _hold(holder, name, tensor)
        return values


def hollow(module: nn.Module, seen: dict[int, Any] | None = None) -> Any:
    """A copy of a module that shares its attributes but none of its memory: its tensors are hollow.

    Args:
        module: any module; it is not changed, and neither are its children.
        seen: copies made already, by the identity of what they are copies of.

    Returns:
        A module of the same class.

    Example:
        >>> hollow(nn.Linear(2, 3)).weight.device.type
        'meta'

    References:
        None.
    """
    seen = {} if seen is None else seen
    if id(module) in seen:
        return seen[id(module)]
    copy = seen[id(module)] = object.__new__(type(module))
    copy.__dict__.update(module.__dict__)
    for registry in ("_parameters", "_buffers"):
        held = module.__dict__[registry].items()
        copy.__dict__[registry] = {name: None if t is None else _on_meta(t) for name, t in held}
    children = module.__dict__["_modules"].items()
    copy.__dict__["_modules"] = {name: None if m is None else hollow(m, seen) for name, m in children}
    return copy


def _on_meta(tensor: Tensor) -> Tensor:
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _registry(module: nn.Module, name: str) -> dict[str, Any]:
    registries = (module.__dict__[key] for key in ("_parameters", "_buffers"))
    return next((held for held in registries if name in held), module.__dict__)


def _held(module: nn.Module, name: str) -> Any:
    return _registry(module, name)[name]


def _hold(module: nn.Module, name: str, tensor: Any) -> None:
    _registry(module, name)[name] = tensor


def _takes_nothing(method: Callable[..., object]) -> bool:
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    arguments = inspect.signature(method).parameters.values()
    return all(a.default is not a.empty or a.kind in kinds for a in arguments)


def _blank(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")
    # float32 whatever the tensor's dtype, so that a model in half precision gets the same numbers.
    blank = torch.full(tensor.shape, math.nan, dtype=torch.float32, device="cpu")
    return nn.Parameter(blank, requires_grad=False) if isinstance(tensor, nn.Parameter) else blank


def _is_whole(value: Tensor, like: Tensor) -> bool:
    if value.is_meta or value.shape != like.shape:
        return False
    # Memory that nobody wrote: NaN in our blanks and, by _UnwrittenIsTold, in what a constructor makes.
    if value.is_floating_point():
        return not bool(value.isnan().any())
    return value.dtype is torch.bool or not bool((value == torch.iinfo(value.dtype).max).any())


def _from_constructor(
    module: nn.Module, wanted: Mapping[str, Tensor], generator: torch.Generator
) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        twin = _built_anew(module, generator)
    except NotRecomputableError as error:
        return {}, dict.fromkeys(wanted, str(error))
    values = {name: getattr(twin, name, None) for name in wanted}
    good = {
        name: value.detach()
        for name, value in values.items()
        if isinstance(value, Tensor) and _is_whole(value, wanted[name])
    }
    why = f"a new {type(module).__name__} leaves it unwritten"
    return good, {name: why for name in wanted if name not in good}


def _built_anew(module: nn.Module, generator: torch.Generator) -> nn.Module:
    """A new module of the same class, made from the arguments that this one keeps as attributes."""
    kind = type(module).__name__
    arguments = {}
    for name, parameter in list(inspect.signature(type(module).__init__).parameters.items())[1:]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise NotRecomputableError(f"the constructor of {kind} takes *{name}, which it keeps nowhere")
        if name in _PLACES:
            arguments[name] = _PLACES[name]
        elif hasattr(module, name) and not inspect.ismethod(getattr(module, name)):
            arguments[name] = _argument(getattr(module, name), parameter)
        else:
            raise NotRecomputableError(f"{kind} does not keep its constructor's argument {name!r}")
    try:
        with lent(generator), _UnwrittenIsTold():
            twin = type(module)(**arguments)
    except Exception as error:
        raise NotRecomputableError(f"constructing {kind} anew failed: {error}") from error
    # (What only this one has was set later: by a wrapper, for example.)
    kept = {n: v for n, v in vars(module).items() if n != "training" and n in vars(twin) and _is_plain(v)}
    changed = [n for n, v in kept.items() if vars(twin)[n] != v]
    if changed:
        raise NotRecomputableError(f"a new {kind} comes out otherwise: its {changed[0]!r} differs")
    return twin


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return isinstance(value, int | float | str | torch.dtype)


def _argument(kept: Any, parameter: inspect.Parameter) -> object:
    # bias=True is kept as the bias itself; a child that was passed in is passed in hollow.
    if isinstance(kept, Tensor) or (kept is None and isinstance(parameter.default, bool)):
        return kept is not None
    return hollow(kept) if isinstance(kept, nn.Module) else kept


class _UnwrittenIsTold(TorchDispatchMode):
    """Fills what is merely allocated with NaN and the largest integers."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in _ALLOCATIONS and not made.is_meta:
            if made.is_floating_point() or made.is_complex():
                made.fill_(math.nan)
            elif made.dtype is not torch.bool:
                made.fill_(torch.iinfo(made.dtype).max)
        return made


_ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_")


@contextmanager
def lent(generator: torch.Generator) -> Iterator[None]:
    """Let code that draws from torch's own CPU generator draw from this one, on the CPU.

    Args:
        generator: a CPU generator.

    Example:
        >>> with lent(torch.Generator().manual_seed(1)):
        ...     a = torch.rand(1)
        >>> bool(a == torch.rand(1, generator=torch.Generator().manual_seed(1)))
        True

    References:
        None.
    """
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.set_state(generator.get_state())
        yield
