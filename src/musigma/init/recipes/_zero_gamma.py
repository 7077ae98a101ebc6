"""Zero-γ: the weight of the norm that ends a branch starts at 0."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from musigma.graph import Parameter, kinds
from musigma.init.recipes._recipe import Weights, changed, redrawn, register, streams_of

if TYPE_CHECKING:
    from musigma.init.planning import Entry, Plan
    from musigma.init.recipes._structure import Block

_SOURCE = "Goyal et al. 2017, section 5.1"


@dataclass(frozen=True)
class ZeroGamma:
    """Every branch starts at 0 by the weight γ of the norm behind its last layer.

    Formula: x + norm(f(x)), γ = 0, β = 0.

    Example:
        >>> import torch, musigma as ms
        >>> class Block(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.f, self.norm = torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)
        ...     def forward(self, x):
        ...         return x + self.norm(self.f(x))
        >>> ms.init.plan(Block(), torch.ones(2, 8), scheme="zero_gamma")["norm.weight"].scheme
        'zeros'

    References:
        Goyal et al. 2017, Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour, section 5.1.
    """

    name: str = "zero_gamma"

    def __call__(self, plan: Plan, model: nn.Module) -> Plan:
        """The plan with γ = 0 at the end of branches; see `Recipe`."""
        weights = Weights(plan, model)
        entries: dict[str, Entry] = {}
        without = 0
        for stream in streams_of(plan, "zero-γ"):
            for block in stream.blocks:
                found = _closing_weights(block, weights)
                without += not found
                for entry in found:
                    said = f"the norm that ends branch {block.number} of {len(stream.blocks)}: 0 ({_SOURCE})"
                    entries[entry.tensor] = redrawn(entry, "zeros", said)
        if not entries:
            raise ValueError(
                "zero-γ needs a norm with a weight behind the last layer of a residual branch, but no branch "
                "ends in one (norms before the branch, as in pre-norm Transformers, don't count); put one "
                "there, or use scheme='rezero' with a learned scale, or scheme='fixup'"
            )
        notes = (
            [f"{without} residual branches don't end in a norm: zero-γ left them alone"] if without else []
        )
        return changed(plan, entries, notes, scheme=self.name)


def _closing_weights(block: Block, weights: Weights) -> list[Entry]:
    """The weights of the norm after the branch's last weight layer."""
    after = max((node.index for node in block.nodes), default=-1)
    closing = [n for n in block.branch.norms if n.index > after and n.index <= block.branch.end.index]
    found = []
    for norm in closing[-1:]:
        sources = norm.arguments.get("weight", ())
        if norm.op not in kinds.NORMS:  # written out in arithmetic: the weight is multiplied on behind it
            later = [n for n in block.branch.nodes if n.index > norm.index and n.op == "mul"]
            sources = tuple(s for n in later for s in n.inputs)
        found += [weights.blank(s.name, norm) for s in sources if isinstance(s, Parameter)]
    return found


register(ZeroGamma())
