"""NRM301 bias-before-norm: a bias that the normalization behind it subtracts again.

## What it does

Follows every bias, element by element, through views, reshapes and poolings to the normalization it ends
in. It fires where all values that share one mean hold one and the same element of the bias, at every use
of the parameter, and the sum goes nowhere else. So it is before BatchNorm and InstanceNorm, before a
GroupNorm with one channel a group, and before a LayerNorm over positions only. A LayerNorm over features
and a GroupNorm with several channels a group subtract the mean of *different* elements, RMSNorm subtracts
none, and a norm that runs on stored statistics subtracts those: there the bias counts, and the rule is
silent. It is silent too where a nonlinearity, a sum with another signal or active dropout stands between.

## Why it hurts

mean(z + b) = mean(z) + b, so (z + b) − mean(z + b) = z − mean(z): the output doesn't depend on b, and the
gradient of b is zero up to rounding. The parameter costs memory, optimizer state and a pass over the
activations, and it drifts by rounding noise or under weight decay. The norm's own bias does its job.

## Example

```python
import torch
from torch import nn
from musigma.doctor import Case

x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
case = Case(model, x, intent="train")
```

## Use instead

```python
import torch
from torch import nn
from musigma.doctor import Case

x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
case = Case(model, x, intent="train")
```

## Fix safety

In train mode the outputs stay the same up to rounding. In eval mode a BatchNorm's running mean has
absorbed the bias, so whoever deletes the bias must subtract it from running_mean;
`musigma.surgery.remove_bias` does, and proves that the outputs stayed. Checkpoints lose the bias's entry.

## References

Ioffe & Szegedy 2015, "Batch Normalization", section 3.2.
"""

from collections.abc import Iterator

from musigma.doctor import _rules
from musigma.doctor._examination import Examination
from musigma.doctor._rules import Symptom
from musigma.doctor.probes._words import called, listed
from musigma.graph import Parameter
from musigma.surgery import CancelledBias


@_rules.rule("NRM301", "bias-before-norm", severity="info")
def check(exam: Examination) -> Iterator[Symptom]:
    """One symptom for all such biases: they have one cause and one cure."""
    if exam.intent == "inference":  # nothing is trained, so nothing is wasted on it
        return
    found = exam.cancelled_biases
    if not found:
        return
    count = sum(exam.parameters[bias.name].numel() for bias in found)
    each = {bias.name: _evidence(exam, bias) for bias in found}
    gradients = [g for bias in found if (g := _largest(exam, bias.name)) is not None]
    weights = [g for bias in found if (g := _largest(exam, _weight(bias))) is not None]
    pairs = listed(f"{bias.name} by {called(bias.norms[0].module)}" for bias in found)
    said = f"; their gradients are at most {max(gradients):.2g}" if gradients else ""
    said += f", where their weights' reach {max(weights):.2g}" if gradients and weights else ""
    yield Symptom(
        where=tuple(bias.name for bias in found),
        message=f"{count} bias values are subtracted again by the normalization behind them: {pairs}{said}.",
        evidence={"wasted": count, "biases": each},
        fix="build these layers with bias=False; the normalization's own bias does the same job",
    )


def _evidence(exam: Examination, bias: CancelledBias) -> dict[str, object]:
    return {
        "norms": [norm.module for norm in bias.norms],
        "size": exam.parameters[bias.name].numel(),
        "gradient": _largest(exam, bias.name),
        "weight_gradient": _largest(exam, _weight(bias)),
    }


def _weight(bias: CancelledBias) -> str | None:
    """The weight of the op that adds the bias."""
    sources = bias.nodes[0].arguments.get("weight", ())
    return sources[0].name if len(sources) == 1 and isinstance(sources[0], Parameter) else None


def _largest(exam: Examination, name: str | None) -> float | None:
    gradient = None if name is None else exam.trace.gradients.get(name)
    return None if gradient is None else float(gradient.abs().max())
