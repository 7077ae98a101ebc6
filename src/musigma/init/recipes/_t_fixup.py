"""T-Fixup: Transformers without normalization and warm-up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from musigma.graph import kinds
from musigma.init.recipes._attention import scaled_block
from musigma.init.recipes._recipe import Weights, changed, graph_of, redrawn, register, streams_of

if TYPE_CHECKING:
    from musigma.init.planning import Entry, Plan

_SOURCE = "Huang et al. 2020, section 3.2"


@dataclass(frozen=True)
class TFixup:
    """Xavier everywhere, smaller with the depth for values, outputs and MLPs; embeddings small too.

    Formula: gain 0.67·N^(−1/4) in an encoder (and a stack that attends to no other) of N layers,
    (9M)^(−1/4) in a decoder of M layers; embeddings N(0, 1/d), times (9M)^(−1/4). The paper takes
    layer norms and warm-up out.

    Example:
        >>> import torch, musigma as ms
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 32, batch_first=True)
        >>> plan = ms.init.plan(layer, torch.randn(1, 3, 8), scheme="t_fixup")
        >>> round(plan["linear1.weight"].std / (2 / 40) ** 0.5, 3)
        0.67

    References:
        Huang, Perez, Ba & Volkovs 2020, Improving Transformer Optimization Through Better Initialization,
        section 3.2.
    """

    name: str = "t_fixup"

    def __call__(self, plan: Plan, model: nn.Module) -> Plan:
        """The plan with T-Fixup's laws; see `Recipe`."""
        graph, weights = graph_of(plan), Weights(plan, model)
        found = streams_of(plan, "T-Fixup")
        if not any(block.kind != "other" for stream in found for block in stream.blocks):
            raise ValueError(
                "T-Fixup is about Transformers, but no residual branch of this model attends to anything; "
                "scheme='fixup' is its relative for other residual networks"
            )
        entries: dict[str, Entry] = {}
        depth = max((s.layers for s in found if s.decodes), default=max(s.layers for s in found))
        for entry in plan.entries:
            if len(entry.shape) == 2 and entry.op in kinds.EMBEDDINGS:
                std = entry.shape[1] ** -0.5 * (9 * depth) ** -0.25
                said = f"embedding: N(0, 1/d)·(9·{depth})^(−1/4) ({_SOURCE})"
                entries[entry.tensor] = redrawn(entry, "normal", said, std=std)
            elif len(entry.shape) > 1 and entry.op in kinds.PRODUCTS:
                said = f"outside of the branches: Xavier ({_SOURCE})"
                entries[entry.tensor] = redrawn(entry, "xavier_uniform", said, fans=weights.fans(entry))
        for stream in found:
            n = stream.layers
            gain = (9 * n) ** -0.25 if stream.decodes else 0.67 * n**-0.25
            formula = f"(9·{n})^(−1/4)" if stream.decodes else f"0.67·{n}^(−1/4)"
            for block in stream.blocks:
                reason = f"Xavier·{formula} ({_SOURCE})"
                entries |= scaled_block(graph, weights, block, gain, scheme="xavier_uniform", reason=reason)
        normed = bool(graph.norms())
        notes = ["T-Fixup takes the place of layer norms: take them out (nn.Identity), and warm-up"]
        return changed(plan, entries, notes if normed else (), scheme=self.name)


register(TFixup())
