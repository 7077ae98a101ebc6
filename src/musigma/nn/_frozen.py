"""BatchNorm that no longer learns: fixed statistics, fixed weight and bias, whatever the mode."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from musigma.functional import batch_norm
from musigma.functional._checks import refuse_input
from musigma.nn._sizes import check_size
from musigma.nn._statistics import KeepsStatistics


class FrozenBatchNorm(KeepsStatistics):
    """BatchNorm by its running statistics only, in training too; weight and bias are buffers.

        y = (x − running_mean) / √(running_var + eps) · weight + bias

    ``requires_grad_(False)`` on a BatchNorm freezes weight and bias and leaves the statistics moving;
    ``.eval()`` stops them until the next ``.train()`` of the whole model. This layer is frozen for good:
    nothing it holds is a parameter, and no forward in any mode changes it. Its state_dict is that of
    a BatchNorm, so each loads the other's.

    It takes (n, c, *spatial) of any number of dims; `FrozenBatchNorm1d`, `2d` and `3d` insist on theirs.

    Args:
        num_features: c, the size of dim 1.
        eps: added to the variance; in units of input².
        affine: whether there are weight and bias.
        device: where the buffers are made.
        dtype: of weight and bias, and of the statistics unless it is narrower than float32.
        bias: whether there is a bias.

    Example:
        >>> import torch, musigma as ms
        >>> frozen = ms.nn.FrozenBatchNorm1d.from_batchnorm(torch.nn.BatchNorm1d(2, eps=0.0)).train()
        >>> frozen(torch.tensor([[1.0, 2.0]])), list(frozen.parameters())
        (tensor([[1., 2.]]), [])

    References:
        Ioffe & Szegedy 2015, "Batch Normalization", algorithm 2; He et al. 2017, "Mask R-CNN", on freezing.
    """

    _dims: tuple[int, ...] = ()
    weight: Tensor | None
    bias: Tensor | None
    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
    ) -> None:
        check_size("num_features", num_features)
        super().__init__()
        self.num_features = num_features
        self.eps = eps
        self.affine = affine
        ones = torch.ones(num_features, device=device, dtype=dtype)
        self.register_buffer("weight", ones.clone() if affine else None)
        self.register_buffer("bias", torch.zeros_like(ones) if affine and bias else None)
        self.register_buffer("running_mean", torch.zeros_like(ones))
        self.register_buffer("running_var", ones)
        # never counted up; kept so that a BatchNorm's state_dict passes through unchanged
        self.register_buffer("num_batches_tracked", torch.zeros((), dtype=torch.long, device=device))

    def forward(self, input: Tensor, *, add: Tensor | None = None, activation: str | None = None) -> Tensor:
        """The input normalized by what is stored.

        Args:
            input: (n, num_features, *spatial).
            add: like input; added to the result before the activation.
            activation: applied last, as in `musigma.functional.batch_norm`.

        Returns:
            (n, num_features, *spatial), in the input's dtype and memory format.

        Raises:
            ValueError: another number of dims than this class takes.
        """
        if not isinstance(input, Tensor):
            refuse_input("batch_norm", input)  # but not torch.fx's proxies
        elif self._dims and input.dim() not in self._dims:
            expected = " or ".join(f"{d}D" for d in self._dims)
            raise ValueError(f"expected {expected} input (got {input.dim()}D input)")
        return batch_norm(
            input,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            eps=self.eps,
            add=add,
            activation=activation,
        )

    def extra_repr(self) -> str:
        return f"{self.num_features}, eps={self.eps}, affine={self.affine}, bias={self.bias is not None}"

    @classmethod
    def from_batchnorm(cls, norm: nn.Module) -> FrozenBatchNorm:
        """A frozen copy of a BatchNorm, torch's or ours; the original is left alone.

        Args:
            norm: a BatchNorm with running statistics.

        Returns:
            a layer whose outputs are ``norm.eval()``'s, in the same mode (which does not matter).

        Raises:
            TypeError: it is no BatchNorm.
            ValueError: it has no running statistics.
        """
        if not isinstance(norm, torch.nn.modules.batchnorm._BatchNorm):
            raise TypeError(f"from_batchnorm freezes a BatchNorm, got {type(norm).__name__}")
        if norm.running_mean is None or norm.running_var is None:
            raise ValueError(
                "freezing needs running statistics, and this BatchNorm has track_running_stats=False; let it "
                "track them over some batches first"
            )
        frozen = cls(norm.num_features, norm.eps, norm.affine, device="meta", bias=norm.bias is not None)
        for name in frozen._buffers:
            value = getattr(norm, name)
            frozen.register_buffer(name, None if value is None else value.detach().clone())
        return frozen.train(norm.training)

    @classmethod
    def convert(cls, module: nn.Module) -> nn.Module:
        """Replace the BatchNorms of a module by frozen ones.

        Called on `FrozenBatchNorm` every BatchNorm is replaced, by the class for its number of dims; called
        on `FrozenBatchNorm2d` only BatchNorm2d is, and so on.

        Args:
            module: changed in place, except where it is itself a BatchNorm.

        Returns:
            the module, or what replaces it.

        Raises:
            ValueError: one of them has no running statistics; then nothing is replaced.
        """
        frozen: dict[nn.Module, nn.Module] = {
            norm: kind.from_batchnorm(norm)
            for norm in module.modules()
            if isinstance(norm, torch.nn.modules.batchnorm._BatchNorm)
            and issubclass(kind := _frozen_kind(norm), cls)
        }
        for parent in list(module.modules()):
            for name, child in list(parent._modules.items()):
                if child in frozen:
                    setattr(parent, name, frozen[child])
        return frozen.get(module, module)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        # Other libraries' frozen layers, and BatchNorms from before it was counted, have no counter.
        state_dict.setdefault(f"{prefix}num_batches_tracked", self.num_batches_tracked)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


class FrozenBatchNorm1d(FrozenBatchNorm):
    """`FrozenBatchNorm` for (n, c) and (n, c, length)."""

    _dims = (2, 3)


class FrozenBatchNorm2d(FrozenBatchNorm):
    """`FrozenBatchNorm` for (n, c, height, width)."""

    _dims = (4,)


class FrozenBatchNorm3d(FrozenBatchNorm):
    """`FrozenBatchNorm` for (n, c, depth, height, width)."""

    _dims = (5,)


def _frozen_kind(norm: nn.Module) -> type[FrozenBatchNorm]:
    for kind, frozen in (
        (torch.nn.BatchNorm1d, FrozenBatchNorm1d),
        (torch.nn.BatchNorm2d, FrozenBatchNorm2d),
        (torch.nn.BatchNorm3d, FrozenBatchNorm3d),
    ):
        if isinstance(norm, kind):
            return frozen
    return FrozenBatchNorm
