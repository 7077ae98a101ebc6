"""Where batches come from: loaders and iterables, one batch in memory at a time."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Any

import torch

from musigma.inputs._arrays import is_array

Key = str | int | None


def inputs_of(batch: Any, key: Key) -> Any:
    """The array of a batch as loaders yield them: itself, the first of (inputs, targets, …), or batch[key].

    Raises:
        ValueError: a dict without `key`, or without that key.
        TypeError: no array is found where it should be.
    """
    if isinstance(batch, dict):
        if key not in batch:
            raise ValueError(f"a batch is a dict with keys {sorted(map(str, batch))}; key={key!r} names none")
        batch = batch[key]
    elif isinstance(batch, (tuple, list)) and not is_array(batch):
        place = 0 if key is None else key
        if not isinstance(place, int) or not -len(batch) <= place < len(batch):
            raise ValueError(f"a batch is a {type(batch).__name__} of {len(batch)}; key={key!r} names none")
        batch = batch[place]
    if not is_array(batch):
        raise TypeError(f"a batch must hold an array of inputs, got {type(batch).__name__}")
    return batch


def batches(source: Any, key: Key) -> Generator[Any, None, None]:
    """The input arrays of a loader or iterable, in order.

    A DataLoader draws a seed from the global generator each time it is iterated; it is put back, so that
    fitting first does not change the training that follows.

    Raises:
        TypeError: no iterable, or a data set, whose items are single examples.
    """
    if isinstance(source, torch.utils.data.Dataset):
        raise TypeError(
            f"{type(source).__name__} yields single examples, not batches; pass "
            "torch.utils.data.DataLoader(dataset, batch_size=256)"
        )
    if isinstance(source, (str, bytes, dict)) or not isinstance(source, Iterable):
        raise TypeError(f"expected an array or an iterable of batches, got {type(source).__name__}")
    restore = isinstance(source, torch.utils.data.DataLoader)
    with torch.random.fork_rng(devices=[], enabled=restore):
        for number, batch in enumerate(source):
            try:
                yield inputs_of(batch, key)
            except (TypeError, ValueError) as error:
                error.add_note(f"in batch {number}")
                raise
