"""The parameters of a model under their names, each tensor once, each name with its own random numbers."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.parametrize import ParametrizationList

from musigma.init._pieces import is_sharded

# Path segments that torch's own wrappers (compile, FSDP, checkpointing) put between the model's.
_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
# Numbers drawn and thrown away at most: what tells streams of one 32-bit seed apart.
_OFFSETS = 1 << 16


@dataclass
class Slot:
    """One parameter tensor, and every name it is reached by.

    Attributes:
        parameter: the tensor.
        owners: name → (layer that uses it, the layer's name for it).
    """

    parameter: Tensor
    owners: dict[str, tuple[nn.Module, str]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The first of its names in alphabetical order, whatever was registered first."""
        return min(self.owners)


def slots(model: nn.Module) -> list[Slot]:
    """Every parameter tensor of a model, tied ones once, without the segments that wrappers add.

    Args:
        model: any module; DataParallel and DistributedDataParallel are looked through.

    Returns:
        One slot a tensor, in order of registration.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        >>> model[1].weight = model[0].weight
        >>> [sorted(s.owners) for s in slots(model)]
        [['0.weight', '1.weight'], ['0.bias'], ['1.bias']]

    References:
        None.
    """
    found: dict[object, Slot] = {}
    for name, module, leaf, parameter in _walk(model):
        found.setdefault(_identity(parameter), Slot(parameter)).owners[name] = (module, leaf)
    return list(found.values())


def generator_for(seed: int, name: str) -> torch.Generator:
    """The random numbers that belong to one parameter name, whatever else the model holds.

    Args:
        seed: the run's seed.
        name: qualified parameter name.

    Returns:
        A CPU generator that depends on nothing but the two.

    Example:
        >>> import torch, musigma as ms
        >>> a, b = ms.init.generator_for(0, "a"), ms.init.generator_for(0, "b")
        >>> bool(torch.rand((), generator=a) == torch.rand((), generator=b))
        False

    References:
        Matsumoto & Nishimura 1998 (MT19937); BLAKE2, RFC 7693.
    """
    digest = hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=8).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:4], "little"))
    # torch's CPU generator keeps 32 bits of a seed: among 10,000 names a pair of equals is 1 in 86. Starting
    # at one of 65,536 places of the stream makes it 1 in 5 million.
    offset = int.from_bytes(digest[4:], "little") % _OFFSETS
    torch.empty(offset, dtype=torch.int32, device="cpu").random_(generator=generator)
    return generator


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DataParallel and DistributedDataParallel.

    Args:
        model: any module.

    Returns:
        The first module that is neither.

    Example:
        >>> unwrapped(DataParallel(nn.ReLU()))
        ReLU()

    References:
        None.
    """
    while isinstance(model, DataParallel | DistributedDataParallel):
        model = model.module
    return model


def clean(name: str, model: nn.Module) -> str:
    """A name or pattern without what wrappers add to it: `module.` in front, `_orig_mod.` anywhere.

    Args:
        name: as the wrapped model's state_dict spells it, or plain.
        model: the model it is meant for.

    Returns:
        The name in the model's own words.

    Example:
        >>> clean("_orig_mod.0.weight", nn.ReLU())
        '0.weight'

    References:
        None.
    """
    while isinstance(model, DataParallel | DistributedDataParallel):
        name, model = name.removeprefix("module."), model.module
    return ".".join(s for s in name.split(".") if s not in _WRAPPERS)


def _walk(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    model = unwrapped(model)
    for path, module in model.named_modules(remove_duplicate=False):
        segments = [s for s in path.split(".") if s and s not in _WRAPPERS]
        for leaf, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            owner, own = module, leaf
            if isinstance(module, ParametrizationList):
                # layer.parametrizations.weight.original belongs to the layer, as its weight.
                layer, _, own = path.rpartition("parametrizations.")
                owner = model.get_submodule(layer.rstrip("."))
            yield ".".join([*segments, leaf]), owner, own, parameter


def _identity(parameter: Tensor) -> object:
    # Two Parameter objects around one piece of memory are tied as well.
    hollow = isinstance(parameter, UninitializedParameter) or parameter.is_meta or parameter.numel() == 0
    # (A DTensor's own data_ptr is 0, and its piece may be empty on some ranks.)
    if hollow or parameter.layout is not torch.strided or is_sharded(parameter):
        return id(parameter)
    return parameter.device, parameter.data_ptr(), tuple(parameter.shape), parameter.stride()
