"""What one forward of the example tells beside the graph: the example itself, and constants on the way."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from musigma.graph import UNKNOWN, Edge, Input, Node, kinds, tensors
from musigma.init.planning._signal import EXAMPLE, HERE, PLACE

_CONSTANTS: Final = kinds.ELEMENTWISE | kinds.CONCATENATIONS | kinds.ops("setitem index_add scatter")


class Facts:
    """Draws from the tensors that a plan can't know from shapes.

    Attributes:
        operands: (node, place among its inputs) → (n,) draws of an operand that doesn't depend on a layer:
            a rotary table, a mask, a constant.
        inputs: name → (3, n) draws from a floating-point tensor of the example.
        shapes: name → shape of any tensor of the example.

    Args:
        count: draws per tensor.
        seed: of the draws' places.
    """

    def __init__(self, count: int, seed: int = 0) -> None:
        self.count = count
        self.operands: dict[tuple[int, int], Tensor] = {}
        self.inputs: dict[str, Tensor] = {}
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
        if node.op not in _CONSTANTS or not live:
            return
        found = tensors((args, kwargs))
        if len(found) != len(node.inputs):
            return
        for place, (source, tensor) in enumerate(zip(node.inputs, found, strict=True)):
            constant = source is UNKNOWN or not self._is_live(source)
            if constant and not tensor.is_meta and tensor.numel():
                self.operands[node.index, place] = self._draw(tensor)

    def read(self, name: str, tensor: Tensor, features: int) -> None:
        """Take draws from a tensor of the example.

        Args:
            name: the graph's name for it.
            tensor: the tensor, of any device but meta.
            features: which of its dimensions runs over units.
        """
        self.shapes[name] = tuple(tensor.shape)
        if tensor.is_meta or not tensor.is_floating_point() or not tensor.numel():
            return
        x = tensor.detach().to("cpu", torch.float64)
        if x.dim() < 2:
            x = x.reshape(-1, 1)
        x = x.movedim(features if -x.dim() <= features < x.dim() else -1, -1)
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        example, place, unit = (self._index(size) for size in x.shape)
        rows = {
            HERE: x[example, place, unit],
            PLACE: x[example, self._other(place, x.shape[1]), unit],
            EXAMPLE: x[self._other(example, x.shape[0]), place, unit],
        }
        drawn = torch.stack([rows[row] for row in sorted(rows)])
        # The draws are to have the tensor's own second moment, not one of their sample.
        whole, sample = x.square().mean(), drawn[HERE].square().mean()
        self.inputs[name] = drawn * (whole / sample).sqrt() if float(sample) > 0 else drawn

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
