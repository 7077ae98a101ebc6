"""LSUV: orthonormal weights, then every layer's output brought to one variance, in execution order."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from musigma.graph import Graph, Node, Parameter, kinds, record
from musigma.init.recipes._recipe import Weights, changed, graph_of, redrawn, register
from musigma.statistics import moments

if TYPE_CHECKING:
    from musigma.init.planning import Entry, Plan

_SOURCE = "Mishkin & Matas 2016"
_LAYERS = kinds.PRODUCTS | kinds.CONVOLUTIONS | kinds.TRANSPOSED_CONVOLUTIONS | {"multi_head_attention"}


@dataclass(frozen=True)
class Lsuv:
    """Orthonormal weights, each divided by the standard deviation that its layer gives on the example.

    Formula: W orthonormal; then, layer by layer as they run, W ← W·σ/std(output) until the output's
    variance is σ²·(1 ± tolerance), at most `tries` times. Biases start at 0. A layer whose weight an
    earlier one has used already, or whose output is constant, is left and named in the notes.

    Args:
        std: σ.
        tolerance: how far the variance may be off, relatively.
        tries: how often the example is run at most.

    Example:
        >>> import torch, musigma as ms
        >>> net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
        >>> x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
        >>> plan = ms.init.initialize(net, x, scheme="lsuv")
        >>> round(ms.moments(net(x).detach(), None).var().item(), 1)
        1.0

    References:
        Mishkin & Matas 2016, All You Need Is a Good Init, algorithm 1.
    """

    std: float = 1.0
    tolerance: float = 0.1
    tries: int = 10
    name: str = "lsuv"

    def __call__(self, plan: Plan, model: nn.Module) -> Plan:
        """The plan with orthonormal weights; `fit` scales them. See `Recipe`."""
        graph, weights = graph_of(plan), Weights(plan, model)
        entries: dict[str, Entry] = {}
        for node in graph.nodes:
            for name in graph.weights(node) if node.op in _LAYERS else ():
                entry = weights.get(name)
                if entry is not None and len(entry.shape) > 1:
                    said = f"orthonormal, to be scaled on the example ({_SOURCE})"
                    groups = entry.parts if entry.shape[0] % max(entry.parts, 1) == 0 else 1
                    entries[entry.tensor] = redrawn(entry, "orthogonal", said, gain=1.0, groups=groups)
        if not entries:
            raise ValueError("LSUV scales linear and convolutional layers, but the plan has none to write")
        for entry in plan.entries:
            if len(entry.shape) == 1 and entry.std > 0:
                entries[entry.tensor] = redrawn(entry, "zeros", f"a bias starts at 0 ({_SOURCE})")
        return changed(plan, entries, scheme=self.name)

    def fit(self, plan: Plan, model: nn.Module, example: Any) -> Plan:
        """Scale the weights on the example.

        Args:
            plan: what was drawn.
            model: the model, whose weights are changed.
            example: what to run it on; of a sharded model the same on every rank.

        Returns:
            The plan with the laws that the scaled weights follow.
        """
        sweep = _Sweep(plan, model, self)
        for _ in range(self.tries):
            sweep.begin()
            with torch.no_grad():
                record(model, example, listen=sweep.listen)
            sweep.keep()
            if not sweep.scaled:
                break
        entries = {}
        weights = Weights(plan, model)
        for name, factor in sweep.factors.items():
            entry = weights.get(name)
            assert entry is not None
            said = f"orthonormal times {factor:.4g}, which gives std {self.std:g} on the example ({_SOURCE})"
            options = {**entry.options, "gain": factor}
            entries[name] = redrawn(entry, "orthogonal", said, **options)
        return changed(plan, entries, sweep.notes())


@dataclass
class _Sweep:
    """One run of the example after the other, in which every layer is scaled before the next one runs."""

    plan: Plan
    model: nn.Module
    recipe: Lsuv
    factors: dict[str, float] = field(default_factory=dict)
    scaled: dict[str, float] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)
    off: dict[str, str] = field(default_factory=dict)
    live: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._graph = graph_of(self.plan)
        self._written = {n: e.tensor for e in self.plan.entries for n in (e.tensor, *e.tied)}

    def begin(self) -> None:
        self.scaled, self.seen, self.off, self.live = {}, set(), {}, {}

    def keep(self) -> None:
        """Scale the shards of what ran gathered from them, and is gone."""
        for name, factor in self.scaled.items():
            parameter = self.model.get_parameter(name)
            if parameter is not self.live[name]:
                parameter.detach().mul_(factor)

    def listen(self, node: Node, args: Any, kwargs: Any, outputs: tuple[Tensor, ...]) -> None:
        name = self._weight(node)
        if name is None or not outputs[0].numel():
            return
        again = name in self.seen
        self.seen.add(name)
        output = outputs[0]
        var = float(moments(output, None).var())
        wanted = self.recipe.std**2
        if abs(var / wanted - 1) <= self.recipe.tolerance:
            return
        if again:
            self.off[name] = f"is used by several layers; after {node.module or 'the model'} var {var:.3g}"
            return
        if not 0 < var < math.inf:
            self.off[name] = f"gives variance {var:.3g} on the example, which no factor mends"
            return
        factor = math.sqrt(wanted / var)
        self.live[name] = self.model.get_parameter(name)
        self.live[name].detach().mul_(factor)
        # What runs next sees the output of the scaled weight: biases are 0, so it is as much larger.
        output.mul_(factor)
        self.factors[name] = self.factors.get(name, 1.0) * factor
        self.scaled[name] = factor

    def notes(self) -> list[str]:
        left = self.off | {name: f"still off by {f:.3g} after all tries" for name, f in self.scaled.items()}
        return [f"LSUV: {name} {why}" for name, why in left.items()]

    def _weight(self, node: Node) -> str | None:
        if node.op not in _LAYERS:
            return None
        known = self._graph[node.index] if node.index < len(self._graph) else None
        if known is None or (known.op, known.module) != (node.op, node.module):
            raise ValueError(
                f"LSUV runs the example several times, but the model took another path: {node} where the "
                f"plan has {known}; pass an example on which it always takes the same one"
            )
        names = _scalable(self._graph, known)
        return next((self._written[name] for name in names if name in self._written), None)


def _scalable(graph: Graph, node: Node) -> tuple[str, ...]:
    """The weights that a layer's output grows with: of torch's attention the output projection."""
    if node.op == "multi_head_attention":
        return tuple(s.name for s in node.arguments.get("out_proj_weight", ()) if isinstance(s, Parameter))
    return graph.weights(node)


register(Lsuv())
