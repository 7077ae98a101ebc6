"""GRD502 gradient-explodes: the gradient grows geometrically on its way back through the layers.

## What it does

As GRD501, where the norm of the gradient with respect to the layers' outputs grows a hundredfold from
the last hidden layer back to the first, and by more than the widths explain by chance.

## Why it hurts

The learning rate must be small enough for the first layers, and then the last ones stand still; with
clipping the first layers take up the whole of the norm that is allowed. Deep stacks with BatchNorm and
no skip connections do this by themselves: the squared norm grows by π/(π − 1) a layer.

## Example

```python
import torch
from torch import nn
from musigma.doctor import Case

torch.manual_seed(0)
layers = [m for _ in range(12) for m in (nn.Linear(64, 64), nn.ReLU())]
for layer in layers[::2]:
    nn.init.normal_(layer.weight, std=0.3)
case = Case(nn.Sequential(*layers), torch.randn(64, 64, generator=torch.Generator().manual_seed(0)))
```

## Use instead

```python
import torch
from torch import nn
from musigma.doctor import Case

torch.manual_seed(0)
layers = [m for _ in range(12) for m in (nn.Linear(64, 64), nn.ReLU())]
for layer in layers[::2]:
    nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    nn.init.zeros_(layer.bias)
case = Case(nn.Sequential(*layers), torch.randn(64, 64, generator=torch.Generator().manual_seed(0)))
```

## Fix safety

As for GRD501.

## References

Yang et al. 2019, "A mean field theory of batch normalization", theorem 3.1; Bengio, Simard & Frasconi
1994.
"""

import math
from collections.abc import Iterator

from musigma.doctor import _rules
from musigma.doctor._examination import Examination
from musigma.doctor._rules import Symptom
from musigma.doctor.probes._backward import backward_drift
from musigma.doctor.probes._stacks import find_stacks
from musigma.doctor.rules._drifting import drifting

# A hundred times the norm: at the largest stable rate the last layers move by a hundredth of what they could.
_LIMIT = 2 * math.log(1e2)
# Beyond it float32 holds nothing of the last layers' part in a common norm.
_SEVERE = 2 * math.log(1e7)


@_rules.rule("GRD502", "gradient-explodes", severity="warning")
def check(exam: Examination) -> Iterator[Symptom]:
    """One symptom per stack in which the gradient explodes."""
    if exam.intent == "inference":
        return
    for stack in find_stacks(exam.graph, exam.trace.layers, through_norms=True):
        found = backward_drift(exam.trace, stack)
        if found is not None and found.drift.significant and found.drift.total > _LIMIT:
            yield drifting(
                found.stack,
                found.drift,
                found.norms,
                what="the gradient's squared norm grows",
                fix="initialize by the activation that follows, lower the gain, or add residual connections",
                severe=found.drift.total > _SEVERE,
                backward=True,
            )
