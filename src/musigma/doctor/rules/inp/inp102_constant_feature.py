"""INP102 constant-feature: features that don't vary.

## What it does

Counts the features (the channels of an image) that have one value in the whole batch where they reach
the first layer with weights. Constant means equal up to the rounding of the data type, whatever the
scale: a feature in units of 1e-12 that varies is not constant. A batch so small that one of its features
would have one value by chance, if every one of them were a fair coin, shows nothing, and the rule is silent.

## Why it hurts

It carries no information; its weights act as a second bias and cost memory and time. Divided by its
standard deviation it becomes NaN, or is blown up as soon as it does vary, so whoever standardizes must
know about it.

## Example

```python
import torch
from torch import nn
from musigma.doctor import Case

x = torch.randn(256, 4, generator=torch.Generator().manual_seed(0))
x[:, 2] = 0.5
case = Case(nn.Linear(4, 2), x)
```

## Use instead

```python
import torch
from torch import nn
from musigma.doctor import Case

x = torch.randn(256, 4, generator=torch.Generator().manual_seed(0))
varying = [0, 1, 3]
case = Case(nn.Linear(3, 2), x[:, varying])
```

## Fix safety

It only wastes, so it is `info`. A feature that is constant in a batch may be rare rather than constant:
over n examples another value with a frequency below 3/n is missed with a probability of 5 %. Look at
the whole data set before you drop one. `musigma.inputs.Standardizer` gives constant features the scale
1.

## References

Chan, Golub & LeVeque 1983, "Algorithms for computing the sample variance" (the error bound that
decides).
"""

from collections.abc import Iterator

from musigma.doctor import _rules
from musigma.doctor._examination import Examination
from musigma.doctor._rules import Symptom

# A fair coin gives n equal values with the probability 2^(1 − n). Of ten such batches, one may hold a feature
# that is constant by chance.
_CHANCE = 0.1


@_rules.rule("INP102", "constant-feature", severity="info")
def check(exam: Examination) -> Iterator[Symptom]:
    """One symptom per first weight layer that receives constant features."""
    for entry in exam.trace.entries:
        # Behind a norm a constant feature is 0 and no longer the data's.
        constant = ~entry.varies
        if entry.normalized or len(constant) * 2.0 ** (1 - entry.examples) > _CHANCE:
            continue
        if not constant.any():
            continue
        names = constant.nonzero().flatten().tolist()
        listed = ", ".join(map(str, names[:8])) + (", …" if len(names) > 8 else "")
        yield Symptom(
            where=entry.inputs,
            message=f"{len(names)} of {len(constant)} features have one value in all {entry.examples} "
            f"examples: {listed}.",
            evidence={"features": len(constant), "constant": names, "examples": entry.examples},
            fix="drop them if they are constant in the whole data set; Standardizer gives them the scale 1",
        )
