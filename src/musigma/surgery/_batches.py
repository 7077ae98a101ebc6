"""What a loader yields, as what the model is called with."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn


def as_batches(data: Any) -> Iterable[Any]:
    """`data` as batches: a tensor, a tuple of arguments or a dict of keywords is a single one.

    Raises:
        TypeError: it is neither an example nor something that yields examples.
    """
    if isinstance(data, Tensor | tuple | Mapping):
        return [data]
    if not isinstance(data, Iterable):
        raise TypeError(
            "data must be an example (a tensor, a tuple of arguments, a dict of keywords), a list of them or "
            f"a loader; got {type(data).__name__}"
        )
    return data


def as_example(model: nn.Module, batch: Any) -> Any:
    """One batch as an example. What a loader yields beyond the model's own arguments are targets.

    A tuple is arguments wherever the model takes so many. A list, which is what a DataLoader makes of the
    fields of a data set, is as many arguments as the model cannot do without, at least one, then targets.
    """
    if not isinstance(batch, list | tuple) or not batch:
        return batch
    signature = _signature(model)
    if signature is None:
        return tuple(batch)
    if isinstance(batch, tuple) and _binds(signature, batch):
        return batch
    return tuple(batch[: max(1, _required(signature))])


def _signature(model: nn.Module) -> inspect.Signature | None:
    try:
        return inspect.signature(model.forward)
    except (TypeError, ValueError):
        return None


def _binds(signature: inspect.Signature, arguments: tuple[Any, ...]) -> bool:
    try:
        signature.bind(*arguments)
    except TypeError:
        return False
    return True


def _required(signature: inspect.Signature) -> int:
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in positional and p.default is p.empty for p in signature.parameters.values())
