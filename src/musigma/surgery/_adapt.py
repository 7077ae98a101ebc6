"""BatchNorm statistics of a new domain, without labels."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from musigma.statistics import Moments
from musigma.surgery._batches import Pick
from musigma.surgery._certificate import Certificate
from musigma.surgery._measured import Reading
from musigma.surgery._recalibrate import Mode, with_statistics


def adapt(
    model: nn.Module,
    data: Any,
    *,
    prior: float = 0.0,
    mode: Mode = "one-pass",
    max_batches: int | None = None,
    mask: Pick = None,
    weights: Pick = None,
    group: dist.ProcessGroup | None = None,
    progress: bool = False,
) -> tuple[nn.Module, Certificate]:
    """Adapt a trained model to another domain by its BatchNorms' statistics alone: AdaBN.

        mean = ρ · mean_old + (1 − ρ) · mean_new,   var likewise,   ρ = prior / (prior + n)

    with n the number of examples in the new data. Weights stay, and labels are not needed: the statistics of
    the new domain's own images take out the shift between domains, and ρ = 0 is plain AdaBN. With few
    examples the old statistics, counted as `prior` examples, hold the noise down.

    It is `recalibrate` on the new domain, which is said there: both modes, masks, weights, ranks.

    Args:
        model: a trained module; left as it is.
        data: unlabelled examples of the new domain, as in `recalibrate`.
        prior: how many examples of the new domain the old statistics weigh; 0 forgets them. 16 to 256 have
            been found best for batches of 8 to 512 images.
        mode, max_batches, mask, weights, group, progress: as in `recalibrate`.

    Returns:
        a copy with the new domain's statistics, and a certificate that names them and how far they moved.

    Raises:
        ValueError: a negative prior, and what `recalibrate` raises.

    Example:
        >>> import torch, musigma as ms
        >>> trained = torch.nn.BatchNorm1d(1)  # mean 0 and variance 1
        >>> darker = torch.tensor([[-4.0], [-2.0]])
        >>> ms.surgery.adapt(trained, darker)[0].running_mean.item()
        -3.0
        >>> ms.surgery.adapt(trained, darker, prior=4.0)[0].running_mean.item()
        -1.0

    References:
        Li, Wang, Shi, Hou & Liu 2018, "Adaptive Batch Normalization for practical domain adaptation";
        Schneider et al. 2020, "Improving robustness against common corruptions by covariate shift
        adaptation", equation 2.
    """
    if not prior >= 0:
        raise ValueError(f"prior must be a number of examples, 0 or more; got {prior}")
    reading = Reading(data, max_batches, mask, weights, group, progress)

    def blended(layer: _BatchNorm, total: Moments, examples: float) -> tuple[Tensor, Tensor]:
        assert layer.running_mean is not None
        assert layer.running_var is not None
        mean, var = total.mean, total.var(correction=1)
        keep = prior / (prior + examples) if prior else 0.0
        if not keep:
            return mean, var
        old_mean, old_var = layer.running_mean.to(mean.dtype), layer.running_var.to(var.dtype)
        return old_mean.lerp(mean, 1 - keep), old_var.lerp(var, 1 - keep)

    return with_statistics("adapt", model, reading, mode, blended)
