"""SyncBatchNorm: one set of statistics for all ranks of a distributed job, on any device."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from musigma.nn._batch_norm import _BatchNorm
from musigma.statistics._calls import calling


class SyncBatchNorm(_BatchNorm, torch.nn.SyncBatchNorm):
    """BatchNorm over the batches of all ranks: `torch.nn.SyncBatchNorm`, on the CPU too.

    Each rank's (count, mean, M2) are gathered and merged in rank order (M2 does not add up over ranks), so
    every rank normalizes by the same bits and ends with the same running statistics. The ranks' batches may
    differ in size and be empty; the gradients are those of one process with the whole batch. In evaluation,
    without an initialized process group, or in a group of one, it is `BatchNorm1d`, for any number of dims.

    **Every rank has to make every call**, forward and backward, equally often and in the same order; a rank
    without data passes an empty batch. Where they don't, each of them gets an error that says where all ranks
    are and how often they have called the layer: at once where they meet in different calls, else when
    `timeout` ends (a class or instance attribute; None for the group's own, 30 minutes in gloo). That costs
    no communication as long as nobody waits. It is done on the CPU, and not in compiled graphs. Under
    DistributedDataParallel take ``broadcast_buffers=False``: its broadcast before each forward does what is
    done already, and is where a rank that makes fewer forwards would be missed first, with gloo's words.

    DistributedDataParallel refuses torch's layer on the CPU, where that cannot run, and with it all that
    derives from it; importing ``musigma.nn`` makes it tell this one apart.

    Args:
        num_features, eps, momentum, affine, track_running_stats, device, dtype, bias: as in `BatchNorm1d`.
        process_group: the ranks that share statistics; all of them if None.

    Example:
        >>> import torch, musigma as ms
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8))
        >>> ms.nn.SyncBatchNorm.convert_sync_batchnorm(net)
        Sequential(
          (0): Conv2d(3, 8, kernel_size=(3, 3), stride=(1, 1))
          (1): SyncBatchNorm(8, eps=1e-05, momentum=0.1, affine=True, bias=True, track_running_stats=True)
        )

    References:
        Ioffe & Szegedy 2015, "Batch Normalization"; Chan, Golub & LeVeque 1983, "Algorithms for computing
        the sample variance", on merging.
    """

    timeout: timedelta | None = None

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype, bias=bias)
        self.process_group = process_group

    def forward(
        self,
        input: Tensor,
        *,
        mask: Tensor | None = None,
        add: Tensor | None = None,
        activation: str | None = None,
    ) -> Tensor:
        if torch.compiler.is_compiling():
            return super().forward(input, mask=mask, add=add, activation=activation)
        with calling(self, self.timeout):
            return super().forward(input, mask=mask, add=add, activation=activation)

    forward.__doc__ = _BatchNorm.forward.__doc__

    def _check_input_dim(self, input: Tensor) -> None:
        super()._check_input_dim(input)
        if input.shape[1] == 0:
            raise ValueError(
                f"SyncBatchNorm number of input channels should be non-zero, got shape {tuple(input.shape)}"
            )

    def _group(self) -> ProcessGroup | None:
        if not (self.training and dist.is_available() and dist.is_initialized()):
            return None
        group: ProcessGroup | None = self.process_group or dist.group.WORLD
        return group if dist.get_world_size(group) > 1 else None

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: Any | None = None) -> nn.Module:
        """Replace every BatchNorm of a module, torch's or ours, by a SyncBatchNorm with the same tensors.

        Args:
            module: changed in place, except where it is itself a BatchNorm.
            process_group: the ranks that share statistics; all of them if None.

        Returns:
            the module, or what replaces it.
        """
        return _converted(cls, module, process_group, {})


def _converted(
    cls: type[SyncBatchNorm], module: nn.Module, process_group: Any | None, done: dict[nn.Module, nn.Module]
) -> nn.Module:
    """`module` or its replacement; a layer used in several places is replaced by one and the same."""
    if module in done:
        return done[module]
    result = module
    if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
        result = cls(
            module.num_features,
            module.eps,
            module.momentum,
            module.affine,
            module.track_running_stats,
            process_group,
            device="meta",  # every tensor is replaced by the old layer's
        )
        result._parameters.update(module._parameters)
        for name, buffer in module._buffers.items():
            result.register_buffer(name, buffer)
        result.training = module.training
    done[module] = result
    for name, child in module.named_children():
        setattr(result, name, _converted(cls, child, process_group, done))
    return result


def _admit_to_ddp() -> None:
    """Let DDP refuse a SyncBatchNorm on the CPU for what it can do, not for what it derives from.

    The check is a method of DDP's that looks for instances of torch's class. There is no other way to be one
    and pass, so it is wrapped: where there is no layer of torch's own, there is nothing to refuse.
    """
    refuse = getattr(DistributedDataParallel, "_passing_sync_batchnorm_handle", None)
    if refuse is None:  # a torch without the check
        return

    def handle(self: DistributedDataParallel, module: nn.Module) -> None:
        layers = (m for m in module.modules() if isinstance(m, torch.nn.SyncBatchNorm))
        if not all(isinstance(layer, SyncBatchNorm) for layer in layers):
            refuse(self, module)

    DistributedDataParallel._passing_sync_batchnorm_handle = handle  # type: ignore[method-assign]


_admit_to_ddp()
