"""A plan: every tensor of a model with its law, before anything is written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import nn

from musigma.graph import Graph, unwrap
from musigma.init._names import slots
from musigma.init._report import ApplyReport, Written
from musigma.init._write import obstacle, write
from musigma.init.planning import _render
from musigma.init.planning._entry import Entry, Layer
from musigma.init.planning._measure import tasks_of

if TYPE_CHECKING:
    from musigma.init.planning._verification import Verification


@dataclass
class Plan:
    """How every tensor of a model is to be initialized, and what is expected then.

    Iterating gives the entries; printing gives a table.

    Attributes:
        entries: one for each tensor that is written, in order of registration.
        layers: what is expected of each weight layer, in execution order.
        skipped: name → why a tensor stays as it is.
        notes: what can't be met and what to do, and which path ran.
        seed: what the numbers are drawn from, with each tensor's name.
        scheme: "auto", or what was asked for.
        graph: the model as it ran.
        verification: what was measured after the initialization; None if nothing was.
        lr_scale: optimizer ("adam", "sgd") → tensor → factor of the learning rate; empty but for μP.

    Example:
        >>> import torch, musigma as ms
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
        >>> plan = ms.init.plan(model, torch.randn(32, 8, generator=torch.Generator().manual_seed(0)))
        >>> plan["0.weight"].activation, plan["0.bias"].scheme
        ('relu', 'zeros')
    """

    entries: tuple[Entry, ...]
    layers: tuple[Layer, ...] = ()
    skipped: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    seed: int = 0
    scheme: str = "auto"
    graph: Graph | None = None
    verification: Verification | None = None
    lr_scale: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, name: str) -> Entry:
        for entry in self.entries:
            if name == entry.tensor or name in entry.tied:
                return entry
        why = f"; it is left as it is: {self.skipped[name]}" if name in self.skipped else ""
        raise KeyError(f"{name!r} has no entry in the plan{why}")

    def apply(self, model: nn.Module, seed: int | None = None) -> ApplyReport:
        """Write what is planned.

        Args:
            model: the planned model, or one with tensors of the same names and shapes.
            seed: another seed than the plan's.

        Returns:
            What was written.

        Raises:
            ValueError: the model lacks a tensor of the plan, has one of another shape or on the meta device.
                Nothing has changed then.
        """
        found = slots(unwrap(model))
        tasks = tasks_of(self.entries, found)
        problems = [f"{task.name} {why}" for task in tasks if (why := obstacle(task.slot.parameter))]
        if problems:
            raise ValueError("the plan can't be applied, nothing was changed:\n  " + "\n  ".join(problems))
        write(tasks, self.seed if seed is None else seed)
        written = {
            entry.tensor: Written(entry.tensor, entry.scheme, entry.shape, entry.fans, entry.std, entry.tied)
            for entry in self.entries
        }
        untouched = {slot.name for slot in found} - written.keys() - self.skipped.keys()
        return ApplyReport(written, dict(self.skipped), tuple(sorted(untouched)))

    def __str__(self) -> str:
        return _render.table(self)

    def to_json(self) -> str:
        """The plan as JSON: entries, layers, what is skipped, notes and the verification."""
        return _render.to_json(self)

    def to_html(self) -> str:
        """The plan as one HTML page that needs nothing else."""
        return _render.to_html(self)

    def _repr_html_(self) -> str:
        return _render.fragment(self)
