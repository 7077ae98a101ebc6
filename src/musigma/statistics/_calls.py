"""Which layer each rank is in: counted without traffic, told through the group's store once a wait is long.

A layer that exchanges something with the other ranks waits for ever if one of them does not come. Counting
calls in the store would find that out, at the price of traffic in each of them. It is not needed: exchanges
of one group happen one after the other and every one needs all ranks, so a rank that waits in exchange s
knows that each of the others has completed exactly the s − 1 before it, in which it took part itself. Only
whether another waits in s too is unknown. Whoever waits longer than `GRACE` therefore writes its own state
into the store (one key a rank, overwritten), and when the wait fails whoever has written none for s was not
there.
"""

from __future__ import annotations

import gc
import json
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

GRACE = 2.0
"""Seconds of waiting before a rank writes down where it is; a healthy exchange takes a thousandth of that."""

SETTLE = 3.0
"""Seconds that a rank whose exchange failed waits for the others to write down where they are."""

CAUSES = (
    "Every rank has to make the same calls in the same order, backward included. Usual causes are a branch"
    " that only some ranks take, and loaders of different lengths. Take the branch on all ranks or none; drop"
    " the surplus (DataLoader(drop_last=True)), or let a rank that has run out pass an empty batch, x[:0],"
    " forward and backward through the model"
)


@dataclass(eq=False)
class Caller:
    """One layer, or one kind of anonymous call, as its group counts it."""

    index: int  # in the order of first calls, which ranks that make the same calls agree on
    label: str
    layer: weakref.ref[nn.Module] | None = None
    timeout: timedelta | None = None
    calls: dict[str, int] = field(default_factory=lambda: {"forward": 0, "backward": 0})


@dataclass(frozen=True)
class State:
    """Where a rank is, and how often it has made each call."""

    sequence: int
    layer: str
    direction: str
    counts: dict[str, dict[str, int]]

    def encoded(self) -> str:
        return json.dumps([self.sequence, self.layer, self.direction, self.counts])


class Ledger:
    """The exchanges of one process group, as this rank has made them."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all counts: what all ranks do together when they have found that theirs differ."""
        self.sequence = 0
        self._layers: weakref.WeakKeyDictionary[nn.Module, Caller] = weakref.WeakKeyDictionary()
        self._others: dict[str, Caller] = {}
        self._known = 0

    def caller(self, label: str) -> Caller:
        """Who calls: the layer that is on its way (`calling`), or `label` for all calls without one."""
        layer, timeout = getattr(_local, "layer", None), getattr(_local, "timeout", None)
        caller = self._others.get(label) if layer is None else self._layers.get(layer)
        if caller is None:
            self._known += 1
            if layer is None:
                caller = self._others[label] = Caller(self._known, label)
            else:
                caller = Caller(self._known, type(layer).__name__, weakref.ref(layer))
                self._layers[layer] = caller
        caller.timeout = timeout
        return caller

    def callers(self) -> list[Caller]:
        return [*self._layers.values(), *self._others.values()]


_local = threading.local()
_ledgers: weakref.WeakKeyDictionary[Any, Ledger] = weakref.WeakKeyDictionary()


def ledger_of(group: dist.ProcessGroup) -> Ledger:
    """The ledger of a group; a group that is made again starts a new one."""
    ledger = _ledgers.get(group)
    if ledger is None:
        ledger = _ledgers[group] = Ledger()
    return ledger


@contextmanager
def calling(layer: nn.Module, timeout: timedelta | None) -> Iterator[None]:
    """Exchanges inside this block are this layer's, and wait for `timeout` (the group's own for None)."""
    before = getattr(_local, "layer", None), getattr(_local, "timeout", None)
    _local.layer, _local.timeout = layer, timeout
    try:
        yield
    finally:
        _local.layer, _local.timeout = before


