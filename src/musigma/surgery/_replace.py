"""Put other modules in the place of some, wherever they stand."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from musigma.surgery._certificate import Certificate
from musigma.surgery._layers import duplicate


def replace(
    model: nn.Module,
    predicate: type[nn.Module] | tuple[type[nn.Module], ...] | Callable[[nn.Module], bool],
    factory: Callable[[nn.Module], nn.Module],
) -> tuple[nn.Module, Certificate]:
    """Replace every module that a predicate picks by what a factory makes of it.

    The modules are looked up before anything is replaced, at any depth; one that stands in several places
    is replaced by one and the same new module in all of them, and the model itself may be picked. What is
    inside a replaced module goes with it and is not looked at. The factory answers for what the new module
    computes: nothing is compared.

    Args:
        model: any module; left as it is.
        predicate: says of a module whether it is replaced; or a class, or several, whose instances are.
        factory: given the module of the copy, which it may take tensors from, returns the new one; the same
            module for leaving it. `.training` is set to the old module's.

    Returns:
        a copy with the new modules, and a certificate with one line for each module replaced.

    Raises:
        TypeError: the factory returned no module; nothing has been changed.

    Example:
        >>> import torch, musigma as ms
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 1), torch.nn.BatchNorm2d(8))
        >>> new, certificate = ms.surgery.replace(
        ...     net, torch.nn.BatchNorm2d, lambda old: torch.nn.GroupNorm(4, old.num_features)
        ... )
        >>> new[1], certificate.changed
        (GroupNorm(4, 8, eps=1e-05, affine=True, bias=True), ('1: BatchNorm2d -> GroupNorm',))
    """
    is_meant: Callable[[nn.Module], bool]
    if isinstance(predicate, type | tuple):
        kinds = predicate
        is_meant = lambda module: isinstance(module, kinds)  # noqa: E731  # one expression for either kind
    else:
        is_meant = predicate
    twin = duplicate(model)
    new = {module: _made(module, factory) for module in _outermost(twin, is_meant)}
    new = {old: module for old, module in new.items() if module is not old}
    changed = tuple(
        f"{_places(twin, old)}: {type(old).__name__} -> {type(module).__name__}"
        for old, module in new.items()
    )
    for parent in list(twin.modules()):
        for name, child in parent._modules.items():
            if child in new:
                parent._modules[name] = new[child]
    return new.get(twin, twin), Certificate("replace", changed)


def _outermost(model: nn.Module, is_meant: Callable[[nn.Module], bool]) -> list[nn.Module]:
    """The modules picked, without those that only stand inside another one that is picked."""
    found: dict[nn.Module, None] = {}
    seen: set[nn.Module] = set()
    pending = [model]
    while pending:
        module = pending.pop()
        if module in seen:
            continue
        seen.add(module)
        if is_meant(module):
            found[module] = None
        else:
            pending += reversed(list(module.children()))
    return list(found)


def _made(old: nn.Module, factory: Callable[[nn.Module], nn.Module]) -> nn.Module:
    new = factory(old)
    if not isinstance(new, nn.Module):
        raise TypeError(
            f"factory must return the module to put in place of {type(old).__name__}, got "
            f"{type(new).__name__}; return the old one to leave it"
        )
    return new if new is old else new.train(old.training)


def _places(model: nn.Module, module: nn.Module) -> str:
    names = [name for name, m in model.named_modules(remove_duplicate=False) if m is module]
    return ", ".join(name or "the model" for name in names)
