"""INI210 loss-at-init: the first loss is far above what a net that knows nothing should have.

## What it does

Recognises the given loss by its value on the batch as a plain cross entropy, a binary one, or a mean
squared error, and compares it with what ignorance costs: ln C for C classes, ln 2, or the variance of
the targets. Logits of variance s² cost s²/2 above ln C, and a head with He's variance has s² = 2: the
rule fires from 2 above on (s² > 4), or where a squared error exceeds ten times the variance, beyond the
batch's sampling error. Weighted, smoothed, contrastive and summed losses aren't recognised, and it
stays silent; a loss below chance is no fault.

## Why it hurts

A net that is confident at random has to unlearn that first: the first hundred steps shrink the logits,
with gradients that push all examples the same way, and a learning rate that suits the rest is too large
for them. For a regression it means that the outputs' offset or scale is not the targets'.

## Example

```python
import torch
from torch import nn
from musigma.doctor import Case

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 27))
nn.init.normal_(net[2].weight)
x = torch.randn(270, 16, generator=torch.Generator().manual_seed(0))
case = Case(net, x, torch.arange(270) % 27, loss=nn.CrossEntropyLoss())
```

## Use instead

```python
import torch
from torch import nn
from musigma.doctor import Case

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 27))
nn.init.normal_(net[2].weight, std=0.01)
nn.init.zeros_(net[2].bias)
x = torch.randn(270, 16, generator=torch.Generator().manual_seed(0))
case = Case(net, x, torch.arange(270) % 27, loss=nn.CrossEntropyLoss())
```

## Fix safety

The treatment shrinks the last layer's weights until the loss is within reach of chance; the net can
represent what it could before. Not for a trained model, whose head means something. Targets are not
touched: standardize them where the error is theirs.

## References

Karpathy 2022, "Building makemore part 3" (27 characters, a loss of 27 instead of 3.3).
"""

from collections.abc import Iterator

from musigma.doctor import _rules
from musigma.doctor._examination import Examination
from musigma.doctor._rules import Symptom
from musigma.doctor.probes._losses import Chance

# s²/2 for logits of variance s² = 4, twice what a head with He's variance has.
_EXCESS = 2.0
# Outputs of variance 1 beside standardized targets give 2; an offset of three standard deviations gives 10.
_RATIO = 10.0
_SIGMAS = 3.0


@_rules.rule("INI210", "loss-at-init", severity="warning", needs=("loss", "targets"))
def check(exam: Examination) -> Iterator[Symptom]:
    """One symptom for the model."""
    chance, loss = exam.chance, exam.trace.loss
    if exam.intent == "inference" or chance is None:
        return
    limit = _RATIO * chance.value if chance.kind == "mean_squared_error" else chance.value + _EXCESS
    if not loss - _SIGMAS * chance.error > limit:
        return
    heads = tuple(str(s.layers[-1].weight) for s in exam.stacks if s.head and s.layers[-1].weight is not None)
    yield Symptom(
        where=heads or ("",),
        message=f"the loss starts at {loss:.4g}, and {_known(chance)}.",
        evidence={
            "loss": loss,
            "chance": chance.value,
            "kind": chance.kind,
            "classes": chance.classes,
            "standard_error": chance.error,
            "output_second_moments": [s.layers[-1].produced for s in exam.stacks if s.head],
        },
        fix="draw the last layer with LeCun's variance, or start it at 0; biases at 0"
        if chance.classes
        else "standardize the targets, or set the output bias to their mean and start the last layer small",
    )


def _known(chance: Chance) -> str:
    if chance.kind == "mean_squared_error":
        return f"answering the targets' mean would cost their variance, {chance.value:.4g}"
    return f"a uniform guess over {chance.classes} classes costs ln {chance.classes} = {chance.value:.4g}"
