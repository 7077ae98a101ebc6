"""What the operations on single layers share: which layers are meant, and how one becomes another."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.parametrize import is_parametrized

import musigma.nn as layers
from musigma.graph import call, forked_rng
from musigma.surgery._certificate import Certificate, certified, own_copy

Where = str | Sequence[str] | Callable[[str, nn.Module], bool] | None
"""Which layers: names or patterns of them (`"encoder.*"`), a function of name and layer, None for all."""

FROZEN = layers.FrozenBatchNorm
KNOWN_BATCH_NORMS: tuple[type[nn.Module], ...] = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    layers.BatchNorm1d,
    layers.BatchNorm2d,
    layers.BatchNorm3d,
    layers.SyncBatchNorm,
)
KNOWN_INSTANCE_NORMS: tuple[type[nn.Module], ...] = (
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
    layers.InstanceNorm1d,
    layers.InstanceNorm2d,
    layers.InstanceNorm3d,
)
_ROW_NORMS: tuple[type[nn.Module], ...] = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)

# What a subclass may define without computing anything else than the class it is made of.
_HARMLESS = frozenset(("__init__", "extra_repr", "reset_parameters", "reset_running_stats"))
_HOOKS = tuple(name for name in vars(nn.Module()) if name.endswith("_hooks") or "_hooks_" in name)


def is_norm(module: nn.Module) -> bool:
    """Whether a layer normalizes: by its type, or, of a class from elsewhere, by what it calls itself."""
    known = (_BatchNorm, _InstanceNorm, FROZEN, *_ROW_NORMS)
    if isinstance(module, known):
        return True
    if isinstance(module, nn.Linear | nn.modules.conv._ConvNd | nn.Embedding) or any(module.children()):
        return False
    named = type(module).__name__.lower().rstrip("123d_")
    return named.endswith("norm") and bool(module._parameters)


def own_behaviour(module: nn.Module, known: Iterable[type[nn.Module]]) -> str | None:
    """What a layer does differently from the known class that it derives from, in words; None if nothing."""
    known = tuple(known)
    if "forward" in vars(module):
        return "its forward was replaced on the instance"
    if is_parametrized(module):
        names = ", ".join(dict(module.parametrizations.named_children()))  # type: ignore[union-attr]  # a ModuleDict
        return f"it is parametrized ({names}); remove the parametrizations first"
    for cls in type(module).__mro__:
        if cls in known:
            return None
        own = [
            name
            for name, value in vars(cls).items()
            if name not in _HARMLESS and (callable(value) or isinstance(value, property | staticmethod))
        ]
        if own:
            return f"{type(module).__name__} has a {own[0]} of its own, which would be lost"
    return f"{type(module).__name__} derives from no layer that is known here"


def is_lazy(module: nn.Module) -> bool:
    """Whether a layer has not seen an input yet and doesn't know its sizes."""
    return isinstance(module, _LazyNormBase) and module.has_uninitialized_params()


LAZY = "it is lazy and has not seen an input yet; pass an example, or call the model once"


def become(layer: nn.Module, kind: type[nn.Module], **attributes: Any) -> None:
    """Make a layer one of another class, in place: whoever holds it, in a list or a hook, holds the new one.

    Everything that it has stays: parameters, buffers, hooks, children, `.training`, attributes of its user's.
    """
    layer.__class__ = kind
    layer.__dict__.update(attributes)


def turn_into(layer: nn.Module, other: nn.Module) -> None:
    """Make a layer what another one is, in place, keeping its hooks and mode."""
    kept = {name: vars(layer)[name] for name in (*_HOOKS, "training") if name in vars(layer)}
    layer.__class__ = other.__class__
    layer.__dict__.clear()
    layer.__dict__.update(vars(other) | kept)


def chosen(model: nn.Module, where: Where, is_meant: Callable[[nn.Module], bool]) -> dict[str, nn.Module]:
    """The layers that are meant, each under its first name.

    Raises:
        ValueError: a name or pattern fits no such layer.
    """
    found = {name: module for name, module in model.named_modules() if is_meant(module)}
    if where is None:
        return found
    if callable(where):
        return {name: module for name, module in found.items() if where(name, module)}
    patterns = [where] if isinstance(where, str) else list(where)
    picked = {n for pattern in patterns for n in found if n == pattern or fnmatchcase(n, pattern)}
    for pattern in patterns:
        if not any(n == pattern or fnmatchcase(n, pattern) for n in found):
            close = difflib.get_close_matches(pattern, found, n=3)
            hint = f"did you mean {' or '.join(map(repr, close))}?" if close else f"there are {list(found)}"
            raise ValueError(f"where must name layers this operation is for, got {pattern!r}; {hint}")
    return {name: module for name, module in found.items() if name in picked}


def paths_of(model: nn.Module, module: nn.Module) -> str:
    """Every name a layer has, or words for the model itself."""
    names = [name for name, m in model.named_modules(remove_duplicate=False) if m is module]
    return " = ".join(name or "the model" for name in names)


def tied(model: nn.Module, module: nn.Module) -> str | None:
    """What shares a parameter with a layer, in words."""
    own = {id(p) for p in module.parameters(recurse=False)}
    for other in model.modules():
        if other is not module:
            for name, parameter in other.named_parameters(recurse=False):
                if id(parameter) in own:
                    return f"its parameter is tied to {paths_of(model, other)}.{name}"
    return None


def duplicate(model: nn.Module) -> nn.Module:
    """A deep copy, of a lazy model too, whose buffers torch itself does not copy."""
    kind: Any = nn.parameter.UninitializedBuffer
    lazy = [b for b in model.buffers() if isinstance(b, kind)]
    return copy.deepcopy(model, {id(b): kind(device=b.device, dtype=b.dtype) for b in lazy})


def materialized(model: nn.Module, example: Any) -> nn.Module:
    """The model, or, if a layer is lazy and there is an example, a copy that has seen it."""
    if example is None or not any(map(nn.parameter.is_lazy, (*model.parameters(), *model.buffers()))):
        return model
    twin = duplicate(model)
    modes = {module: module.training for module in twin.modules()}
    twin.eval()  # no statistics move
    with torch.no_grad(), forked_rng(twin):
        call(twin, own_copy(example))
    for module, training in modes.items():
        module.training = training
    return twin


def changed_copy(
    operation: str,
    model: nn.Module,
    change: Callable[[nn.Module], None],
    example: Any,
    *,
    changed: Sequence[str],
    refused: Sequence[str],
    modes: tuple[bool, ...],
) -> tuple[nn.Module, Certificate]:
    """A changed copy, certified where there is an example to compare on."""
    if example is None:
        twin = duplicate(model)
        change(twin)
        return twin, Certificate(operation, tuple(changed), tuple(refused))
    return certified(
        operation, model, change, example, changed=tuple(changed), refused=tuple(refused), modes=modes
    )
