"""INI205 signal-vanishes: the activations' second moment falls geometrically with depth.

## What it does

In plain stacks (weight layers without normalization or sums between them) it follows E[x²] of what each
weight layer receives. It fires where that falls by more than four orders of magnitude and by more than
the widths explain by chance: a layer of n units multiplies it by a random factor whose logarithm has
the variance 5/n at most. Small output layers are left out; they are small on purpose.

## Why it hurts

What a layer receives is what its weights' gradient is multiplied by, and what comes out is added to
biases that don't shrink: soon the outputs don't depend on the inputs any more. Xavier's variance under
a ReLU loses half of it a layer, torch's default five sixths.

## Example

```python
import torch
from torch import nn
from musigma.doctor import Case

torch.manual_seed(0)
layers = [m for _ in range(30) for m in (nn.Linear(64, 64, bias=False), nn.ReLU())]
for layer in layers[::2]:
    nn.init.xavier_normal_(layer.weight)
case = Case(nn.Sequential(*layers), torch.randn(64, 64, generator=torch.Generator().manual_seed(0)))
```

## Use instead

```python
import torch
from torch import nn
from musigma.doctor import Case

torch.manual_seed(0)
layers = [m for _ in range(30) for m in (nn.Linear(64, 64, bias=False), nn.ReLU())]
for layer in layers[::2]:
    nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
case = Case(nn.Sequential(*layers), torch.randn(64, 64, generator=torch.Generator().manual_seed(0)))
```

## Fix safety

As for INI202. Where the gains are right and the signal vanishes all the same (an activation without a
stable scale, dropout without rescaling), normalization layers or residual connections hold it; that
changes the model and isn't done automatically.

## References

Glorot & Bengio 2010, section 4.2; Hanin & Rolnick 2018, "How to start training: the effect of
initialization and architecture", theorem 5 (the fluctuation).
"""

import math
from collections.abc import Iterator

from musigma.doctor import _rules
from musigma.doctor._examination import Examination
from musigma.doctor._rules import Symptom
from musigma.doctor.probes._signal import vanishes
from musigma.doctor.rules._drifting import drifting

# A thousandth in the standard deviation: float32 keeps four of its seven digits beside a bias of order one.
_SEVERE = math.log(1e-6)


@_rules.rule("INI205", "signal-vanishes", severity="warning")
def check(exam: Examination) -> Iterator[Symptom]:
    """One symptom per plain stack in which the signal vanishes."""
    if not exam.fresh:
        return
    for stack in exam.stacks:
        found = vanishes(stack)
        if found is not None:
            yield drifting(
                stack,
                found,
                [layer.received for layer in stack.layers],
                what="the activations' mean square falls",
                fix="initialize by the activation that follows (He for ReLU), or normalize between layers",
                severe=found.total < _SEVERE,
            )
