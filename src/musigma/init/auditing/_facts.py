"""What one tensor shows by itself: its moments, its ends, and a bounded sample of its entries."""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from musigma.init._fans import Fans, layer_fans
from musigma.init._names import Slot, slots
from musigma.init._packing import part_names
from musigma.statistics import moments

# Entries that are looked at one by one. By DKW a distribution function is then known to
# √(ln(2/α)/(2·16384)) = 0.02 at α = 1e-6; uniform and normal of one spread differ by 0.06.
SAMPLE = 16384


@dataclass(frozen=True, eq=False)
class Facts:
    """One tensor of a model, read and not judged.

    Attributes:
        slot: the tensor with all its names and owners.
        values: its own numbers (of a sharded tensor the local piece), without autograd.
        kind: "weight", "bias", "norm", "embedding" or "other".
        fans: effective fans of the layer that uses it (of a bias those of the weight beside it).
        torch_fans: what torch.nn.init counts.
        parts: names of the equal matrices it stacks along dim 0.
        mean, std: of all entries (without an embedding's padding row).
        low, high: the ends.
        finite: whether every entry is.
    """

    slot: Slot
    values: Tensor
    kind: str
    fans: Fans | None
    torch_fans: Fans | None
    parts: tuple[str, ...]
    mean: float
    std: float
    low: float
    high: float
    finite: bool

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.slot.name

    def counted(self, fans: Fans) -> "Facts":
        """The same tensor with the fans that a plan has found where it is used."""
        return dataclasses.replace(self, fans=fans)

    @property
    def names(self) -> tuple[str, ...]:
        """All its names, in alphabetical order."""
        return tuple(sorted(self.slot.owners))

    @property
    def owner(self) -> nn.Module:
        """The layer that owns it, by its first name."""
        return self.slot.owners[self.name][0]

    @property
    def leaf(self) -> str:
        """What that layer calls it."""
        return self.slot.owners[self.name][1]

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape (the local piece's, if it is sharded)."""
        return tuple(self.values.shape)

    @property
    def count(self) -> int:
        """How many entries."""
        return self.values.numel()

    @property
    def constant(self) -> bool:
        """Whether all entries are one number."""
        return self.finite and self.low == self.high

    @property
    def matrix(self) -> bool:
        """Whether it is a layer's weight, of at least two dimensions."""
        return self.kind == "weight"

    @property
    def trainable(self) -> bool:
        """Whether an optimizer may change it."""
        return self.slot.parameter.requires_grad

    @cached_property
    def sample(self) -> Tensor:
        """Up to SAMPLE entries in ascending order, float64, always the same ones."""
        return sampled(self.values).sort().values


def read(model: nn.Module) -> tuple[tuple[Facts, ...], dict[str, str]]:
    """Read every parameter tensor of a model.

    Args:
        model: any module.

    Returns:
        The facts in order of registration, and for tensors that can't be read: name → why.

    Example:
        >>> facts, unread = read(nn.Linear(2, 3))
        >>> [(f.name, f.kind) for f in facts]
        [('weight', 'weight'), ('bias', 'bias')]

    References:
        None.
    """
    facts, unread = [], {}
    for slot in slots(model):
        obstacle = _obstacle(slot.parameter)
        if obstacle:
            unread[slot.name] = obstacle
        else:
            facts.append(_read(slot))
    return tuple(facts), unread


def buffers(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """Every readable floating-point buffer of a model.

    Args:
        model: any module, without wrappers.

    Yields:
        (qualified name, owner, the owner's name for it, the numbers).

    Example:
        >>> [name for name, *_ in buffers(nn.BatchNorm1d(2))]
        ['running_mean', 'running_var']

    References:
        None.
    """
    seen: set[int] = set()
    for path, module in model.named_modules():
        for leaf, buffer in module._buffers.items():
            if buffer is None or id(buffer) in seen or _obstacle(buffer):
                continue
            seen.add(id(buffer))
            yield f"{path}.{leaf}" if path else leaf, module, leaf, local(buffer)


def local(tensor: Tensor) -> Tensor:
    """The numbers that this process holds of a tensor, without autograd and subclass.

    Args:
        tensor: plain, or a DTensor.

    Returns:
        A view of the memory.

    Example:
        >>> local(nn.Parameter(torch.ones(2))).requires_grad
        False

    References:
        None.
    """
    held: Tensor = getattr(tensor, "_local_tensor", tensor)
    return held.detach()


def _obstacle(tensor: Tensor) -> str:
    if isinstance(tensor, UninitializedParameter | nn.parameter.UninitializedBuffer):
        return "has no shape yet (lazy): run one batch first"
    if tensor.is_quantized or not tensor.dtype.is_floating_point:
        return f"not a real floating-point tensor ({tensor.dtype})"
    if tensor.dtype.itemsize == 1:
        return f"{tensor.dtype} is a storage format: not read"
    if tensor.is_meta:
        return "on the meta device: it holds no numbers"
    if tensor.layout is not torch.strided:
        return f"layout {tensor.layout}: not read"
    return "" if local(tensor).numel() else "has no entries"


def _read(slot: Slot) -> Facts:
    owner, leaf = slot.owners[slot.name]
    values = local(slot.parameter)
    m = moments(_without_padding(slot, values))
    low, high = (float(v) for v in torch.aminmax(values))
    return Facts(
        slot,
        values,
        _kind(slot, values),
        _fans(slot),
        _counted(slot.parameter),
        part_names(owner, leaf),
        float(m.mean),
        float(m.std()),
        low,
        high,
        math.isfinite(low) and math.isfinite(high),
    )


def _without_padding(slot: Slot, values: Tensor) -> Tensor:
    """An embedding's entries without the padding row, which is zero by definition."""
    for owner, leaf in slot.owners.values():
        row = getattr(owner, "padding_idx", None) if leaf == "weight" else None
        if isinstance(owner, nn.Embedding | nn.EmbeddingBag) and row is not None and values.shape[0] > 1:
            return torch.cat([values[:row], values[row + 1 :]]) if row else values[1:]
    return values


def _kind(slot: Slot, values: Tensor) -> str:
    owners = [owner for owner, _ in slot.owners.values()]
    if any("parametrizations." in name for name in slot.owners) or slot.name.endswith(
        ("weight_g", "weight_v")
    ):
        return "other"  # what a parametrization makes of it is the weight
    if any("norm" in type(owner).__name__.lower() for owner in owners):
        return "norm"
    if all(isinstance(owner, nn.Embedding | nn.EmbeddingBag) for owner in owners):
        return "embedding"
    leaf = slot.owners[slot.name][1]
    if values.dim() == 1 and ("bias" in leaf or leaf.startswith("b_")):
        return "bias"
    return (
        "weight" if values.dim() > 1 and min(values.shape[:2]) > 0 and _is_layer(owners, values) else "other"
    )


def _is_layer(owners: list[nn.Module], values: Tensor) -> bool:
    """Whether a layer mixes features with it: a token or a position of a custom module doesn't."""
    known = any(type(owner).__module__.startswith("torch.nn") for owner in owners)
    return known or (values.dim() == 2 and min(values.shape) > 1) or values.dim() == 4


def _fans(slot: Slot) -> Fans | None:
    owners = slot.owners.values()
    found = [f for o, leaf in owners if (f := _owner_fans(o, leaf, slot.parameter)) is not None]
    # An embedding tied to the output layer multiplies features there: the larger fan-in decides.
    return max(found, key=lambda f: f.fan_in) if found else None


def _owner_fans(owner: nn.Module, leaf: str, values: Tensor) -> Fans | None:
    if values.dim() > 1:
        return layer_fans(owner, leaf, values)
    # (a scripted module's table of parameters is no dict)
    beside = getattr(owner, leaf.replace("bias", "weight"), None)
    if not isinstance(beside, Tensor) or beside.dim() < 2 or isinstance(beside, UninitializedParameter):
        return None
    return layer_fans(owner, leaf.replace("bias", "weight"), beside)


def _counted(values: Tensor) -> Fans | None:
    """What torch.nn.init makes of a shape."""
    if values.dim() < 2:
        return None
    kernel = math.prod(values.shape[2:])
    return Fans(values.shape[1] * kernel, values.shape[0] * kernel)


def sampled(values: Tensor) -> Tensor:
    """Up to SAMPLE entries of a tensor, always the same ones.

    Args:
        values: any numbers.

    Returns:
        float64 on the CPU, in no particular order.

    Example:
        >>> sampled(torch.arange(3.0)).tolist()
        [0.0, 1.0, 2.0]

    References:
        None.
    """
    count = values.numel()
    if count <= SAMPLE:
        return values.flatten().double().cpu()
    # One entry of every stretch, at a place that no row length divides (the golden ratio's fraction).
    steps = torch.arange(SAMPLE, dtype=torch.float64)
    stretch = count / SAMPLE
    places = (steps * stretch + ((steps * 0.6180339887498949) % 1.0) * stretch).long().clamp_(max=count - 1)
    if values.is_contiguous():
        return values.view(-1)[places.to(values.device)].double().cpu()
    where = torch.unravel_index(places.to(values.device), values.shape)
    return values[where].double().cpu()
