"""ReZero and SkipInit: a learned scalar at the end of every branch, which starts at 0."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from musigma.graph import Parameter
from musigma.init.recipes._recipe import (
    Weights,
    changed,
    graph_of,
    redrawn,
    register,
    streams_of,
)

if TYPE_CHECKING:
    from musigma.init.planning import Entry, Plan
    from musigma.init.recipes._structure import Block


@dataclass(frozen=True)
class ZeroScale:
    """Every branch starts at 0 by a learned scale at its end: x + α·f(x), α = 0.

    Formula: α = 0; std = gain/√fan_in (He) for the branch's layers. The network is the identity at the
    start, whatever its depth. A LayerScale vector may stand for the scalar.

    Args:
        name: "rezero" or "skipinit", which say the same of Transformers and of ResNets.
        source: the paper.

    Example:
        >>> import torch, musigma as ms
        >>> class Block(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.f, self.alpha = torch.nn.Linear(8, 8), torch.nn.Parameter(torch.ones(()))
        ...     def forward(self, x):
        ...         return x + self.alpha * torch.relu(self.f(x))
        >>> plan = ms.init.plan(Block(), torch.ones(2, 8), scheme="skipinit")
        >>> plan["alpha"].scheme, plan["f.weight"].std
        ('zeros', 0.5)

    References:
        Bachlechner et al. 2020, ReZero is All You Need, eq. 1; De & Smith 2020, Batch Normalization Biases
        Residual Blocks Towards the Identity Function, section 4.
    """

    name: str = "rezero"
    source: str = "Bachlechner et al. 2020"

    def __call__(self, plan: Plan, model: nn.Module) -> Plan:
        """The plan with scales at 0; see `Recipe`."""
        weights, graph = Weights(plan, model), graph_of(plan)
        entries: dict[str, Entry] = {}
        lacking = []
        for stream in streams_of(plan, self.name):
            for block in stream.blocks:
                scales = _scales(block, weights)
                if not scales:
                    lacking.append(block.branch.add.module or block.branch.end.module or "the model")
                for entry in scales:
                    said = f"scales branch {block.number} of {len(stream.blocks)}: 0 ({self.source})"
                    entries[entry.tensor] = redrawn(entry, "zeros", said)
                for entry in weights.of(block.nodes):
                    said = f"the branch's scale is 0: He's law whatever the depth ({self.source})"
                    entries[entry.tensor] = redrawn(entry, "normal", said, std=weights.he_std(entry))
        if lacking:
            where = ", ".join(list(dict.fromkeys(lacking))[:3])
            raise ValueError(
                f"{self.name} needs a learned scale at the end of every residual branch, but "
                f"{len(lacking)} of {len(graph.residual_branches())} have none (in {where}); add "
                f"self.alpha = nn.Parameter(torch.zeros(())) and return x + self.alpha * f(x), or use "
                f"scheme='fixup' ('zero_gamma' where branches end in a norm)"
            )
        return changed(plan, entries, scheme=self.name)


def _scales(block: Block, weights: Weights) -> list[Entry]:
    return [
        weights.blank(source.name, node)
        for node in block.branch.scalings
        if node.op == "mul"
        for source in node.inputs
        if isinstance(source, Parameter)
    ]


register(ZeroScale())
register(ZeroScale("skipinit", "De & Smith 2020"))
