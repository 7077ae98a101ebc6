"""NRM309 half-running-stats: running statistics in float16 or bfloat16, which stop moving or overflow.

## What it does

Looks for running statistics in a half type. They stop moving where an update is below half a unit in the
last place, so the rule fires wherever they are updated:

    momentum · |batch − running| < eps/2 · 2^⌊log₂ running⌋

In eval mode nothing moves; there it fires only where the type has done harm: a variance above 65504 that
became infinite, one below 6e-8 that became 0, or a mean whose rounding is more than a twentieth of its
standard deviation.

## Why it hurts

With bfloat16 (8 bits) and momentum 0.1 a running value can stay wrong by 4 %, with momentum 0.001 by 400
%: a variance that should be 4 stays at 2 for good. Only eval mode shows it. In float16 an infinite
variance makes its channel silently zero.

## Example

```python
import torch
from torch import nn
from musigma.doctor import Case

x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
case = Case(model.bfloat16(), x, intent="train")
```

## Use instead

```python
import torch
from torch import nn
import musigma as ms
from musigma.doctor import Case

x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
model = nn.Sequential(nn.Linear(8, 16, bias=False), ms.nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
case = Case(model.bfloat16(), x, intent="train")
```

## Fix safety

Statistics in float32 cost a few bytes a channel. musigma's layers keep them so under `.half()`,
`.bfloat16()` and `.to(dtype)`. torch's BatchNorm takes them for half-precision inputs as long as its weight
and bias are float32 too (`norm.float()`); beside half weights its kernels refuse them. What the half type
has lost must be taken again: recalibrate.

## References

Micikevicius et al. 2018, "Mixed Precision Training", section 3.1.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from musigma.doctor import _rules
from musigma.doctor._examination import Examination
from musigma.doctor._rules import Symptom
from musigma.doctor.probes._channels import ChannelMeasure, Stored
from musigma.doctor.probes._words import called, counted, modules

_HALF = (torch.float16, torch.bfloat16)
# A rounded mean shifts every normalized value by as much: σ/20 is a tenth of the lag that NRM304 forgives.
_ROUNDED = 0.05


@_rules.rule("NRM309", "half-running-stats", severity="warning")
def check(exam: Examination) -> Iterator[Symptom]:
    """One symptom for all layers whose statistics are of a half type and move, or were harmed by it."""
    found: dict[str, dict[str, object]] = {}
    harmed = False
    for m in exam.channels:
        stored = m.stored
        if stored is None or not {stored.mean.dtype, stored.var.dtype} & set(_HALF):
            continue
        numbers = _numbers(m, stored)
        hurt = any(numbers[key] for key in ("infinite", "vanished", "rounded"))
        moves = m.own and stored.momentum != 0 and exam.intent != "inference"
        if hurt or moves:
            found.setdefault(m.path, numbers)
            harmed |= hurt
    if found:
        yield _symptom(found, harmed)


def stuck_distance(value: Tensor, momentum: float) -> Tensor:
    """How far a running value may be from the batch's without moving: ulp/2 over the momentum."""
    eps, tiny = torch.finfo(value.dtype).eps, torch.finfo(value.dtype).tiny
    # frexp gives value = m·2^e with m in [½, 1): the unit in the last place is eps·2^(e − 1).
    exponent = value.double().abs().clamp_min(tiny).frexp().exponent
    return eps / 2 * torch.ldexp(torch.ones_like(exponent, dtype=torch.float64), exponent - 1) / momentum


def _numbers(m: ChannelMeasure, stored: Stored) -> dict[str, object]:
    momentum = 1 / (1 + (stored.tracked or 0)) if stored.momentum is None else stored.momentum
    std = m.batch.std()
    rounding = torch.finfo(stored.mean.dtype).eps / 2 * stored.mean.double().abs()
    numbers: dict[str, object] = {
        "dtype": str(stored.var.dtype).removeprefix("torch."),
        "momentum": stored.momentum,
        "infinite": int(stored.var.isinf().sum() + stored.mean.isinf().sum()),
        "vanished": int(((stored.var == 0) & (m.batch.var() > 0)).sum()),
        "rounded": int(((rounding > _ROUNDED * std) & (std > 0)).sum()),
    }
    if momentum > 0:
        numbers["stuck_var"] = float((stuck_distance(stored.var, momentum) / stored.var.double()).nanmedian())
        apart = (m.var - stored.var.double()).abs()
        numbers["stuck_channels"] = int((apart < stuck_distance(stored.var, momentum)).sum())
    return numbers


def _symptom(found: dict[str, dict[str, object]], harmed: bool) -> Symptom:
    path, first = next(iter(found.items()))
    said = f"the running statistics of {counted(len(found), 'layer')} are {first['dtype']}: {modules(found)}"
    if "stuck_var" in first:
        said += (
            f"; at momentum {first['momentum']} the variance of {called(path)} doesn't move while it is "
            f"within {first['stuck_var']:.1%} of the batch's"
        )
    for key, what in (
        ("infinite", "are infinite"),
        ("vanished", "have become 0"),
        ("rounded", "are rounded by more than σ/20"),
    ):
        total = sum(int(str(n[key])) for n in found.values())
        said += f"; {total} {what}" if total else ""
    return Symptom(
        where=tuple(found),
        message=said + ".",
        evidence={"layers": found},
        fix="keep the whole layer in float32 (norm.float()), or use musigma.nn's layers, whose statistics "
        "stay float32, and recalibrate",
        severity="error" if harmed else None,
    )
