"""Tensors of which this process holds a piece only."""

import sys

import torch
from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor: a global tensor spread over the ranks of a device mesh.

    Args:
        tensor: any tensor.

    Returns:
        Whether it is.

    Example:
        >>> is_sharded(torch.empty(1))
        False

    References:
        torch.distributed.tensor.
    """
    # Who holds a DTensor has imported its module; all others needn't.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def global_tensor(tensor: Tensor) -> Tensor:
    """Memory for all of a tensor, on the CPU.

    Args:
        tensor: any tensor, sharded ones by their global shape.

    Returns:
        An uninitialized tensor of its shape and dtype.

    Example:
        >>> global_tensor(torch.empty(2, 3, device="meta")).device.type
        'cpu'

    References:
        None.
    """
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")


def keep_piece(tensor: Tensor, whole: Tensor) -> None:
    """Copy into a tensor what it holds of a global one: all of it, or this rank's shard. No communication.

    Args:
        tensor: written in place.
        whole: the global tensor, the same on every rank.

    Example:
        >>> w = torch.empty(2)
        >>> keep_piece(w, torch.ones(2)); w.tolist()
        [1.0, 1.0]

    References:
        torch.distributed.tensor.distribute_tensor (with `src_data_rank=None` each rank cuts for itself).
    """
    if not is_sharded(tensor):
        tensor.copy_(whole)
        return
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(tensor, DTensor)
    cut = distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)
    assert isinstance(cut, DTensor)
    tensor.to_local().copy_(cut.to_local())
