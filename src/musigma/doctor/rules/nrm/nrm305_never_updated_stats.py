"""NRM305 never-updated-stats: a layer normalizes by running statistics that no batch has ever entered.

## What it does

Looks at the running statistics of every layer that normalizes by them: in eval mode, frozen, or about to
(intent "inference", and "finetune", which expects a trained model). It fires where every mean is exactly 0
and every variance exactly 1, the values of a fresh layer. Statistics that have been loaded or set while
`num_batches_tracked` stayed 0 are left alone on purpose: converters of foreign checkpoints copy mean and
variance and don't count, eval mode never reads the counter, and the values show that something has been
put there. Whether they describe the data is NRM304's question. Only beside `momentum=None` they are `info`,
since the next update counts from zero and overwrites them. A fresh model
that is about to train is healthy, and so is a new layer in a model that is fine-tuned (its weight is still
1).

## Why it hurts

(x − 0)/√(1 + ε) is x: the layer doesn't normalize at all. A network that was trained with BatchNorm and
loaded without its buffers (`parameters()` holds no statistics, `state_dict()` does) gives garbage in eval
mode.

## Example

```python
import torch
from torch import nn
from musigma.doctor import Case

x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
case = Case(model.eval(), x)
```

## Use instead

```python
import torch
from torch import nn
import musigma as ms
from musigma.doctor import Case

x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
model, _ = ms.surgery.recalibrate(model, [x])
case = Case(model.eval(), x)
```

## Fix safety

Loading the missing buffers is the cure; recalibrating on training data is the next best and touches no
weight. A frozen layer with mean 0 and variance 1 may have been folded into its neighbours on purpose: then
it is the identity, and can be removed.

## References

Ioffe & Szegedy 2015, "Batch Normalization", section 3.1.
"""

from collections.abc import Iterator

from torch import nn

from musigma.doctor import _rules
from musigma.doctor._examination import Examination
from musigma.doctor._rules import Symptom
from musigma.doctor.probes._channels import ChannelMeasure
from musigma.doctor.probes._words import counted, modules


@_rules.rule("NRM305", "never-updated-stats", severity="error")
def check(exam: Examination) -> Iterator[Symptom]:
    """One symptom for layers with initial values, one for those whose counter alone is 0."""
    fresh: dict[str, ChannelMeasure] = {}
    uncounted: dict[str, ChannelMeasure] = {}
    anywhere = any(m.stored is not None and not m.stored.initial for m in exam.channels)
    for m in exam.channels:
        if m.stored is None or not _will_be_used(exam, m, anywhere):
            continue
        if m.stored.initial:
            fresh.setdefault(m.path, m)
        elif m.stored.tracked == 0 and m.stored.momentum is None and _counts(exam.model, m):
            uncounted.setdefault(m.path, m)
    if fresh:
        yield Symptom(
            where=tuple(fresh),
            message=f"{counted(len(fresh), 'layer')} with running statistics that were never updated "
            f"(mean 0, variance 1): {modules(fresh)}.",
            evidence={"layers": {path: _numbers(m) for path, m in fresh.items()}},
            fix="load the buffers as well (state_dict, not parameters), or musigma.surgery.recalibrate",
        )
    if uncounted:
        yield Symptom(
            where=tuple(uncounted),
            message=f"{counted(len(uncounted), 'layer')} with running statistics, yet num_batches_tracked is "
            f"0 and momentum None, so that the next update replaces them: {modules(uncounted)}.",
            evidence={"layers": {path: _numbers(m) for path, m in uncounted.items()}},
            fix="set num_batches_tracked to at least 1, so that momentum=None doesn't overwrite them",
            severity="info",
        )


def _will_be_used(exam: Examination, m: ChannelMeasure, anywhere: bool) -> bool:
    """Whether the layer normalizes by what is stored, or is meant to have been trained.

    Beside layers with statistics, one whose weight and bias are as fresh is a new head, not a loss.
    """
    if not m.own or exam.intent == "inference":
        return True
    new = (m.weight is None or bool((m.weight == 1).all())) and anywhere
    return exam.intent == "finetune" and not new


def _counts(model: nn.Module, m: ChannelMeasure) -> bool:
    """Whether the layer counts its batches; frozen ones carry a counter that nobody raises."""
    assert m.stored is not None
    owner = model.get_submodule(m.stored.names[0].rpartition(".")[0]) if m.stored.names else None
    return isinstance(owner, nn.modules.batchnorm._NormBase)


def _numbers(m: ChannelMeasure) -> dict[str, object]:
    assert m.stored is not None
    return {
        "updates": m.stored.tracked,
        "initial": m.stored.initial,
        "batch_mean": float(m.batch.mean.abs().max()),
        "batch_std": float(m.batch.std().max()),
    }
