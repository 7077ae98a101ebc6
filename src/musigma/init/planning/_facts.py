"""What one forward of the example tells beside the graph: the example itself, and constants on the way."""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch import Tensor

from musigma.graph import UNKNOWN, Edge, Input, Node, kinds, tensors
from musigma.init.planning._signal import HERE

_CONSTANTS: Final = kinds.ELEMENTWISE | kinds.CONCATENATIONS | kinds.ops("setitem index_add scatter")

# exp(−50) of the largest weight is nothing; how many queries tell how a mask grows.
_FORBIDDEN: Final = -50.0
_QUERIES: Final = 64


class Facts:
    """Draws from the tensors that a plan can't know from shapes.

    Attributes:
        operands: (node, place among its inputs) → (n,) draws of an operand that doesn't depend on a layer:
            a rotary table, a mask, a constant.
        inputs: name → (3, n) draws from a floating-point tensor of the example.
        repeats: name of an integer input → how often two places, and two examples, hold the same number.
        masks: node → how many keys each query of an attention may look at.
        shapes: name → shape of any tensor of the example.

    Args:
        count: draws per tensor.
        seed: of the draws' places.
    """

    def __init__(self, count: int, seed: int = 0) -> None:
        self.count = count
        self.operands: dict[tuple[int, int], Tensor] = {}
        self.inputs: dict[str, Tensor] = {}
        self.repeats: dict[str, tuple[float, float]] = {}
        self.masks: dict[int, tuple[int, ...]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._generator = torch.Generator("cpu").manual_seed(seed)
        # One set of places for all tensors: tables of one shape are read at the same places.
        self._places = torch.rand(count, generator=self._generator, dtype=torch.float64, device="cpu")
        self._live: set[int] = set()

    def listen(self, node: Node, args: Any, kwargs: Any, outputs: tuple[Tensor, ...]) -> None:
        """Take draws of what meets the signal from outside."""
        live = [source for source in node.inputs if self._is_live(source)]
        if live:
            self._live.add(node.index)
        if node.arguments.get("attn_mask") and isinstance(kwargs.get("attn_mask"), Tensor):
            self._read_mask(node, kwargs["attn_mask"])
        if node.op not in _CONSTANTS or not live:
            return
        found = tensors((args, kwargs))
        if len(found) != len(node.inputs):
            return
        for place, (source, tensor) in enumerate(zip(node.inputs, found, strict=True)):
            constant = source is UNKNOWN or not self._is_live(source)
            if constant and not tensor.is_meta and tensor.numel():
                self.operands[node.index, place] = self._draw(tensor)

    def _read_mask(self, node: Node, mask: Tensor) -> None:
        if mask.is_meta or not mask.numel() or mask.dim() < 2:
            return
        # Masks forbid by False, or by adding a number that no logit makes up for.
        allowed = mask if mask.dtype == torch.bool else mask > _FORBIDDEN
        counts = allowed.sum(-1).flatten()
        step = max(len(counts) // _QUERIES, 1)
        self.masks[node.index] = tuple(max(int(count), 1) for count in counts[::step].tolist())

    def read(self, name: str, tensor: Tensor, features: int) -> None:
        """Take draws from a tensor of the example.

        Args:
            name: the graph's name for it.
            tensor: the tensor, of any device but meta.
            features: which of its dimensions runs over units.
        """
        self.shapes[name] = tuple(tensor.shape)
        if not tensor.is_meta and not tensor.is_floating_point() and tensor.numel() and tensor.dim() > 1:
            self.repeats[name] = self._repeats(tensor.detach().reshape(tensor.shape[0], -1).cpu())
        drawn = self.draws(tensor, features)
        if drawn is not None:
            self.inputs[name] = drawn

    def _repeats(self, ids: Tensor) -> tuple[float, float]:
        example, place = (self._index(size) for size in ids.shape)
        here = ids[example, place]
        elsewhere = ids[example, self._other(place, ids.shape[1])] == here
        other = ids[self._other(example, ids.shape[0]), place] == here
        return float(elsewhere.double().mean()), float(other.double().mean())

    def draws(self, tensor: Tensor, features: int) -> Tensor | None:
        """Draws from a tensor as the rows of a signal: a unit here, at another place, in another example.

        Args:
            tensor: (examples, ...).
            features: which of its dimensions runs over units.

        Returns:
            (3, n) float64 with the tensor's own second moment; None for what holds no real numbers.
        """
        if tensor.is_meta or not tensor.is_floating_point() or not tensor.numel():
            return None
        x = tensor.detach()
        if x.dim() < 2:
            x = x.reshape(-1, 1)
        x = x.movedim(features if -x.dim() <= features < x.dim() else -1, -1)
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        example, place, unit = (self._index(size) for size in x.shape)
        elsewhere, other = self._other(place, x.shape[1]), self._other(example, x.shape[0])
        at = [(example, place), (example, elsewhere), (other, place)]
        drawn = torch.stack([x[e.to(x.device), p.to(x.device), unit.to(x.device)] for e, p in at])
        drawn = drawn.to("cpu", torch.float64)
        # The draws are to have the tensor's own second moment, not one of their sample.
        whole = float(tensor.detach().to(torch.float64).square().mean())
        sample = float(drawn[HERE].square().mean())
        return (
            drawn * math.sqrt(whole / sample)
            if sample > 0 and math.isfinite(whole)
            else drawn.nan_to_num(0, 0, 0)
        )

    def _is_live(self, source: object) -> bool:
        if isinstance(source, Edge):
            return int(source) in self._live
        return isinstance(source, Input)

    def _draw(self, tensor: Tensor) -> Tensor:
        at = (self._places * tensor.numel()).long().clamp(max=tensor.numel() - 1)
        flat = tensor.detach().reshape(-1)[at.to(tensor.device)].cpu()
        return flat if flat.dtype == torch.bool else flat.to(torch.float64)

    def _index(self, size: int) -> Tensor:
        return torch.randint(size, (self.count,), generator=self._generator, device="cpu")

    def _other(self, index: Tensor, size: int) -> Tensor:
        """Another index of the same dimension wherever there is one."""
        if size < 2:
            return index
        step = torch.randint(1, size, (self.count,), generator=self._generator, device="cpu")
        return (index + step) % size
