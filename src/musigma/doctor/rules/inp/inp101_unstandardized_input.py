"""INP101 unstandardized-input: features whose mean is far from 0 or whose spread is far from 1.

## What it does

Measures every feature (every channel of an image) where it reaches the first layer with weights, after
whatever the model itself does to it: a model that begins with a normalization layer, or divides by 255,
is judged by what comes out of that. A feature of mean μ and standard deviation σ next to a bias gives
least squares the Hessian [[1, μ], [μ, μ² + σ²]], whose condition number κ solves (κ + 1)²/κ = (1 + μ² +
σ²)²/σ². The rule fires where κ exceeds 10 beyond sampling error; for values within [−1, 1], which can
slow a layer but not flood it, where κ exceeds 100, and then only as `info`.

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

LeCun, Bottou, Orr & Müller 1998, "Efficient BackProp", sections 4.3 and 5.1.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from musigma.doctor import _rules
from musigma.doctor._examination import Examination
from musigma.doctor._rules import Symptom
from musigma.doctor.probes._entries import EntryMeasure

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
        condition = condition_numbers(entry)
        far = condition > (_LIMIT_IN_BOX if boxed else _LIMIT)
        if far.any():
            yield _symptom(entry, condition, far, boxed)


def condition_numbers(entry: EntryMeasure) -> Tensor:
    """The condition number that each feature's mean and std give beside a bias, sampling error forgiven.

    Examples are the independent draws (the pixels of one image are not), so their number n gives the errors:
    σ/√n for the mean, and √((kurtosis − 1)/4n) for the logarithm of the std, which is large for a feature
    that is rarely anything but zero. Constant features give 1: they are INP102's.
    """
    n = entry.examples
    std = entry.features.std()
    mean = (entry.features.mean.abs() - _SIGMAS * std / n**0.5).clamp_min(0)
    slack = (_SIGMAS * ((entry.tails - 1) / (4 * n)).sqrt()).exp()
    # Towards 1, never beyond it.
    std = torch.where(std > 1, (std / slack).clamp_min(1), (std * slack).clamp_max(1))
    trace = (1 + mean.square() + std.square()) / std
    square = trace.square() - 2
    condition = (square + (square.square() - 4).clamp_min(0).sqrt()) / 2
    return torch.where(entry.varies, condition, 1.0)


def _symptom(entry: EntryMeasure, condition: Tensor, far: Tensor, boxed: bool) -> Symptom:
    worst = int(condition.argmax())
    mean, std = float(entry.features.mean[worst]), float(entry.features.std()[worst])
    count, total = int(far.sum()), len(far)
    layer = entry.node.module or "the first layer"
    said = f"{count} of {total} features reach {layer} far from mean 0 and std 1"
    if entry.condition is None or entry.condition_standardized is None:
        cost = f"its condition number beside a bias is {float(condition[worst]):.3g}"
    else:
        cost = (
            f"the condition number of their second moments is {entry.condition:.3g}, "
            f"{entry.condition_standardized:.3g} after standardizing"
        )
    return Symptom(
        where=entry.inputs,
        message=f"{said}: feature {worst} has mean {mean:.4g} and std {std:.4g}; {cost}.",
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
