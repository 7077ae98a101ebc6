"""FSDP2 puts gathered parameters in place of shards while a module runs: they are the same parameters."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch import nn


def reshard(model: nn.Module) -> None:
    """Have FSDP2 put shards in place of what it gathered, so that its books agree with the registrations.

    Args:
        model: any module; nothing happens to one without FSDP2.

    Example:
        >>> reshard(nn.Linear(2, 2))
    """
    for module in _fully_sharded(model):
        module.reshard()


def unshard(model: nn.Module) -> None:
    """Have FSDP2 gather all parameters now, so that the forward reads those that the model registers.

    All of the model is then in memory: a model that doesn't fit is planned on the meta device instead.

    Args:
        model: any module; nothing happens to one without FSDP2.

    Example:
        >>> unshard(nn.Linear(2, 2))
    """
    for module in _fully_sharded(model):
        module.unshard()


def _fully_sharded(model: nn.Module) -> Iterator[Any]:
    # Who has a sharded model has imported this; all others needn't.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None:
        yield from (module for module in model.modules() if isinstance(module, fsdp.FSDPModule))
