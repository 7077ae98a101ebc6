"""NRM314 frozen-in-train-mode: a BatchNorm with frozen weight and bias that still normalizes by the batch.

## What it does

Looks for BatchNorms that normalize by the batch although all their weights and biases have
`requires_grad=False`. `musigma.nn.FrozenBatchNorm` and BatchNorms in eval mode normalize by what is
stored, and are left alone; so are layers without weight and bias, which there is nothing to tell from.

## Why it hurts

`requires_grad_(False)` stops the optimizer, and nothing else. The layer still normalizes by the batch and
its running statistics still move, so the "frozen" part computes another function in every batch, and after
fine-tuning it is no longer the pretrained one, even where no optimizer has touched it.

## Example

```python
import torch
from torch import nn
from musigma.doctor import Case

x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0)) * 4 + 10
backbone = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU()).requires_grad_(False)
case = Case(nn.Sequential(backbone, nn.Linear(16, 2)), x, intent="finetune")
```

## Use instead

```python
import torch
from torch import nn
import musigma as ms
from musigma.doctor import Case

x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0)) * 4 + 10
backbone = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU()).requires_grad_(False)
backbone, _ = ms.surgery.recalibrate(backbone, [x])
backbone = ms.nn.FrozenBatchNorm1d.convert(backbone)
case = Case(nn.Sequential(backbone, nn.Linear(16, 2)), x, intent="finetune")
```

## Fix safety

Freezing the statistics makes train mode compute what eval mode computes; the outputs in train mode change
by the gap between the two. `.eval()` on the layer holds until the next `.train()` of the whole model,
which every training loop calls; FrozenBatchNorm holds for good.

## References

Ioffe & Szegedy 2015, "Batch Normalization", section 3.1; Wu & Johnson 2021, "Rethinking 'Batch' in
BatchNorm", section 4 (frozen statistics in training).
"""

from collections.abc import Iterator

from musigma.doctor import _rules
from musigma.doctor._examination import Examination
from musigma.doctor._rules import Symptom
from musigma.doctor.probes._channels import ChannelMeasure
from musigma.doctor.probes._words import counted, modules
from musigma.graph import Parameter


@_rules.rule("NRM314", "frozen-in-train-mode", severity="warning")
def check(exam: Examination) -> Iterator[Symptom]:
    """One symptom for all BatchNorms that are frozen by half."""
    if exam.intent == "inference":  # NRM315 speaks of those
        return
    found: dict[str, dict[str, object]] = {}
    for m in exam.channels:
        names = _affine(m)
        frozen = bool(names) and not any(exam.parameters[n].requires_grad for n in names)
        if m.kind == "batch_norm" and m.own and m.stored is not None and frozen:
            found.setdefault(m.path, _numbers(m))
    if not found:
        return
    moves = max(float(str(n["mean_moves"])) for n in found.values())
    yield Symptom(
        where=tuple(found),
        message=f"{counted(len(found), 'BatchNorm')} with frozen weight and bias still go by the batch: "
        f"{modules(found)}; this batch alone moves their running means by up to {moves:.3g} standard "
        "deviations.",
        evidence={"layers": found},
        fix="freeze the statistics too: musigma.nn.FrozenBatchNorm.convert(module), or module.eval() after "
        "every model.train()",
    )


def _affine(m: ChannelMeasure) -> list[str]:
    sources = (*m.node.arguments.get("weight", ()), *m.node.arguments.get("bias", ()))
    return [s.name for s in sources if isinstance(s, Parameter)]


def _numbers(m: ChannelMeasure) -> dict[str, object]:
    assert m.stored is not None
    step = 1 / (1 + (m.stored.tracked or 0)) if m.stored.momentum is None else m.stored.momentum
    std = (m.batch.var() + m.eps).sqrt()
    return {
        "frozen": _affine(m),
        "momentum": m.stored.momentum,
        "mean_moves": step * float(((m.mean - m.stored.mean.double()).abs() / std).max()),
        "gap": m.gap(),
    }
