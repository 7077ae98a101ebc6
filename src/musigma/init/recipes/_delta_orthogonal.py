"""Orthogonal layers throughout: convolutions that keep every feature map's length."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from musigma.graph import kinds
from musigma.init.recipes._recipe import Weights, changed, graph_of, redrawn, register
from musigma.init.recipes._structure import heads

if TYPE_CHECKING:
    from musigma.init.planning import Entry, Plan

_SOURCE = "Xiao et al. 2018"


@dataclass(frozen=True)
class DeltaOrthogonal:
    """Delta-orthogonal convolutions and orthogonal linear layers, at the gain of the auto plan.

    Formula: the central tap (or the matrix) orthogonal, times σ_w = √(fan_in·Var W) of the auto plan, the
    critical point of the activation that follows, times √(max(rows, columns)/columns), so that the
    variance stays what it was where a layer widens. Transposed convolutions, look-ups and the head keep the
    auto plan's law.

    Example:
        >>> import torch, musigma as ms
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(4, 4, 3, padding=1), torch.nn.Tanh(),
        ...                           torch.nn.Flatten(), torch.nn.Linear(256, 2))
        >>> plan = ms.init.plan(net, torch.randn(2, 4, 8, 8), scheme="delta_orthogonal")
        >>> plan["0.weight"].scheme
        'delta_orthogonal'

    References:
        Xiao et al. 2018, Dynamical Isometry and a Mean Field Theory of CNNs, section 3; Saxe et al. 2014.
    """

    name: str = "delta_orthogonal"

    def __call__(self, plan: Plan, model: nn.Module) -> Plan:
        """The plan with orthogonal laws; see `Recipe`."""
        graph, weights = graph_of(plan), Weights(plan, model)
        entries: dict[str, Entry] = {}
        for node in graph.weight_layers():
            if node.op not in kinds.PRODUCTS | kinds.CONVOLUTIONS:
                continue
            for name in graph.weights(node):
                entry = weights.get(name)
                if entry is not None and entry.std > 0 and len(entry.shape) > 1:
                    groups = node.options.get("groups", 1)
                    entries[entry.tensor] = _orthogonal(entry, groups if isinstance(groups, int) else 1)
        for entry in weights.of(heads(graph)):
            entries.pop(entry.tensor, None)
        if not entries:
            raise ValueError(
                "delta-orthogonal is about convolutions and linear layers before the head, but the plan has "
                "none to write; use scheme='auto'"
            )
        return changed(plan, entries, scheme=self.name)


def _orthogonal(entry: Entry, groups: int) -> Entry:
    convolves = len(entry.shape) > 2
    parts = groups if convolves else max(entry.parts, 1)
    parts = parts if entry.shape[0] % parts == 0 else 1
    rows, columns = entry.shape[0] // parts, entry.shape[1]
    fan_in = entry.fans.fan_in if entry.fans is not None else math.prod(entry.shape[1:])
    # Only the central tap is left, and it never falls on the border.
    gain = entry.std * math.sqrt(fan_in * max(rows, columns) / columns)
    scheme = "delta_orthogonal" if convolves else "orthogonal"
    said = f"{scheme.replace('_', '-')} with gain {gain:.4g}: {entry.reason} ({_SOURCE})"
    return redrawn(entry, scheme, said, gain=gain, groups=parts)


register(DeltaOrthogonal())
