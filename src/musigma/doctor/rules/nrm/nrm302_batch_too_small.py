"""NRM302 batch-too-small: BatchNorm's statistics are mostly chance at this batch size.

## What it does

Measures how many independent values M each BatchNorm's statistics are worth. Without positions M is the
number of examples n. With positions it is n·σ²/s², where s² is the variance of the examples' own means:
pixels of one image resemble each other, so 4 images of 32×32 may be worth 4000 values or 5. Over batches
the mean then has the standard deviation σ/√M and the standard deviation of normal values σ·√(2/4M), and
together they put noise of variance 1.5/M on the normalized values. The rule fires where that exceeds 1/4,
which is M ≤ 6, while a BatchNorm normalizes by the batch.

## Why it hurts

Every unit receives noise that depends on its batch mates, as from a dropout of 0.2 behind every BatchNorm
that nobody asked for; with two examples the normalized values are ±1 whatever came in. The running
statistics average over many batches and are not noisy, so eval mode sees another network than training
did.

## Example

```python
import torch
from torch import nn
from musigma.doctor import Case

x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
case = Case(model, x, intent="train")
```

## Use instead

```python
import torch
from torch import nn
from musigma.doctor import Case

x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 2))
case = Case(model, x, intent="train")
```

## Fix safety

A larger batch changes nothing else. Over several processes SyncBatchNorm takes the statistics of all of
them; gradient accumulation does not help. GroupNorm and LayerNorm need no batch, but they are other
functions: a trained model has to be trained again. For fine-tuning, freezing the statistics keeps the
function.

## References

Luo et al. 2018, "Towards Understanding Regularization in Batch Normalization" (the two standard
deviations); Wu & He 2018, "Group Normalization", figure 1; Wu & Johnson 2021, "Rethinking 'Batch' in
BatchNorm".
"""

from collections.abc import Iterator

from musigma.doctor import _rules
from musigma.doctor._examination import Examination
from musigma.doctor._rules import Symptom
from musigma.doctor.probes._channels import ChannelMeasure
from musigma.doctor.probes._words import called, counted, modules

# 1/M from the mean and x̂²·2/4M from the standard deviation, with E[x̂²] = 1.
_NOISE = 1.5
# Dropout at rate p multiplies by noise of variance p/(1 − p): 1/4 at p = 0.2. It means M ≤ 6; the notes warn
# of 4 examples or fewer.
_LIMIT = 0.25


@_rules.rule("NRM302", "batch-too-small", severity="warning")
def check(exam: Examination) -> Iterator[Symptom]:
    """One symptom for all BatchNorms whose statistics are noise at this batch size."""
    if exam.intent == "inference":
        return
    noisy: dict[str, ChannelMeasure] = {}
    for m in exam.channels:
        if m.kind == "batch_norm" and m.own and _NOISE / m.effective >= _LIMIT:
            noisy.setdefault(m.path, m)
    if not noisy:
        return
    worst = min(noisy.values(), key=lambda m: m.effective)
    mean_sd, std_sd = deviations(worst.effective)
    yield Symptom(
        where=tuple(noisy),
        message=f"with {counted(worst.count, 'example')} the statistics of {called(worst.path)} are worth "
        f"{worst.effective:.3g} independent values: from batch to batch the mean moves by {mean_sd:.3g} σ "
        f"and σ by {std_sd:.1%}" + (f"; layers concerned: {modules(noisy)}." if len(noisy) > 1 else "."),
        evidence={
            "examples": worst.count,
            "worst": worst.path,
            "effective": worst.effective,
            "sd_mean": mean_sd,
            "sd_std": std_sd,
            "noise_variance": _NOISE / worst.effective,
            "layers": {
                path: {"effective": m.effective, "elements": _elements(m)} for path, m in noisy.items()
            },
        },
        fix="use a larger batch, SyncBatchNorm over processes, or GroupNorm or LayerNorm; to fine-tune, "
        "freeze the running statistics with musigma.nn.FrozenBatchNorm",
    )


def deviations(values: float) -> tuple[float, float]:
    """Standard deviation of the mean in units of σ, and of σ relative, over this many normal values."""
    return values**-0.5, (2 / (4 * values)) ** 0.5


def _elements(m: ChannelMeasure) -> int:
    return int(m.batch.count.max())
