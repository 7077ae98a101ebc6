"""DS-Init: weights that shrink with the layer's depth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from musigma.init.recipes._recipe import Weights, changed, redrawn, register, streams_of

if TYPE_CHECKING:
    from musigma.init.planning import Entry, Plan

_SOURCE = "Zhang, Titov & Sennrich 2019, eq. 5"


@dataclass(frozen=True)
class DSInit:
    """Glorot's uniform law times α/√l for every weight of the l-th layer of a stream.

    Formula: U[±α/√l·√(6/(fan_in + fan_out))], l = 1, 2, … from the input on; an encoder's and a decoder's
    layers are counted by themselves.

    Args:
        alpha: α, at most 1 in the paper.

    Example:
        >>> import torch, musigma as ms
        >>> make = lambda: torch.nn.TransformerEncoderLayer(8, 2, 32, batch_first=True)
        >>> net = torch.nn.Sequential(make(), make(), make(), make())
        >>> plan = ms.init.plan(net, torch.randn(1, 3, 8), scheme="ds_init")
        >>> round(plan["0.linear1.weight"].std / plan["3.linear1.weight"].std, 6)
        2.0

    References:
        Zhang, Titov & Sennrich 2019, Improving Deep Transformer with Depth-Scaled Initialization and Merged
        Attention, eq. 5.
    """

    alpha: float = 1.0
    name: str = "ds_init"

    def __call__(self, plan: Plan, model: nn.Module) -> Plan:
        """The plan with depth-scaled laws; see `Recipe`."""
        weights = Weights(plan, model)
        entries: dict[str, Entry] = {}
        for stream in streams_of(plan, "DS-Init"):
            for block in stream.blocks:
                for entry in weights.of(block.nodes):
                    # A tensor that several layers share belongs to the first that runs.
                    if entry.tensor not in entries:
                        said = f"in layer {block.layer} of {stream.layers}: Xavier/√{block.layer} ({_SOURCE})"
                        entries[entry.tensor] = redrawn(
                            entry,
                            "depth_scaled",
                            said,
                            layer=block.layer,
                            alpha=self.alpha,
                            fans=weights.fans(entry),
                        )
        return changed(plan, entries, scheme=self.name)


register(DSInit())
