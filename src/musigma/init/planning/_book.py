"""The tensors of a plan: who is written how, and who is left alone and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from musigma.graph import Graph
from musigma.init._apply import _reason_to_skip
from musigma.init._fans import Fans
from musigma.init._names import Slot
from musigma.init.planning._entry import Entry
from musigma.init.schemes._scheme import SCHEMES


@dataclass(frozen=True)
class Note:
    """What is known of a tensor beside its law."""

    op: str = ""
    module: str = ""
    fans: Fans | None = None
    parts: int = 1
    activation: str | None = None
    norm: str | None = None
    branch: tuple[int, int] | None = None
    target: float | None = None


class Book:
    """Every parameter once: its entry, or why it has none.

    Attributes:
        entries: name → entry.
        skipped: name → why it stays as it is.
        notes: what can't be met, and what to do.

    Args:
        graph: the graph whose names are used.
        found: the model's parameters.
        kept: names that stay as they are, with the reason.
    """

    def __init__(self, graph: Graph, found: list[Slot], kept: Mapping[str, str]) -> None:
        self.slots = {name: slot for slot in found for name in slot.owners}
        self._groups = {name: group for group in graph.parameters for name in group}
        self.entries: dict[str, Entry] = {}
        self.skipped: dict[str, str] = {}
        self.notes: dict[str, None] = {}
        for slot in found:
            reason = next((kept[name] for name in slot.owners if name in kept), "")
            reason = reason or _reason_to_skip(slot.parameter)
            if not reason and isinstance(slot.parameter, UninitializedParameter):
                reason = "has no shape yet"
            if reason:
                self.skipped[slot.name] = reason

    def slot(self, name: str) -> Slot | None:
        """The tensor of a graph's parameter name."""
        for known in (name, *self._groups.get(name, ())):
            if known in self.slots:
                return self.slots[known]
        return None

    def is_open(self, name: str) -> bool:
        """Whether a tensor may be written and has no law yet."""
        slot = self.slot(name)
        return slot is not None and slot.name not in self.skipped and slot.name not in self.entries

    def is_kept(self, name: str) -> bool:
        """Whether a tensor stays as it is."""
        slot = self.slot(name)
        return slot is None or slot.name in self.skipped

    def entry(self, name: str) -> Entry | None:
        """The law of a tensor, if it has one."""
        slot = self.slot(name)
        return None if slot is None else self.entries.get(slot.name)

    def tensor(self, name: str) -> Tensor | None:
        """The tensor itself."""
        slot = self.slot(name)
        return None if slot is None else slot.parameter

    def owner(self, name: str) -> tuple[nn.Module, str] | None:
        """The layer that holds a tensor, and what it calls it."""
        slot = self.slot(name)
        if slot is None:
            return None
        return slot.owners.get(name) or next(iter(slot.owners.values()))

    def write(
        self, name: str, scheme: str, options: Mapping[str, Any], reason: str, note: Note | None = None
    ) -> Entry | None:
        """Give a tensor its law, once."""
        slot = self.slot(name)
        if slot is None or not self.is_open(name):
            return self.entry(name)
        note = note or Note()
        shape = tuple(slot.parameter.shape)
        given = {**options, **({"groups": note.parts} if scheme == "orthogonal" and note.parts > 1 else {})}
        law = SCHEMES[scheme].law(shape, fans=note.fans, options=given)
        entry = Entry(
            slot.name,
            shape,
            scheme,
            dict(options),
            law.mean,
            law.std,
            reason,
            note.op,
            note.module,
            note.fans,
            note.parts,
            note.activation,
            note.norm,
            note.branch,
            tuple(sorted(set(slot.owners) - {slot.name})),
            note.target,
        )
        self.entries[slot.name] = entry
        return entry

    def keep(self, name: str, reason: str) -> None:
        """Leave a tensor as it is."""
        slot = self.slot(name)
        if slot is not None and slot.name not in self.entries:
            self.skipped.setdefault(slot.name, reason)

    def note(self, text: str) -> None:
        """Say something about the plan, once."""
        self.notes.setdefault(text)
