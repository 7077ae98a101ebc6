"""INI216 small-head: the last layer starts so small that hardly any gradient reaches the layers before it.

## What it does

Looks at the layers that make the output, with other trainable layers before them and no normalization
behind. It fires where Var(W)·fan_in is below 1/100 and not 0. LeCun's variance has 1; torch's default
1/3; std 0.02 has 0.3 at fan_in 768; std 0.01 has 0.13 at fan_in 1280 and 0.0064 at fan_in 64. A head of
zeros is a choice and doesn't fire, nor does one that is tied to an embedding.

## Why it hurts

The gradient of everything before the last layer passes through its weights, so it arrives at
√(Var(W)·fan_in) times the size that LeCun's variance gives: less than a tenth here. Until the last
layer has grown, little else learns. A smaller output does start the loss at what ignorance costs, but
LeCun's variance already does so within half a unit, since logits of variance s² cost about s²/2 above
ln C.

## Example

```python
import torch
from torch import nn
from musigma.doctor import Case

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 10))
nn.init.normal_(net[2].weight, std=0.005)
case = Case(net, torch.randn(128, 16))
```

## Use instead

```python
import torch
from torch import nn
import musigma as ms
from musigma.doctor import Case

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 10))
ms.init.lecun_normal_(net[2].weight)
case = Case(net, torch.randn(128, 16))
```

## Fix safety

The treatment draws the last layer anew with LeCun's variance and sets its bias to 0: safe before
training, and never applied to weights that were trained. A policy or value head may be meant to start
small; then leave it.

## References

LeCun, Bottou, Orr & Müller 1998, "Efficient BackProp", section 4.6.
"""

from collections.abc import Iterator

from musigma.doctor import _rules
from musigma.doctor._examination import Examination
from musigma.doctor._rules import Symptom
from musigma.doctor.probes._layers import LayerMeasure

# A tenth of the gradient. Measured on digits (64-128-64-10 with BatchNorm, SGD at rate 0.1, median of five
# seeds), a head with Var(W)·fan_in = 0.0064 needs 43 steps to 95 %, LeCun's 18 and a sixteenth of that 23.
_LIMIT = 0.01


@_rules.rule("INI216", "small-head", severity="info")
def check(exam: Examination) -> Iterator[Symptom]:
    """One symptom per output layer."""
    if not exam.fresh:
        return
    for stack in exam.stacks:
        head = stack.layers[-1]
        if stack.head and _throttles(exam, head):
            yield _symptom(head)


def _throttles(exam: Examination, head: LayerMeasure) -> bool:
    if head.weight is None or not 0 < head.gain_squared < _LIMIT:
        return False
    if exam.graph.norm_after(head.weight, only=False) is not None:
        return False
    tied = len([n for n in exam.graph.nodes if head.weight in n.parameters]) > 1
    below = any(
        layer.node.index < head.node.index and layer.weight is not None for layer in exam.trace.layers
    )
    return below and not tied


def _symptom(head: LayerMeasure) -> Symptom:
    share = head.gain_squared**0.5
    return Symptom(
        where=(str(head.weight),),
        message=f"{head.weight} has std {float(head.weights.std()):.2g}, where LeCun's variance has "
        f"{head.fan_in**-0.5:.2g}: the layers before it start with {share:.1%} of their gradient.",
        evidence={
            "std": float(head.weights.std()),
            "lecun_std": head.fan_in**-0.5,
            "var_times_fan_in": head.gain_squared,
            "gradient_share": share,
            "output_second_moment": head.produced,
        },
        fix="draw it with musigma.init.lecun_normal_",
    )
