"""NRM304 stale-running-stats: the running statistics don't describe what the layer sees.

## What it does

Runs the batch as in training and compares, for every layer with running statistics, the stored mean and
variance with the batch's own. Each layer is judged by itself: the layers before it normalize by the batch
meanwhile, as they did when the statistics were taken, so a stale layer doesn't blame the ones behind it.
It fires where a layer's means are more than 0.5 standard deviations apart (root mean square over its
channels), or its standard deviations by more than a factor 1.5, beyond three standard errors of the
batch's statistics, or where a single channel is off by four times that. The standard errors come from the
spread between examples.

Ordinary training lags behind its weights by up to half a standard deviation: that is forgiven. So is a run
that has just begun, where fewer than 5/momentum batches have been taken in and the momentum is 0.01 or
more. With intent "train" or "finetune" a layer that goes on updating at such a momentum mends itself, and
the rule is silent. Layers that were frozen on purpose, and layers that have never been updated (NRM305),
are not judged.

## Why it hurts

In eval mode the layer normalizes by what is stored. A mean that is off by k standard deviations shifts
every normalized value by k: behind it a ReLU is all on or all off. Training looks fine, since it
normalizes by the batch; only evaluation fails.

## Example

```python
import torch
from torch import nn
from musigma.doctor import Case

x = torch.randn(256, 8, generator=torch.Generator().manual_seed(0)) * 3 + 100
model = nn.Sequential(nn.BatchNorm1d(8, momentum=0.001), nn.Linear(8, 2))
for _ in range(60):
    model(x)
case = Case(model.eval(), x)
```

## Use instead

```python
import torch
from torch import nn
import musigma as ms
from musigma.doctor import Case

x = torch.randn(256, 8, generator=torch.Generator().manual_seed(0)) * 3 + 100
model = nn.Sequential(nn.BatchNorm1d(8, momentum=0.001), nn.Linear(8, 2))
for _ in range(60):
    model(x)
model, _ = ms.surgery.recalibrate(model, [x])
case = Case(model.eval(), x)
```

## Fix safety

Recalibrating replaces the running statistics by those of the data it is given, and touches no weight. It
must be training data, as augmented as in training; statistics of test data leak. The cause, mostly the
momentum, stays in the model unless it is changed as well.

## References

Ioffe & Szegedy 2015, "Batch Normalization", algorithm 2; Wu & Johnson 2021, "Rethinking 'Batch' in
BatchNorm", section 3.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from musigma.doctor import _rules
from musigma.doctor._examination import Examination
from musigma.doctor._rules import Symptom
from musigma.doctor.probes._channels import ChannelMeasure, Stored
from musigma.doctor.probes._words import called, modules
from musigma.statistics import moments

# What a layer of a net that trains well lags by, root mean square over its channels: up to 0.42 standard
# deviations at the highest rates that a convolutional net on digits bears, and 0.25 in their logarithm.
_MEAN_LAG = 0.5
_STD_LAG = math.log(1.5)
# One channel alone may lag by several times as much: up to 1.1 there.
_SINGLE = 4.0
# A layer's channels share their examples, so their average is hardly more certain than one of them; of a few
# thousand single channels none lies beyond five standard errors by chance.
_ERRORS, _SINGLE_ERRORS = 3.0, 5.0
# Fewer examples don't show how far examples differ.
_FEWEST = 4
# Two standard deviations off, 98 % of a normal channel's values lie on one side of zero.
_GROSS = 2.0
# e⁻³: with less than that left, the initial values are not what is wrong.
_INITIAL = 0.05


@dataclass(frozen=True)
class _Stale:
    measure: ChannelMeasure
    stored: Stored
    apart: Tensor
    ratio: Tensor
    far: Tensor

    @property
    def worst(self) -> int:
        """The channel that is furthest off, by mean and standard deviation together."""
        off = self.apart / _MEAN_LAG + self.ratio.log().abs() / 2 / _STD_LAG
        return int(torch.where(self.far, off, -1).argmax())


@_rules.rule("NRM304", "stale-running-stats", severity="warning")
def check(exam: Examination) -> Iterator[Symptom]:
    """One symptom for all layers whose stored statistics are off; the first in execution order leads."""
    stale: dict[str, _Stale] = {}
    for m in exam.channels_in_training:
        found = None if mends_itself(exam, m) else _compare(m)
        if found is not None:
            stale.setdefault(m.path, found)
    if stale:
        yield _symptom(stale)


def mends_itself(exam: Examination, m: ChannelMeasure) -> bool:
    """Whether a layer has nothing to be judged by, or will have caught up before anybody asks."""
    if m.stored is None or not m.own or m.count < _FEWEST or m.stored.untouched:
        return True
    if exam.intent in ("train", "finetune"):
        return m.stored.momentum is not None and m.stored.momentum >= 0.01
    return exam.intent is None and exam.model.training and m.stored.learning


def _compare(m: ChannelMeasure) -> _Stale | None:
    stored = m.stored
    assert stored is not None
    mean, var = stored.mean.double(), stored.var.double()
    # The stored average has taken in noise as well: m/(2 − m) of one batch's variance.
    own = 1 if stored.momentum is None else 1 + stored.momentum / (2 - stored.momentum)
    # The wider of the two: a channel that is silent in this batch has no spread to measure by.
    wide = (m.batch.var().maximum(var) + m.eps).sqrt()
    apart = (mean - m.mean).abs() / wide
    ratio = ((var + m.eps) / (m.var + m.eps)).log().abs() / 2
    # What isn't finite is NRM326's, and a channel without spread in this batch says nothing about it.
    apart, ratio = apart.nan_to_num(0, 0, 0), torch.where(m.var > 0, ratio, 0).nan_to_num(0, 0, 0)
    far = _beyond(apart, _MEAN_LAG, own**0.5 * m.mean_error)
    far |= _beyond(ratio, _STD_LAG, own**0.5 * m.std_error)
    if not far.any():
        return None
    return _Stale(m, stored, (mean - m.mean).abs() / m.batch.std(correction=1), var / m.var, far)


def _beyond(off: Tensor, lag: float, error: Tensor) -> Tensor:
    """The channels that are off: those above the lag if the layer as a whole is, else those far above it."""
    whole = _rms(off) > lag + _ERRORS * _rms(error)
    return off > (lag if whole else _SINGLE * lag + _SINGLE_ERRORS * error)


def _rms(x: Tensor) -> float:
    m = moments(x, None)
    return float(m.mean.square() + m.var()) ** 0.5


def _cause(stored: Stored) -> tuple[str, str]:
    """In words, and in one."""
    left = stored.initial_weight
    if left is not None and left > _INITIAL:
        after = f"momentum {stored.momentum:g} after {stored.updates} updates"
        return f"{after} leaves {left:.0%} of the initial values", "momentum"
    if stored.momentum is None:
        return "momentum None averages over all of training, early weights included", "average"
    return "the data or the weights are not those that the statistics were taken with", "changed"


def _symptom(stale: dict[str, _Stale]) -> Symptom:
    path, first = next(iter(stale.items()))
    worst, (said, cause) = first.worst, _cause(first.stored)
    apart, ratio = float(first.apart[worst]), float(first.ratio[worst])
    gross = max(float(s.apart[s.far].nan_to_num(posinf=0.0).max()) for s in stale.values()) > _GROSS
    return Symptom(
        where=tuple(stale),
        message=f"the running statistics of {called(path)} don't describe its input: in channel {worst} the "
        f"mean is {apart:.3g} standard deviations off and the variance {ratio:.3g} times the batch's; {said}"
        + (f". The same in {modules(list(stale)[1:])}." if len(stale) > 1 else "."),
        evidence={
            "layer": path,
            "channel": worst,
            "difference": apart,
            "variance_ratio": ratio,
            "cause": cause,
            "layers": {name: _numbers(s) for name, s in stale.items()},
        },
        fix="recalibrate: musigma.surgery.recalibrate(model, training_batches)"
        + ("; then raise the momentum or train longer" if cause == "momentum" else ""),
        severity="error" if gross else None,
    )


def _numbers(s: _Stale) -> dict[str, object]:
    return {
        "channels": len(s.far),
        "off": int(s.far.sum()),
        "difference": float(s.apart.max()),
        "variance_ratio": [float(s.ratio.min()), float(s.ratio.max())],
        "momentum": s.stored.momentum,
        "updates": s.stored.updates,
        "initial_weight": s.stored.initial_weight,
    }
