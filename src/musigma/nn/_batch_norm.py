"""BatchNorm: the batch's statistics in training, the running ones in evaluation."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from musigma.functional import batch_norm
from musigma.functional._checks import refuse_input
from musigma.nn._sizes import check_size
from musigma.nn._statistics import KeepsStatistics


class _BatchNorm(KeepsStatistics, torch.nn.modules.batchnorm._BatchNorm):
    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
    ) -> None:
        check_size("num_features", num_features)
        # by name: SyncBatchNorm has one argument more in between
        super().__init__(
            num_features=num_features,
            eps=eps,
            momentum=momentum,
            affine=affine,
            track_running_stats=track_running_stats,
            device=device,
            dtype=dtype,
            bias=bias,
        )

    def forward(
        self,
        input: Tensor,
        *,
        mask: Tensor | None = None,
        add: Tensor | None = None,
        activation: str | None = None,
    ) -> Tensor:
        """The input normalized; in training the running statistics take in the batch.

        Args:
            input: (n, num_features, *spatial).
            mask: what enters the statistics, broadcastable to the input: (n, 1, *spatial), True keeps.
            add: like input; added to the result before the activation.
            activation: applied last, as in `musigma.functional.batch_norm`.

        Returns:
            (n, num_features, *spatial), in the input's dtype and memory format.

        Raises:
            ValueError: training on one value a channel, or another number of dims than this class takes.
        """
        if isinstance(input, Tensor):
            self._check_input_dim(input)
        else:
            refuse_input("batch_norm", input)  # but not torch.fx's proxies
        own = self.training and not self.track_running_stats
        running_mean, running_var = (None, None) if own else (self.running_mean, self.running_var)
        return batch_norm(
            input,
            running_mean,
            running_var,
            self.weight,
            self.bias,
            self.training or (running_mean is None and running_var is None),
            self.momentum,
            self.eps,
            num_batches_tracked=self.num_batches_tracked,
            mask=mask,
            group=self._group(),
            add=add,
            activation=activation,
        )

    def _group(self) -> ProcessGroup | None:
        """The process group whose ranks share one set of statistics."""
        return None


class BatchNorm1d(_BatchNorm, torch.nn.BatchNorm1d):
    """Normalize each channel over the batch: `torch.nn.BatchNorm1d`, through `musigma.functional`.

        y = (x − μ) / √(σ² + eps) · weight + bias

    In training μ and σ² are the batch's, σ² *biased* (1/n), and the running statistics take in the mean and
    the *unbiased* variance (1/(n−1)). In evaluation the running statistics take their place.

    **Momentum** is torch's, the weight of the new value:

        running ← (1 − momentum) · running + momentum · batch          (0.1: nine tenths are kept)

    Notes and other libraries write ``running = momentum · running + (1 − momentum) · batch``. There momentum
    is what is *kept*, so its usual value is 0.9 or 0.99; that formula with "momentum ~0.1" would forget nine
    tenths of its past at every step. A layer in that convention is ``BatchNorm1d(c, momentum=1 - keep)``.
    ``momentum=None`` averages all batches alike. For the statistics of the whole training set instead, see
    ``musigma.surgery.recalibrate``.

    Beyond torch:

    - A rejected or empty batch changes nothing, num_batches_tracked included.
    - Under activation checkpointing, of any kind and however nested, a batch is taken in once.
    - A channel whose batch statistics are inf or NaN keeps its running ones, as a gradient scaler keeps the
      weights; `nonfinite_statistics` names those of a model that took them in.
    - The running statistics stay float32 under ``.half()``, ``.bfloat16()`` and ``.to(dtype)``.
    - Loading statistics that are NaN or inf, or a negative running_var, is refused, with the channels, before
      anything of this layer is written; evaluating by a negative running_var is too.
    - Freezing is explicit: ``requires_grad_(False)`` freezes weight and bias only; `FrozenBatchNorm1d` also
      freezes the statistics, whatever the mode. With ``track_running_stats = False`` set later, training
      normalizes by the batch and leaves the buffers alone, and evaluation goes on using them.
    - Averaged copies: ``torch.optim.swa_utils.AveragedModel`` copies every buffer, so the copy has the live
      statistics and counter. With ``use_buffers=True`` it averages the statistics; `ema_multi_avg_fn` then
      copies the counter, which torch's own leaves at 1 (only ``momentum=None`` would read it).

    Args:
        num_features: c, the size of dim 1.
        eps: added to the variance; in units of input².
        momentum: the weight of the new value; None for the plain average; 0.0 leaves the statistics alone.
        affine: whether weight and bias, of shape (c,), are learned.
        track_running_stats: whether there are running statistics; without them evaluation uses the batch's.
        device: where parameters and buffers are made.
        dtype: of the parameters, and of the buffers unless it is narrower than float32.
        bias: whether there is a bias.

    Example:
        >>> import torch, musigma as ms
        >>> norm = ms.nn.BatchNorm1d(1, momentum=0.1, affine=False)
        >>> norm(torch.tensor([[1.0], [2.0], [3.0]])).flatten()
        tensor([-1.2247,  0.0000,  1.2247])
        >>> norm.running_mean, norm.running_var
        (tensor([0.2000]), tensor([1.]))

    References:
        Ioffe & Szegedy 2015, "Batch Normalization".
    """


class BatchNorm2d(_BatchNorm, torch.nn.BatchNorm2d):
    """`BatchNorm1d` for (n, c, height, width): each channel over the batch and all positions."""


class BatchNorm3d(_BatchNorm, torch.nn.BatchNorm3d):
    """`BatchNorm1d` for (n, c, depth, height, width): each channel over the batch and all positions."""
