"""NRM326 impossible-running-stats: a running statistic that is NaN or infinite, or a variance below zero.

## What it does

Looks at every buffer that serves as a running mean or a running variance, by module or in a function call,
and names those with values that no data can have, with their channels.

## Why it hurts

One batch with an infinite activation, which a gradient scaler skips, leaves its mark in the running
average for good: inf and NaN survive every later update. A negative variance (some loaders subtract ε from
stored ones) makes √(var + ε) NaN. Training shows nothing, since it normalizes by the batch; eval mode
gives NaN in that channel.

## Example

```python
import torch
from torch import nn
from musigma.doctor import Case

x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
model = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 2))
poisoned = x.clone()
poisoned[0, 1] = float("inf")
model(poisoned)
case = Case(model, x, intent="train")
```

## Use instead

```python
import torch
from torch import nn
import musigma as ms
from musigma.doctor import Case

x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
model = nn.Sequential(ms.nn.BatchNorm1d(8), nn.Linear(8, 2))
poisoned = x.clone()
poisoned[0, 1] = float("inf")
model(poisoned)
case = Case(model, x, intent="train")
```

## Fix safety

What the channel's statistics were is lost; recalibrating on training data takes them anew and touches no
weight. musigma's BatchNorms skip the update of a channel whose batch statistics are not finite, and refuse
to load a negative variance. A variance of 0, or a tiny one, is possible and fine: ε is there for it.

## References

Micikevicius et al. 2018, "Mixed Precision Training", section 3.2 (batches that are skipped).
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from musigma.doctor import _rules
from musigma.doctor._examination import Examination
from musigma.doctor._rules import Symptom
from musigma.doctor.probes._words import listed


@_rules.rule("NRM326", "impossible-running-stats", severity="error", on_failure=True)
def check(exam: Examination) -> Iterator[Symptom]:
    """One symptom per buffer."""
    for name, (role, values) in _statistics(exam).items():
        bad = ~torch.isfinite(values)
        negative = (values < 0) & ~bad if role == "running_var" else torch.zeros_like(bad)
        if not (bad | negative).any():
            continue
        channels = (bad | negative).flatten().nonzero().flatten().tolist()
        what = [
            f"{int(count.sum())} {kind}"
            for kind, count in (("NaN", values.isnan()), ("infinite", values.isinf()), ("negative", negative))
            if count.any()
        ]
        yield Symptom(
            where=(name,),
            message=f"{name} holds {' and '.join(what)} of {values.numel()} values; channels "
            f"{listed(channels)}.",
            evidence={
                "channels": channels,
                "nan": int(values.isnan().sum()),
                "infinite": int(values.isinf().sum()),
                "negative": int(negative.sum()),
                "lowest": float(values[negative].min()) if negative.any() else None,
                "dtype": str(values.dtype).removeprefix("torch."),
            },
            fix="recalibrate (musigma.surgery.recalibrate) or load sound statistics; musigma.nn's BatchNorms "
            "skip the update of a channel that overflowed",
        )


def _statistics(exam: Examination) -> Mapping[str, tuple[str, Tensor]]:
    """Buffer name -> its role and values: by the buffers' own names, and by what norm calls were handed."""
    found = {
        name: (name.rpartition(".")[2], buffer)
        for name, buffer in exam.model.named_buffers()
        if name.rpartition(".")[2] in ("running_mean", "running_var") and buffer.is_floating_point()
    }
    if exam.failure is None:
        for m in exam.channels:
            names = () if m.stored is None else m.stored.names
            if m.stored is not None and len(names) == 2:
                found.setdefault(names[0], ("running_mean", m.stored.mean))
                found.setdefault(names[1], ("running_var", m.stored.var))
    return {name: (role, values.detach()) for name, (role, values) in found.items() if not values.is_meta}
