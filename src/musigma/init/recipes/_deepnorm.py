"""DeepNorm: post-norm Transformers of a thousand layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from musigma.init.recipes._attention import scaled_block
from musigma.init.recipes._factors import skip_factor
from musigma.init.recipes._recipe import Weights, changed, graph_of, register, streams_of

if TYPE_CHECKING:
    from musigma.init.planning import Entry, Plan
    from musigma.init.recipes._structure import Stream

_SOURCE = "Wang et al. 2022"
# α as written in code is rounded: 2.2 for 2.213. A tenth off changes the bound on the update by as much.
_CLOSE = 0.1


def deepnorm_constants(encoder: int = 0, decoder: int = 0, *, part: str = "encoder") -> tuple[float, float]:
    """DeepNorm's α and β.

    Formula: one stack of M layers: α = (2M)^(1/4), β = (8M)^(−1/4). Encoder of N and decoder of M layers:
    0.81·(N⁴M)^(1/16) and 0.87·(N⁴M)^(−1/16) in the encoder, (3M)^(1/4) and (12M)^(−1/4) in the decoder.

    Args:
        encoder: layers N of the encoder; 0 without one.
        decoder: layers M of the decoder; 0 without one.
        part: "encoder" or "decoder": whose constants, where there are both.

    Returns:
        (α, β): what the skip path is multiplied by, and the gain of values, outputs and MLPs.

    Raises:
        ValueError: no layers, or an unknown part.

    Example:
        >>> import musigma as ms
        >>> alpha, beta = ms.init.deepnorm_constants(decoder=8)
        >>> alpha, round(beta, 4)
        (2.0, 0.3536)

    References:
        Wang et al. 2022, DeepNet: Scaling Transformers to 1,000 Layers, figure 2.
    """
    if encoder < 0 or decoder < 0 or not encoder + decoder:
        raise ValueError(f"there must be at least one layer, got encoder={encoder}, decoder={decoder}")
    if part not in ("encoder", "decoder"):
        raise ValueError(f"part must be 'encoder' or 'decoder', got {part!r}")
    if not (encoder and decoder):
        layers = encoder + decoder
        return (2 * layers) ** 0.25, (8 * layers) ** -0.25
    if part == "encoder":
        return 0.81 * (encoder**4 * decoder) ** (1 / 16), 0.87 * (encoder**4 * decoder) ** (-1 / 16)
    return (3 * decoder) ** 0.25, (12 * decoder) ** -0.25


@dataclass(frozen=True)
class DeepNorm:
    """Xavier for every weight of a branch, times β for values, output projections and MLPs; needs α·x + f(x).

    Formula: see `deepnorm_constants`.

    Example:
        >>> import torch, musigma as ms
        >>> class Layer(torch.nn.Module):
        ...     def __init__(self, alpha):
        ...         super().__init__()
        ...         self.alpha, self.norm = alpha, torch.nn.LayerNorm(8)
        ...         self.up, self.down = torch.nn.Linear(8, 32), torch.nn.Linear(32, 8)
        ...     def forward(self, x):
        ...         return self.norm(self.alpha * x + self.down(torch.relu(self.up(x))))
        >>> alpha, beta = ms.init.deepnorm_constants(encoder=2)
        >>> net = torch.nn.Sequential(Layer(alpha), Layer(alpha))
        >>> plan = ms.init.plan(net, torch.randn(4, 8), scheme="deepnorm")
        >>> round(plan["0.up.weight"].std / (beta * (2 / 40) ** 0.5), 3)
        1.0

    References:
        Wang et al. 2022, DeepNet: Scaling Transformers to 1,000 Layers, figure 2.
    """

    name: str = "deepnorm"

    def __call__(self, plan: Plan, model: nn.Module) -> Plan:
        """The plan with DeepNorm's laws; see `Recipe`."""
        graph, weights = graph_of(plan), Weights(plan, model)
        found = streams_of(plan, "DeepNorm")
        entries: dict[str, Entry] = {}
        notes: list[str] = []
        for stream in found:
            alpha, beta, said = _constants(stream, found)
            notes += _check_alpha(plan, stream, alpha, said, model)
            for block in stream.blocks:
                reason = f"Xavier·β, β = {beta:.3g} for {said} ({_SOURCE})"
                entries |= scaled_block(graph, weights, block, beta, scheme="xavier_normal", reason=reason)
        return changed(plan, entries, notes, scheme=self.name)


def _constants(stream: Stream, found: tuple[Stream, ...]) -> tuple[float, float, str]:
    if stream.decodes:
        encoder = max((s.layers for s in found if s.encodes), default=0)
        alpha, beta = deepnorm_constants(encoder, stream.layers, part="decoder")
        return alpha, beta, f"a decoder of {stream.layers} layers behind an encoder of {encoder}"
    if stream.encodes:
        decoder = max((s.layers for s in found if s.decodes), default=0)
        alpha, beta = deepnorm_constants(stream.layers, decoder, part="encoder")
        return alpha, beta, f"an encoder of {stream.layers} layers before a decoder of {decoder}"
    alpha, beta = deepnorm_constants(encoder=stream.layers)
    return alpha, beta, f"{stream.layers} layers"


def _check_alpha(plan: Plan, stream: Stream, alpha: float, said: str, model: nn.Module) -> list[str]:
    """DeepNorm is a change of the forward first: without α its β makes a worse start than Xavier."""
    unread = 0
    for block in stream.blocks:
        factor = skip_factor(graph_of(plan), block.branch, model)
        if factor is None:
            unread += 1
        elif abs(factor - alpha) > _CLOSE * alpha:
            where = block.branch.add.module or "the model"
            raise ValueError(
                f"DeepNorm needs α = {alpha:.4g} on the skip path of every residual sum ({said}), but branch "
                f"{block.number} of {len(stream.blocks)} (added in {where}) has {factor:.4g}; write "
                f"norm(alpha * x + f(x)) with alpha from musigma.init.deepnorm_constants, or use "
                f"scheme='ds_init' or 'admin', which leave the skip path alone or learn its scale"
            )
    if not unread:
        return []
    return [f"the factor of {unread} skip paths can't be read: DeepNorm needs it to be α = {alpha:.4g}"]


register(DeepNorm())
