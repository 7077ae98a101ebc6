"""INP101 unstandardized-input: features whose mean is far from 0 or whose spread is far from 1.

## What it does

Measures every feature where it reaches the first layer with weights, after whatever the model itself does
to it: a model that begins with a normalization layer, or divides by 255, is judged by what comes out of
that. The features of an image are its channels, whether or not the model makes a row of the pixels first:
they share a unit, and a pixel that is nearly always dark is not one whose scale is wrong.

A feature of mean μ and standard deviation σ next to a bias gives least squares the Hessian
[[1, μ], [μ, μ² + σ²]], whose condition number κ solves (κ + 1)²/κ = (1 + μ² + σ²)²/σ². The rule fires where
κ exceeds 10 for every μ and σ that the batch is compatible with, which of few examples is nearly any σ
larger than the one they show; for values within [−1, 1], which can slow a layer but not flood it, where κ
exceeds 100, and then only as `info`.

## Why it hurts

Gradient descent moves every weight at one rate. The rate is bounded by the steepest direction and the
progress by the flattest, so the number of steps grows with the condition number: it zigzags. The first
layer's pre-activations inherit the scale, and with it everything an initialization scheme promises:
E[z²] is fan_in·Var(W)·E[x²], and E[x²] = μ² + σ² counts the mean as well.

## Example

```python
import torch
from torch import nn
from musigma.doctor import Case

x = torch.randn(256, 8, generator=torch.Generator().manual_seed(0)) * 6 + 10
case = Case(nn.Linear(8, 2), x)
```

## Use instead

```python
import torch
from torch import nn
import musigma as ms
from musigma.doctor import Case

x = torch.randn(256, 8, generator=torch.Generator().manual_seed(0)) * 6 + 10
standardize = ms.inputs.Standardizer().fit(x).layer()
case = Case(nn.Sequential(standardize, nn.Linear(8, 2)), x)
```

## Fix safety

Standardizing is an affine change of variables: whatever the first layer could represent it still can. A
trained model must get the same statistics when it is used, so the treatment puts them into the model as
a layer with buffers. A model that was trained on raw inputs must not be given standardized ones.

## References

LeCun, Bottou, Orr & Müller 1998, "Efficient BackProp", sections 4.3 and 5.1; Wilson & Hilferty 1931,
"The distribution of chi-square".
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from musigma.doctor import _rules
from musigma.doctor._examination import Examination
from musigma.doctor._rules import Symptom
from musigma.doctor.probes._entries import ChannelFeatures, EntryMeasure
from musigma.doctor.probes._words import called

# Steps grow in proportion to κ, so 10 costs an order of magnitude.
_LIMIT = 10.0
# Within the unit box the pre-activations are no larger than the law assumes: only the two orders count.
_LIMIT_IN_BOX = 100.0
# Standard errors that are forgiven; of a few thousand features one lies beyond 3.5 by chance.
_SIGMAS = 4.0


@_rules.rule("INP101", "unstandardized-input", severity="warning")
def check(exam: Examination) -> Iterator[Symptom]:
    """One symptom per first weight layer that receives badly scaled features."""
    for entry in exam.trace.entries:
        if entry.normalized:
            continue
        boxed = entry.low >= -1 and entry.high <= 1
        condition = condition_numbers(entry.channels or entry)
        far = condition > (_LIMIT_IN_BOX if boxed else _LIMIT)
        if far.any():
            yield _symptom(entry, condition, far, boxed)


def condition_numbers(entry: EntryMeasure | ChannelFeatures) -> Tensor:
    """The smallest condition number beside a bias that each feature's sample is compatible with.

    Examples are the independent draws (the pixels of one image are not). For n of them and a kurtosis K, the
    variance has the relative error √((K − 1)/n), that of χ² with ν = 2(n − 1)/(K − 1) degrees of freedom,
    which bounds σ on both sides; K counts as 3 at least, since n values hide their tails (two have K = 1).
    Given σ, |μ| is at least |mean| − kσ/√n. Constant features give 1: they are INP102's.
    """
    std, kurtosis = entry.features.std(), entry.tails.clamp_min(3.0)
    # One example says nothing about the next: its own positions must do, and they count as one value.
    freedom = (2 * (entry.examples - 1) / (kurtosis - 1)).clamp_min(1.0)
    low, high = std / _quantile(freedom, _SIGMAS).sqrt(), std / _quantile(freedom, -_SIGMAS).sqrt()
    mean, error = entry.features.mean.abs(), _SIGMAS / entry.examples**0.5
    # t(σ) = (1 + max(|mean| − error·σ, 0)² + σ²)/σ is convex: its minimum, moved into [low, high].
    within = ((1 + mean.square()) / (1 + error**2)).sqrt()
    best = torch.where(within * error < mean, within, (mean / error).clamp_min(1.0)).clamp(low, high)
    trace = (1 + (mean - error * best).clamp_min(0).square() + best.square()) / best
    square = trace.square() - 2
    condition = (square + (square.square() - 4).clamp_min(0).sqrt()) / 2
    return torch.where(entry.varies, condition, 1.0)


def _quantile(freedom: Tensor, sigmas: float) -> Tensor:
    """The quantile of χ²/ν that lies as far out as `sigmas` of a normal, by Wilson and Hilferty's cube."""
    spread = 2 / (9 * freedom)
    return (1 - spread + sigmas * spread.sqrt()).clamp_min(0).pow(3)


def _symptom(entry: EntryMeasure, condition: Tensor, far: Tensor, boxed: bool) -> Symptom:
    worst = int(condition.argmax())
    features, kind = (
        (entry.features, "feature") if entry.channels is None else (entry.channels.features, "channel")
    )
    mean, std = float(features.mean[worst]), float(features.std()[worst])
    count, total = int(far.sum()), len(far)
    layer = called(entry.node.module, root="the first layer")
    said = f"{count} of {total} {kind}s reach {layer} far from mean 0 and std 1"
    if entry.channels is not None or entry.condition is None or entry.condition_standardized is None:
        cost = f"its condition number beside a bias is {float(condition[worst]):.3g}"
    else:
        cost = (
            f"the condition number of their second moments is {entry.condition:.3g}, "
            f"{entry.condition_standardized:.3g} after standardizing"
        )
    return Symptom(
        where=entry.inputs,
        message=f"{said}: {kind} {worst} has mean {mean:.4g} and std {std:.4g}; {cost}.",
        evidence={
            "features": total,
            "far": count,
            "worst": worst,
            "mean": mean,
            "std": std,
            "condition": entry.condition or float(condition[worst]),
            "condition_standardized": entry.condition_standardized,
            "low": entry.low,
            "high": entry.high,
            "layer": entry.node.module,
        },
        fix="standardize: put musigma.inputs.Standardizer().fit(data).layer() in front of the model",
        severity="info" if boxed else None,
    )
