"""GRD501 gradient-vanishes: the gradient falls geometrically on its way back through the layers.

## What it does

Follows the norm of the loss's gradient with respect to every weight layer's output, from the last
hidden layer back to the first, along stacks of weight layers that no sum interrupts; normalization
layers may stand between. It fires where the norm falls a thousandfold and by more than the widths
explain by chance. The scale of the output layer doesn't matter: it multiplies all of them.

## Why it hurts

One learning rate serves all layers. Where the first layers' gradient is a thousandth of the last ones',
they stay as they were drawn while the last ones learn to make do with them.

## Example

```python
import torch
from torch import nn
from musigma.doctor import Case

torch.manual_seed(0)
layers = [m for _ in range(12) for m in (nn.Linear(64, 64), nn.Sigmoid())]
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

Where weights of the wrong scale cause it (INI202 says so) the treatment of that finding mends this one
too. Otherwise another activation, normalization layers or residual connections do: that changes the
model and isn't done automatically.

## References

Hochreiter 1991; Bengio, Simard & Frasconi 1994; Glorot & Bengio 2010, section 4.2.2.
"""

import math
from collections.abc import Iterator

from musigma.doctor import _rules
from musigma.doctor._examination import Examination
from musigma.doctor._rules import Symptom
from musigma.doctor.probes._backward import backward_drift
from musigma.doctor.probes._stacks import find_stacks
from musigma.doctor.rules._drifting import drifting

# A thousandth of the norm: what the last layer learns in one epoch takes the first one a thousand. Healthy
# stacks stay far from it: a Gaussian ReLU net of 50 layers and width 512 spreads by a factor of about 2.
_LIMIT = 2 * math.log(1e-3)
# A step of that size is below float32's rounding of weights of the usual size.
_SEVERE = 2 * math.log(1e-7)


@_rules.rule("GRD501", "gradient-vanishes", severity="warning")
def check(exam: Examination) -> Iterator[Symptom]:
    """One symptom per stack in which the gradient vanishes."""
    if exam.intent == "inference":
        return
    for stack in find_stacks(exam.graph, exam.trace.layers, through_norms=True):
        found = backward_drift(exam.trace, stack)
        if found is not None and found.drift.significant and found.drift.total < _LIMIT:
            yield drifting(
                found.stack,
                found.drift,
                found.norms,
                what="the gradient's squared norm falls",
                fix="initialize by the activation that follows, or add normalization or residual connections",
                severe=found.drift.total < _SEVERE,
                backward=True,
            )