class Exchange:
    """One exchange of one caller: its header, its waiting, and the error if the ranks don't meet in it."""

    def __init__(self, group: dist.ProcessGroup, caller: Caller, direction: str) -> None:
        self.group, self.caller, self.direction = group, caller, direction
        self.ledger = ledger_of(group)
        self.ledger.sequence += 1
        caller.calls[direction] += 1
        self._told: State | None = None
        self._heard: dict[int, State] = {}

    def header(self, size: int) -> list[float]:
        """What has to be the same on all ranks, whoever they are."""
        return [
            float(self.direction == "backward"),
            self.caller.index,
            self.caller.calls[self.direction],
            size,
        ]

    def finish(self, start: Callable[[], dist.Work]) -> None:
        """Start the work and wait for it, from a while on writing and reading where the ranks are.

        Raises:
            RuntimeError: a rank did not come within the timeout, or has left.
        """
        began, pause, work = time.monotonic(), GRACE, None
        while True:
            try:
                work = work or start()
                work.wait(timedelta(seconds=pause))
                return
            except RuntimeError as error:
                if work is None or (work.is_completed() and work.exception() is not None):
                    waited = time.monotonic() - began
                    raise self.failure(f"after {waited:.1f} s a rank has not come, or has left") from error
                if work.is_completed():  # just in time
                    return
            self._listen()
            pause = min(2 * pause, 30.0)

    def failure(self, what: str) -> RuntimeError:
        """The error for this exchange, with where every rank is and how often it has made this call."""
        end, ranks = time.monotonic() + SETTLE, range(dist.get_world_size(self.group))
        reachable = self._listen()
        while reachable and len(self._heard) < len(ranks) and time.monotonic() < end:
            time.sleep(0.05)
            reachable = self._listen()
        mine = self._state()
        told = "".join(f"\n  rank {rank}: {self._where(rank, reachable)}" for rank in ranks)
        if not reachable and len(self._heard) < len(ranks):
            told += "\n  (the process that keeps the store of the group, which would tell, has left)"
        return RuntimeError(
            f"the ranks do not meet in the {mine.direction} of {mine.layer}: {what}.{told}\n{CAUSES}"
        )

    def _where(self, rank: int, reachable: bool) -> str:
        mine, state = self._state(), self._heard.get(rank)
        if rank == dist.get_rank(self.group):
            state = mine
        if state is not None:
            count = state.counts.get(mine.layer, {}).get(mine.direction, 0)
            return f"in the {state.direction} of {state.layer}; call {count} of this {mine.direction}"
        count = self.caller.calls[self.direction] - 1
        if reachable:
            return f"elsewhere, after {count} calls of this {mine.direction}"
        return f"unknown, after {count} or {count + 1} calls of this {mine.direction}"

    def _state(self) -> State:
        if self._told is None:
            names = _names(self.ledger.callers())
            counts = {names[c]: dict(c.calls) for c in self.ledger.callers()}
            self._told = State(self.ledger.sequence, names[self.caller], self.direction, counts)
        return self._told

    def _listen(self) -> bool:
        """Write where this rank is, and read where the others are; False if the store can't be reached."""
        rank, mine = dist.get_rank(self.group), self._state()
        try:
            store = self.group.get_group_store()
            if rank not in self._heard:
                store.set(_key(rank), mine.encoded())
                self._heard[rank] = mine
            for other in range(dist.get_world_size(self.group)):
                if other not in self._heard and store.check([_key(other)]):
                    state = State(*json.loads(store.get(_key(other))))
                    if state.sequence == mine.sequence:
                        self._heard[other] = state
        except (RuntimeError, OSError):  # the process that keeps the store has left
            return False
        return True


def _key(rank: int) -> str:
    return f"musigma/rank {rank}"


def _names(callers: list[Caller]) -> dict[Caller, str]:
    """What to call each layer: its path in the largest module that holds it. Slow, and for errors only."""
    paths: dict[nn.Module, list[str]] = {}
    wrappers = (DistributedDataParallel, DataParallel)
    for root in gc.get_objects():
        # By type(): what stands in for something else may not answer. A constructor may not have run yet.
        if (
            not issubclass(type(root), nn.Module)
            or issubclass(type(root), wrappers)
            or "_modules" not in root.__dict__
        ):
            continue
        for path, module in root.named_modules():
            paths[module] = max(paths.get(module, []), path.split(".") if path else [], key=len)
    names = {}
    for caller in callers:
        layer = None if caller.layer is None else caller.layer()
        path = "" if layer is None else ".".join(paths.get(layer, []))
        names[caller] = f"{caller.label} '{path}'" if path else f"{caller.label} (number {caller.index})"
    return names
