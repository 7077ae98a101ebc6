"""GRD503 non-finite-gradient: the loss is finite, a gradient is not.

## What it does

Follows the gradient backward from the loss and names the op whose own output still got a finite
gradient while what it handed on is NaN or infinite. It speaks only where the activations were finite:
otherwise SIG401 does.

## Why it hurts

One NaN in one gradient is in every weight after the next step of an optimizer with momentum or with a
clipped norm. The usual causes have a finite value and an infinite slope: a square root or a norm at
zero, x/(√v + ε) of a constant row, a `where` whose unused side divides by zero.

## Example

```python
import torch
from torch import nn
from musigma.doctor import Case

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2, bias=False)

    def forward(self, x):
        return self.layer(x).square().sum(-1).sqrt()

x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
x[0] = 0.0  # a row of padding
case = Case(Net(), x)
```

## Use instead

```python
import torch
from torch import nn
from musigma.doctor import Case

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2, bias=False)

    def forward(self, x):
        return (self.layer(x).square().sum(-1) + 1e-6).sqrt()

x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
x[0] = 0.0  # a row of padding
case = Case(Net(), x)
```

## Fix safety

Nothing is mended automatically. Put the epsilon where the slope is infinite (inside the root), and
bound both sides of a `where` before it chooses.

## References

pytorch/pytorch#4132 (a gradient through the unused side of `where`); pyg-team/pytorch_geometric#2917 (ε
outside the root).
"""

from collections.abc import Iterator

import torch

from musigma.doctor import _rules
from musigma.doctor._examination import Examination
from musigma.doctor._rules import Symptom
from musigma.doctor.probes._trace import Trace
from musigma.doctor.probes._words import called
from musigma.graph import Node


@_rules.rule("GRD503", "non-finite-gradient", severity="error")
def check(exam: Examination) -> Iterator[Symptom]:
    """One symptom: where it began, and which parameters got it."""
    trace = exam.trace
    hit = tuple(n for n, g in trace.gradients.items() if g is not None and not bool(torch.isfinite(g).all()))
    forward_is_bad = trace.loss != trace.loss or abs(trace.loss) == float("inf")
    if not hit or forward_is_bad:
        return
    culprit = _culprit(trace, hit)
    named = f"{culprit.op} in {called(culprit.module)}" if culprit else "the loss"
    yield Symptom(
        where=hit,
        message=f"{named} turned a finite gradient into one that is not; {len(hit)} of "
        f"{len(trace.gradients)} parameters got it, at a loss of {trace.loss:.4g}.",
        evidence={
            "op": culprit.op if culprit else None,
            "module": culprit.module if culprit else None,
            "loss": trace.loss,
            "parameters": list(hit),
        },
        fix=f"bound the slope of {named}: put an epsilon inside the root, a clamp before the division",
    )


def _culprit(trace: Trace, hit: tuple[str, ...]) -> Node | None:
    """The latest op with a clean gradient of its own that handed on a bad one; None where the loss did."""
    measured = trace.nodes
    bad = [n for n in measured if n.gradient_nonfinite]
    if not bad:
        return next((n.node for n in reversed(measured) if set(n.node.parameters) & set(hit)), None)
    clean = [
        r for r in trace.graph.consumers(bad[-1].node)
        if measured[r.index].gradient is not None and not measured[r.index].gradient_nonfinite
    ]  # fmt: skip
    return clean[-1] if clean else None
