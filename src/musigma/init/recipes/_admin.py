"""Admin: skip paths weighed by the variance that has been added before them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from musigma.graph import Edge, Input, Node, Source, named_inputs, record
from musigma.init.recipes._attention import scaled_block
from musigma.init.recipes._factors import skip_scales
from musigma.init.recipes._recipe import Weights, changed, graph_of, redrawn, register, streams_of
from musigma.statistics import moments

if TYPE_CHECKING:
    from musigma.init.planning import Entry, Plan

_SOURCE = "Liu et al. 2020"


@dataclass(frozen=True)
class Admin:
    """A learned scale ω on every skip path, set from the variances that the branches have on the example.

    Formula: ωᵢ² = Var[x₀] + Σ_{j<i} Var[fⱼ], measured with all ω at 1; x₀ is what the stream starts from
    (variance 1 behind a norm). Weights are Glorot's, uniform. The model adds as norm(ω·x + f(x)) with a
    parameter ω, a scalar or one a feature.

    Example:
        >>> import torch, musigma as ms
        >>> class Layer(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.omega, self.norm = torch.nn.Parameter(torch.ones(8)), torch.nn.LayerNorm(8)
        ...         self.up, self.down = torch.nn.Linear(8, 32), torch.nn.Linear(32, 8)
        ...     def forward(self, x):
        ...         return self.norm(self.omega * x + self.down(torch.relu(self.up(x))))
        >>> net = torch.nn.Sequential(Layer(), Layer(), Layer())
        >>> x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
        >>> plan = ms.init.initialize(net, x, scheme="admin")
        >>> [bool(net[i].omega[0] < net[i + 1].omega[0]) for i in (0, 1)]
        [True, True]

    References:
        Liu et al. 2020, Understanding the Difficulty of Training Transformers, section 4.
    """

    name: str = "admin"

    def __call__(self, plan: Plan, model: nn.Module) -> Plan:
        """The plan with Glorot's weights and every ω at 1; `fit` sets them. See `Recipe`."""
        graph, weights = graph_of(plan), Weights(plan, model)
        entries: dict[str, Entry] = {}
        lacking = []
        for stream in streams_of(plan, "Admin"):
            for block in stream.blocks:
                scales = skip_scales(block.branch)
                if not scales:
                    lacking.append(block.branch.add.module or "the model")
                for name, node in scales.items():
                    entry = weights.blank(name, node)
                    entries[entry.tensor] = redrawn(entry, "ones", f"ω, to be measured ({_SOURCE})")
                reason = f"Xavier ({_SOURCE})"
                entries |= scaled_block(graph, weights, block, 1.0, scheme="xavier_uniform", reason=reason)
        if lacking:
            where = ", ".join(list(dict.fromkeys(lacking))[:3])
            raise ValueError(
                f"Admin needs a learned scale on every skip path, but {len(lacking)} residual sums have none "
                f"(in {where}); add self.omega = nn.Parameter(torch.ones(d)) and write "
                f"norm(self.omega * x + f(x)), or use scheme='ds_init', which needs no change"
            )
        return changed(plan, entries, scheme=self.name)

    def fit(self, plan: Plan, model: nn.Module, example: Any) -> Plan:
        """Measure the branches and set every ω.

        Args:
            plan: what was drawn.
            model: the model, whose ω are changed.
            example: what to run it on.

        Returns:
            The plan with the values of ω.
        """
        weights = Weights(plan, model)
        found = streams_of(plan, "Admin")
        variances = _measured(plan, model, example)
        entries: dict[str, Entry] = {}
        for stream in found:
            total = variances(stream.blocks[0].branch.start)
            for block in stream.blocks:
                omega = math.sqrt(total)
                for name, node in skip_scales(block.branch).items():
                    entry = weights.blank(name, node)
                    said = f"ω of branch {block.number}: √{total:.4g}, the variance before it ({_SOURCE})"
                    entries[entry.tensor] = redrawn(entry, "constant", said, value=omega)
                    if entry.tensor not in plan.skipped:
                        model.get_parameter(entry.tensor).detach().fill_(omega)
                total += variances(Edge(block.branch.end.index))
        return changed(plan, entries)


class _Measured:
    def __init__(self, inputs: dict[str, Tensor]) -> None:
        self._inputs, self._outputs = inputs, {}  # type: ignore[var-annotated]

    def listen(self, node: Node, args: Any, kwargs: Any, outputs: tuple[Tensor, ...]) -> None:
        if outputs and outputs[0].is_floating_point() and outputs[0].numel():
            self._outputs[node.index] = float(moments(outputs[0], None).var())

    def __call__(self, source: Source) -> float:
        if isinstance(source, Edge):
            return float(self._outputs[int(source)])
        if isinstance(source, Input) and source.name in self._inputs:
            return float(moments(self._inputs[source.name], None).var())
        return 1.0


def _measured(plan: Plan, model: nn.Module, example: Any) -> _Measured:
    measured = _Measured(named_inputs(model, example))
    with torch.no_grad():
        graph = record(model, example, listen=measured.listen)
    known = graph_of(plan)
    if [(n.op, n.module) for n in graph] != [(n.op, n.module) for n in known]:
        raise ValueError(
            "Admin runs the example again, but the model took another path than when it was planned; pass an "
            "example on which it always takes the same one"
        )
    return measured


register(Admin())
