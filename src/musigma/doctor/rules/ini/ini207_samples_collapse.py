"""INI207 samples-collapse: the activations keep a healthy size but no longer differ between examples.

## What it does

Splits what each weight layer of a plain stack receives into the part that is common to all examples and
the part that tells them apart, and compares the second with what a critical ReLU stack of the same
depth would keep from the same start. It fires where less than 1e-4 of the second moment is left and
less than a hundredth of the critical share. Healthy deep nets make examples alike too, but only as a
power of the depth.

## Why it hurts

The standard deviation over all values looks right, because the biases hold it up: twenty layers with
torch's default keep 0.028 of it, while the standard deviation between examples is 1e-12. The output is
the same for every input, and the gradient that should tell inputs apart cancels in the batch mean.

## Example

```python
import torch
from torch import nn
from musigma.doctor import Case

torch.manual_seed(0)
layers = [m for _ in range(20) for m in (nn.Linear(64, 64), nn.ReLU())]
case = Case(nn.Sequential(*layers), torch.randn(64, 64, generator=torch.Generator().manual_seed(0)))
```

## Use instead

```python
import torch
from torch import nn
from musigma.doctor import Case

torch.manual_seed(0)
layers = [m for _ in range(20) for m in (nn.Linear(64, 64), nn.ReLU())]
for layer in layers[::2]:
    nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    nn.init.zeros_(layer.bias)
case = Case(nn.Sequential(*layers), torch.randn(64, 64, generator=torch.Generator().manual_seed(0)))
```

## Fix safety

As for INI202: weights by the activation that follows, biases 0.

## References

Poole et al. 2016, "Exponential expressivity in deep neural networks through transient chaos", section
3; Schoenholz et al. 2017, "Deep information propagation", eq. 9; Cho & Saul 2009, eq. 6.
"""

from collections.abc import Iterator

from musigma.doctor import _rules
from musigma.doctor._examination import Examination
from musigma.doctor._rules import Symptom
from musigma.doctor.probes._signal import collapse_of

# Between-example std over rms at a few roundings of float32: the output is one number for all examples.
_SEVERE = 1e-12


@_rules.rule("INI207", "samples-collapse", severity="warning")
def check(exam: Examination) -> Iterator[Symptom]:
    """One symptom per plain stack in which examples become alike."""
    if not exam.fresh:
        return
    for stack in exam.stacks:
        found = collapse_of(stack, exam.batch)
        if found is None:
            continue
        layer = stack.layers[found.depth]
        name = layer.node.module or f"layer {found.depth}"
        yield Symptom(
            where=tuple(one.weight for one in stack.layers if one.weight is not None),
            message=f"what differs between examples is {found.share**0.5:.2g} of the activations' rms "
            f"({found.std:.3g}) where {name} receives them, {found.depth} layers in, and "
            f"{found.last**0.5:.2g} at the end of the stack; a critical net would keep "
            f"{found.critical**0.5:.2g} at that depth.",
            evidence={
                "depth": found.depth,
                "layer": layer.node.module,
                "rms": found.std,
                "between_over_rms": found.share**0.5,
                "critical_between_over_rms": found.critical**0.5,
                "start_between_over_rms": found.start**0.5,
                "last_between_over_rms": found.last**0.5,
            },
            fix="initialize by the activation that follows, with zero biases, or normalize between layers",
            severity="error" if found.last < _SEVERE else None,
        )
