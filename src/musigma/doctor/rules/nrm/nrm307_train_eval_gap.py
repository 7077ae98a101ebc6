"""NRM307 train-eval-gap: the same batch gives different answers in train and in eval mode.

## What it does

Runs the batch in both modes. Dropout and other noise is averaged out over draws, and what it leaves is
taken off. The difference is measured in units of the outputs' spread between examples. The rule fires
where it exceeds 0.71 of that (outputs of equal spread that correlate by 0.75), and three times what the
choice of the batch explains: the batch is cut in halves, whose statistics are as far from the whole
batch's as those are from the truth. It names the layer whose own statistics are furthest apart, each layer
measured on the input it has in training, so that a layer doesn't answer for those before it.

Models whose running statistics were never updated, or have only begun to be (fewer than 5/momentum updates
while it trains), are expected to differ, and the rule is silent; so it is where no layer has running
statistics.

## Why it hurts

What was trained is the network of train mode; what is evaluated and shipped is the other one. Training
loss and accuracy look fine while validation, on the very same data, is at chance.

## Example

```python
import torch
from torch import nn
from musigma.doctor import Case

x = torch.randn(256, 8, generator=torch.Generator().manual_seed(0)) * 3 + 100
torch.manual_seed(0)
model = nn.Sequential(nn.BatchNorm1d(8, momentum=0.001), nn.Linear(8, 2))
for _ in range(60):
    model(x)
case = Case(model, x)
```

## Use instead

```python
import torch
from torch import nn
from musigma.doctor import Case

x = torch.randn(256, 8, generator=torch.Generator().manual_seed(0)) * 3 + 100
torch.manual_seed(0)
model = nn.Sequential(nn.BatchNorm1d(8, momentum=0.1), nn.Linear(8, 2))
for _ in range(60):
    model(x)
case = Case(model, x)
```

## Fix safety

Recalibrating makes eval mode use the statistics of the data it is given, and touches no weight. It closes
the gap that stale statistics leave (NRM304), not the one of a dropout in front of a BatchNorm, whose
variance is another one in each mode: there the dropout has to move behind the last BatchNorm. Nor does it
help an InstanceNorm that tracks: examples differ, so no running statistics are those of each of them.

## References

Ioffe & Szegedy 2015, "Batch Normalization", section 3.1; Li et al. 2019, "Understanding the Disharmony
between Dropout and Batch Normalization by Variance Shift"; Wu & Johnson 2021, "Rethinking 'Batch' in
BatchNorm", section 3.
"""

from collections.abc import Iterator, Mapping, Sequence

from musigma.doctor import _rules
from musigma.doctor._examination import Examination
from musigma.doctor._rules import Symptom
from musigma.doctor.probes._channels import ChannelMeasure
from musigma.doctor.probes._modes import Gap, ModesCompared
from musigma.doctor.probes._words import called

# Two outputs of equal spread and correlation r are √(2(1 − r)) spreads apart: 0.71 is r = 0.75.
# Nets that train well (digits, six architectures and rates) stay below 0.5 once the statistics have settled.
_LIMIT = 0.5**0.5
# The lag that ordinary training leaves in one layer (NRM304).
_LAG = 0.5
# Of a hundred healthy models one lies beyond three standard errors.
_ERRORS = 3.0
# Answers that differ by more than they vary are other answers.
_GROSS = 1.0


@_rules.rule("NRM307", "train-eval-gap", severity="warning")
def check(exam: Examination) -> Iterator[Symptom]:
    """One symptom: how far apart the outputs are, and the layer it comes from."""
    layers = [m for m in exam.channels_in_training if _judged(exam, m)]
    compared = exam.modes_compared if layers else None
    if compared is None or not compared.output.relative > _LIMIT:
        return
    # A batch that can't be cut says nothing about itself: then the layers' own sampling errors must do.
    noise = compared.sampling
    if noise != noise:
        noise = compared.output.scale * sum(m.gap_noise() ** 2 for m in layers) ** 0.5
    if compared.output.difference > _ERRORS * noise:
        yield _symptom(layers, compared, noise)


def _symptom(layers: Sequence[ChannelMeasure], compared: ModesCompared, noise: float) -> Symptom:
    own = {m.path: m.gap() for m in layers}
    path = max(own, key=lambda p: own[p])
    behind = path if own[path] > _LAG else _first(compared.layers, path)
    kinds = {m.path: m.kind for m in layers}
    if kinds.get(behind) == "instance_norm":
        path = behind
        why = (
            f"{called(path)} normalizes every example by its own statistics in training and by the running "
            f"ones in evaluation, which moves its normalized values by {own[path]:.3g}"
        )
        fix = "let it normalize examples by themselves in both modes: track_running_stats=False"
    elif own[path] > _LAG:
        why = f"by itself {called(path)} moves its normalized values by {own[path]:.3g}"
        fix = "recalibrate the running statistics (musigma.surgery.recalibrate)"
    else:
        path = behind
        why = f"it is first seen behind {called(path)}, whose own statistics fit: what comes before differs"
        fix = "move dropout and other noise behind the last layer with running statistics"
    return Symptom(
        where=(path,),
        message=f"the same batch gives outputs that are {compared.output.relative:.3g} standard deviations "
        f"apart in train and in eval mode; {why}.",
        evidence={
            "difference": compared.output.difference,
            "relative": compared.output.relative,
            "spread": compared.output.scale,
            "sampling": noise,
            "draws": compared.draws,
            "layer": path,
            "layers": {
                m.path: {
                    "own": own[m.path],
                    "sampling": m.gap_noise(),
                    "output": compared.layers[m.path].relative if m.path in compared.layers else None,
                }
                for m in layers
            },
        },
        fix=fix,
        severity="error" if compared.output.relative > _GROSS else None,
    )


def _judged(exam: Examination, m: ChannelMeasure) -> bool:
    """Whether a layer has running statistics that eval mode will use, and that have had their time."""
    if m.stored is None or not m.own or m.stored.untouched:
        return False
    about_to_train = exam.intent in ("train", "finetune") or (exam.intent is None and exam.model.training)
    return not (about_to_train and m.stored.learning)


def _first(gaps: Mapping[str, Gap], otherwise: str) -> str:
    """The first layer whose outputs differ by half of what the worst do."""
    worst = max((g.relative for g in gaps.values()), default=0.0)
    return next((path for path, g in gaps.items() if g.relative > worst / 2), otherwise)
