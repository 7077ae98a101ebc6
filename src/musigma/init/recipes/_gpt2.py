"""GPT-2: one small spread for all weights, and a smaller one where residual branches end."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from musigma.init.recipes._recipe import Weights, changed, redrawn, register, streams_of

if TYPE_CHECKING:
    from musigma.init.planning import Plan

_SOURCE = "Radford et al. 2019, section 2.3"


@dataclass(frozen=True)
class Gpt2:
    """N(0, 0.02²) for every weight and embedding, N(0, 0.02²/n) where each of n branches ends.

    Formula: std = σ; σ/√n where one of the n branches of a stream ends (n = 2L for L layers of attention and
    MLP). Norms start with weight 1 and biases with 0, as in the auto plan.

    Args:
        std: σ.

    Example:
        >>> import torch, musigma as ms
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)
        >>> plan = ms.init.plan(layer, torch.zeros(1, 3, 8), scheme=ms.init.Gpt2())
        >>> round(plan["linear2.weight"].std, 5), plan["linear1.weight"].std
        (0.01414, 0.02)

    References:
        Radford et al. 2019, Language Models are Unsupervised Multitask Learners, section 2.3.
    """

    std: float = 0.02
    name: str = "gpt2"

    def __call__(self, plan: Plan, model: nn.Module) -> Plan:
        """The plan with GPT-2's laws; see `Recipe`."""
        found = streams_of(plan, "GPT-2's scaling")
        weights = Weights(plan, model)
        entries = {
            entry.tensor: redrawn(entry, "normal", f"{self.std:g} for every weight ({_SOURCE})", std=self.std)
            for entry in plan.entries
            if len(entry.shape) > 1 and entry.std > 0
        }
        for stream in found:
            # Attention and MLP that run side by side add two signals in one sum.
            n = sum(len(block.last) for block in stream.blocks)
            for block in stream.blocks:
                for entry in weights.ends(block):
                    said = f"ends one of {n} branches: {self.std:g}/√{n} ({_SOURCE})"
                    entries[entry.tensor] = redrawn(entry, "normal", said, std=self.std / math.sqrt(n))
        return changed(plan, entries, scheme=self.name)


register(Gpt2())
