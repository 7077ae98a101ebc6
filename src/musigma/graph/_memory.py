"""Which op wrote a piece of memory last: how the recorder knows where a tensor comes from.

An edge can't follow Python objects: `z[:, 0] = y`, `z[:, 0].relu_()` and `out=z` all change `z`
without making a tensor. So memory is followed instead: every storage keeps the list of its writes,
each with the region that it covered, and a tensor comes from the last write that overlaps its own
region since the tensor was made.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from musigma.graph._nodes import UNKNOWN, Buffer, Edge, Input, Parameter, Source, Unknown


@dataclass(frozen=True)
class Region:
    """The elements of its storage that a tensor can touch."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    itemsize: int
    nbytes: int

    @classmethod
    def of(cls, tensor: Tensor) -> Region | None:
        """The region, or None for layouts without strides or storage (sparse, nested, vmapped)."""
        try:
            return cls(
                tuple(map(int, tensor.shape)),
                tuple(map(int, tensor.stride())),
                int(tensor.storage_offset()),
                tensor.element_size(),
                tensor.untyped_storage().nbytes(),
            )
        except (RuntimeError, NotImplementedError, TypeError):
            return None

    @property
    def span(self) -> tuple[int, int]:
        """First byte and one past the last byte."""
        if 0 in self.shape:
            return 0, 0
        last = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        return self.offset * self.itemsize, (self.offset + last + 1) * self.itemsize

    def fills_storage(self) -> bool:
        """Whether every byte of the storage belongs to the region."""
        distinct = 1
        for size, step in zip(self.shape, self.stride, strict=True):
            distinct *= size if step != 0 else min(size, 1)
        return distinct * self.itemsize >= self.nbytes

    def overlaps(self, other: Region) -> bool:
        """Whether the two regions of one storage share an element."""
        (start, stop), (other_start, other_stop) = self.span, other.span
        if stop <= other_start or other_stop <= start:
            return False
        if self.itemsize != other.itemsize or self.fills_storage() or other.fills_storage():
            return True
        # Halves of a chunk along the last dimension interleave: mark the elements and look.
        marked = torch.zeros(max(stop, other_stop) // self.itemsize, dtype=torch.bool, device="cpu")
        self._select(marked).fill_(True)
        return bool(other._select(marked).any())

    def _select(self, flat: Tensor) -> Tensor:
        # An expanded dimension repeats its elements: one of them is enough, and may be written.
        shape = [size if step else min(size, 1) for size, step in zip(self.shape, self.stride, strict=True)]
        return flat.as_strided(shape, self.stride, self.offset)


Root = Input | Parameter | Buffer


@dataclass(frozen=True)
class _Write:
    when: float
    tensor: Tensor
    source: Edge | Unknown


@dataclass
class _Exposed:
    """Memory that others than torch can write: what was in it when torch last wrote."""

    tensor: Tensor
    values: Tensor


@dataclass(frozen=True)
class _Known:
    root: Root
    names: tuple[str, ...]
    tensor: Tensor


class Memory:
    """Roots (inputs, parameters, buffers), writes, and the tensors that are views of them.

    Every tensor that a recorded op made is kept alive until the recording ends: memory that torch frees
    and hands out again would otherwise pass for the old one.
    """

    def __init__(self) -> None:
        self._roots: dict[Hashable, list[_Known]] = {}
        self._by_identity: dict[int, _Known] = {}
        self._writes: dict[Hashable, list[_Write]] = {}
        self._made: dict[int, tuple[Tensor, Edge]] = {}
        self._exposed: dict[Hashable, list[_Exposed]] = {}
        self._clock = -1
        self._unwritten: set[int] = set()
        self._live: set[int] = set()
        self._behind: dict[tuple[int, int], Source] = {}

    def add_root(self, tensor: Tensor, root: Root, names: tuple[str, ...]) -> None:
        """Make a tensor known as an input, a parameter or a buffer."""
        known = _Known(root, names, tensor)
        self._by_identity.setdefault(id(tensor), known)
        self._roots.setdefault(_key(tensor), []).append(known)

    def source(self, tensor: Tensor) -> Source:
        """Where the tensor's present values come from."""
        self._look(_key(tensor))
        _, made = self._made.get(id(tensor), (None, None))
        written = self._last_write(tensor, since=-1 if made is None else int(made))
        if written is not None:
            return written
        if made is not None:
            return made
        known = self._known(tensor)
        return known[0].root if known else UNKNOWN

    def names(self, tensor: Tensor, kind: type[Root]) -> tuple[str, ...]:
        """The parameters (or buffers) whose memory the tensor reads."""
        return tuple(
            name for known in self._known(tensor) if isinstance(known.root, kind) for name in known.names
        )

    def roots(self, tensor: Tensor) -> list[tuple[Root, Tensor]]:
        """The inputs, parameters and buffers whose memory the tensor shares."""
        return [(known.root, known.tensor) for known in self._known(tensor)]

    def state(self, tensor: Tensor) -> Source | None:
        """The last write anywhere in the tensor's storage, else its root."""
        key = _key(tensor)
        if self._writes.get(key):
            return self._writes[key][-1].source
        return self._roots[key][0].root if key in self._roots else None

    def is_live(self, source: Source) -> bool:
        """Whether a value depends on an input or on something unknown."""
        return int(source) in self._live if isinstance(source, Edge) else isinstance(source, Input | Unknown)

    def is_unwritten(self, source: Source) -> bool:
        """Whether a value is memory that nobody has filled yet."""
        return isinstance(source, Edge) and int(source) in self._unwritten

    def ran(self, index: int, sources: Iterable[Source], *, unwritten: bool = False) -> None:
        """Note that a node ran on these sources."""
        if unwritten:
            self._unwritten.add(index)
        self._clock = index
        if any(map(self.is_live, sources)):
            self._live.add(index)

    def expose(self, tensor: Tensor) -> None:
        """Note that a tensor's memory was handed out (`x.numpy()`), where a write leaves no trace."""
        if not tensor.is_meta:
            self._exposed.setdefault(_key(tensor), []).append(_Exposed(tensor, tensor.detach().clone()))

    def behind(self, source: Source) -> Source:
        """The last write, or root, that a chain of views starts from."""
        while isinstance(source, Edge) and source.key in self._behind:
            source = self._behind[source.key]
        return source

    def made(self, tensor: Tensor, edge: Edge, *, written: bool) -> None:
        """Note that a node made the tensor object, and whether it wrote its memory too."""
        if not written:
            state = self.state(tensor)
            self._behind[edge.key] = UNKNOWN if state is None else state
        self._made[id(tensor)] = (tensor, edge)  # held, so that nobody else gets its id
        if written:
            key = _key(tensor)
            self._writes.setdefault(key, []).append(_Write(int(edge), tensor, edge))
            for exposed in self._exposed.get(key, ()):
                exposed.values = exposed.tensor.detach().clone()

    def share(self, first: Tensor, second: Tensor) -> bool:
        """Whether two tensors live in one storage."""
        return _key(first) == _key(second)

    def _look(self, key: Hashable) -> None:
        for exposed in self._exposed.get(key, ()):
            if not _identical(exposed.tensor.detach(), exposed.values):
                write = _Write(self._clock + 0.5, exposed.tensor, UNKNOWN)
                self._writes.setdefault(key, []).append(write)
                exposed.values = exposed.tensor.detach().clone()

    def _last_write(self, tensor: Tensor, since: int) -> Edge | Unknown | None:
        for write in reversed(self._writes.get(_key(tensor), ())):
            if write.when <= since:
                return None
            if _overlap(tensor, write.tensor):
                return write.source
        return None

    def _known(self, tensor: Tensor) -> list[_Known]:
        if id(tensor) in self._by_identity:
            return [self._by_identity[id(tensor)]]
        return [known for known in self._roots.get(_key(tensor), ()) if _overlap(tensor, known.tensor)]


def _key(tensor: Tensor) -> Hashable:
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    try:
        return tensor.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):
        return ("object", id(tensor))  # sparse and other layouts that own no storage of their own


def _overlap(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors of one storage share an element, as far as their layouts tell."""
    if first is second:
        return True
    here, there = Region.of(first), Region.of(second)
    return here is None or there is None or here.overlaps(there)


def _identical(left: Tensor, right: Tensor) -> bool:
    # Bit for bit, so that NaN equals NaN.
    return torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))
