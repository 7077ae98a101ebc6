"""INP103 non-finite-input: NaN or infinity in the data.

## What it does

Looks at every tensor of the batch, targets included, for values that are NaN or infinite, and says how
many there are and where the first one stands.

## Why it hurts

One NaN reaches every unit of the first layer, every statistic of a normalization layer and, through the
loss, every weight. A running mean that has met one stays NaN for good, so the harm outlives the batch.

## Example

```python
import torch
from torch import nn
from musigma.doctor import Case

x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
x[3, 1] = float("nan")
case = Case(nn.Linear(4, 2), x)
```

## Use instead

```python
import torch
from torch import nn
from musigma.doctor import Case

x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
case = Case(nn.Linear(4, 2), x)
```

## Fix safety

Nothing is mended automatically: whether a missing value is to be dropped, replaced or given a column of
its own is a decision about the data. `musigma.inputs.Standardizer` leaves NaN out of its statistics and
passes it on.

## References

Goldberg 1991, "What every computer scientist should know about floating-point arithmetic", section 2.2.
"""

from collections.abc import Iterator

from musigma.doctor import _rules
from musigma.doctor._examination import Examination
from musigma.doctor._rules import Symptom


@_rules.rule("INP103", "non-finite-input", severity="error", on_failure=True)
def check(exam: Examination) -> Iterator[Symptom]:
    """One symptom per tensor that holds a value which is not finite."""
    for m in exam.data:
        if m.first_nonfinite is None:
            continue
        what = " and ".join(f"{n} {kind}" for n, kind in ((m.nan, "NaN"), (m.inf, "infinite")) if n)
        yield Symptom(
            where=(m.name,),
            message=f"{m.name} {m.shape} holds {what} values; the first stands at {list(m.first_nonfinite)}.",
            evidence={"nan": m.nan, "inf": m.inf, "first": list(m.first_nonfinite), "shape": list(m.shape)},
            fix="drop or replace these values before the model sees them",
        )
