"""Which argument is which: the names of what a torch function was called with."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import zip_longest
from typing import Any, Final

import torch
from torch.overrides import get_testing_overrides

from musigma.graph import _kinds as kinds
from musigma.graph._names import Function, op_name, spelled

# Written with its operands the other way round: `1 - x` calls `x.__rsub__(1)`.
_REFLECTED: Final = kinds.ops(
    "__rsub__ __rdiv__ __rtruediv__ __rfloordiv__ __rmod__ __rpow__ __rmatmul__ rsub"
)

# Methods that take their last argument as one sequence or as many numbers: `x.permute(0, 2, 1)`.
_TAILS: Final = {
    "view": "size",
    "reshape": "shape",
    "expand": "size",
    "permute": "dims",
    "repeat": "repeats",
    "tile": "dims",
    "flip": "dims",
}

_RECURRENT: Final = ("params", "has_biases", "num_layers", "dropout", "train", "bidirectional", "batch_first")

# How torch's own signatures spell the first argument of an op.
_FIRST: Final = frozenset(("self", "x", "a", "data"))

_ITEMS: Final = {"getitem": ("input", "index"), "setitem": ("input", "index", "value")}


def bind(function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments by name; a position whose name is not known has its number for a name.

    The first argument is called `input`, and `other` is what it is combined with, however torch spells
    them; several numbers that stand for one tuple (`x.view(2, -1)`) are bound as that tuple.
    """
    op = op_name(function)
    names = _names(op, function, args)
    if op in _TAILS and len(args) > 1 and not isinstance(args[1], torch.dtype):
        tail = args[1] if len(args) == 2 and isinstance(args[1], Sequence) else tuple(args[1:])
        return {"input": args[0], _TAILS[op]: tail, **kwargs}
    variadic = _variadic(function)
    if variadic is not None and len(args) >= len(names):
        fixed = len(names)
        return {**dict(zip(names, args[:fixed], strict=True)), variadic: tuple(args[fixed:]), **kwargs}
    labels = ["input" if i == 0 and not names else str(i) for i in range(len(args))]
    labels = [n if n and n not in kwargs else label for n, label in zip_longest(names[: len(args)], labels)]
    return {**dict(zip(labels, args, strict=True)), **kwargs}


def with_defaults(function: Function, named: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments by name, with the defaults of a function written in Python filled in."""
    return {**{name: value for name, value in _defaults(function).items() if name not in named}, **named}


@lru_cache(maxsize=4096)
def mutable_arguments(function: Function) -> tuple[str, ...]:
    """The arguments that an op's schema says it writes; empty for functions without a schema."""
    overload = _overload(function)
    if overload is None:
        return ()
    arguments = overload._schema.arguments
    written = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    first = arguments[0].name if arguments and arguments[0].name in _FIRST else None
    return tuple("input" if name == first else name for name in written)


def _names(op: str, function: Function, args: Sequence[Any]) -> tuple[str, ...]:
    if op in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        # Packed sequences pass their batch sizes second, which moves the weights to the fourth place.
        packed = len(args) > 3 and isinstance(args[3], list | tuple)
        return ("input", "batch_sizes", "hx", *_RECURRENT) if packed else ("input", "hx", *_RECURRENT)
    if op in _ITEMS:
        return _ITEMS[op]
    names = _signature(function)
    return ("other", "input", *names[2:]) if spelled(function) in _REFLECTED else names


@lru_cache(maxsize=4096)
def _signature(function: Function) -> tuple[str, ...]:
    names = _schema(function) or _python(function) or _override(function) or _aten(function)
    return ("input", *names[1:]) if names and names[0] in _FIRST else names


@lru_cache(maxsize=4096)
def _defaults(function: Function) -> dict[str, Any]:
    return {
        name: parameter.default
        for name, parameter in _parameters(function).items()
        if parameter.default is not parameter.empty and not name.startswith("_")
    }


@lru_cache(maxsize=4096)
def _variadic(function: Function) -> str | None:
    return next((p.name for p in _parameters(function).values() if p.kind is p.VAR_POSITIONAL), None)


def _python(function: Function | None) -> tuple[str, ...]:
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in _parameters(function).values() if p.kind in positional)


def _parameters(function: Function | None) -> Mapping[str, inspect.Parameter]:
    if not inspect.isfunction(function):
        return {}
    try:
        return inspect.signature(function).parameters
    except ValueError:  # it wraps a builtin, as `Tensor.pow` does, which has none
        return {}


def _override(function: Function) -> tuple[str, ...]:
    # torch's table of overridable functions carries a dummy with the signature of each builtin.
    return _python(get_testing_overrides().get(function))


def _overload(function: Function) -> torch._ops.OpOverload | None:
    if isinstance(function, torch._ops.OpOverloadPacket):
        function = getattr(function, function.overloads()[0])
    return function if isinstance(function, torch._ops.OpOverload) else None


def _schema(function: Function) -> tuple[str, ...]:
    overload = _overload(function)
    return () if overload is None else tuple(argument.name for argument in overload._schema.arguments)


def _aten(function: Function) -> tuple[str, ...]:
    packet = getattr(torch.ops.aten, spelled(function), None)
    return () if packet is None else _schema(packet)
