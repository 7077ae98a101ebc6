"""INI206 signal-explodes: the activations' second moment grows geometrically with depth.

## What it does

In plain stacks (weight layers without normalization or sums between them) it follows E[x²] from the
first layer's input to the last one's output. It fires where that grows by more than three orders of
magnitude and by more than the widths explain by chance; inputs smaller than 1 are taken as 1, since
biases lift them to their own size.

## Why it hurts

Logits of that size make a softmax certain of a guess: the loss starts far above ln C, and squashing
activations sit in their flat parts. In half precision the next layer overflows. The gradient grows by
the same factor.

## Example

```python
import torch
from torch import nn
from musigma.doctor import Case

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
for p in net.parameters():
    nn.init.normal_(p, 0.0, 1.0)
case = Case(net, torch.randn(64, 64, generator=torch.Generator().manual_seed(0)))
```

## Use instead

```python
import torch
from torch import nn
from musigma.doctor import Case

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
for layer in net[::2]:
    nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    nn.init.zeros_(layer.bias)
case = Case(net, torch.randn(64, 64, generator=torch.Generator().manual_seed(0)))
```

## Fix safety

As for INI202.

## References

He, Zhang, Ren & Sun 2015, "Delving deep into rectifiers", section 2.2; Hanin & Rolnick 2018, theorem 5.
"""

import math
from collections.abc import Iterator

from musigma.doctor import _rules
from musigma.doctor._examination import Examination
from musigma.doctor._rules import Symptom
from musigma.doctor.probes._signal import explodes
from musigma.doctor.rules._drifting import drifting

# A standard deviation of a thousand: float16 ends at 65504, and a softmax over such logits is an argmax.
_SEVERE = math.log(1e6)


@_rules.rule("INI206", "signal-explodes", severity="warning")
def check(exam: Examination) -> Iterator[Symptom]:
    """One symptom per plain stack in which the signal explodes."""
    if not exam.fresh:
        return
    for stack in exam.stacks:
        found = explodes(stack)
        if found is not None:
            yield drifting(
                stack,
                found,
                [*(layer.received for layer in stack.layers), stack.layers[-1].produced],
                what="the activations' mean square grows",
                fix="initialize by the activation that follows (He for ReLU), or normalize between layers",
                severe=found.total > _SEVERE,
            )
