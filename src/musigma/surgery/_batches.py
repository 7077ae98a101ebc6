"""What a loader yields, as what the model is called with."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

Pick = str | int | Callable[[Any], Tensor] | None
"""Where something is in a batch: a key, an index, or a function of the batch; None for nowhere."""


def picked(batch: Any, pick: Pick) -> Tensor | None:
    """What a batch holds at a place.

    Raises:
        ValueError: there is no such place.
        TypeError: no tensor is there.
    """
    if pick is None:
        return None
    if callable(pick):
        found = pick(batch)
    else:
        try:
            found = batch[pick]
        except (KeyError, IndexError, TypeError) as error:
            kind = type(batch).__name__
            holds = f"the keys {list(batch)}" if isinstance(batch, Mapping) else f"a {kind}"
            raise ValueError(f"a batch has nothing at {pick!r}; it is {holds}") from error
    if not isinstance(found, Tensor):
        raise TypeError(f"what is picked from a batch must be a tensor, got {type(found).__name__}")
    return found


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

    Of a dict the keys that the model doesn't take are left out: targets, masks, weights. A tuple is arguments
    wherever the model takes so many. A list, which is what a DataLoader makes of the fields of a data set, is
    as many arguments as the model cannot do without, at least one, then targets.
    """
    if not isinstance(batch, list | tuple | Mapping) or not batch:
        return batch
    signature = _signature(model)
    if isinstance(batch, Mapping):
        return batch if signature is None else _taken(signature, batch)
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


def _taken(signature: inspect.Signature, batch: Mapping[Any, Any]) -> Mapping[Any, Any]:
    parameters = signature.parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return batch
    taken = {key: value for key, value in batch.items() if key in parameters}
    # Where nothing is left the names are wrong, which the call itself says best.
    return taken or batch


def _binds(signature: inspect.Signature, arguments: tuple[Any, ...]) -> bool:
    try:
        signature.bind(*arguments)
    except TypeError:
        return False
    return True


def _required(signature: inspect.Signature) -> int:
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in positional and p.default is p.empty for p in signature.parameters.values())
