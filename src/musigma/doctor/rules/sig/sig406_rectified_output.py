"""SIG406 rectified-output: a ReLU after the last weight layer keeps outputs from going where the loss
wants them.

## What it does

Looks at what the model returns. Where a rectifier makes it from the last weight layer, the rule fires
if the loss is a cross entropy on logits (which have no reason to be positive), if a regression target
is negative (no output can reach it), or if some output is zero for every example of the batch.

## Why it hurts

An output that is off gets no gradient, so it can't be pulled back; with few outputs the whole model is
easily dead from the start. 5-8-1 nets with a ReLU at the end are, for one seed in three. Logits that
can't go below zero can't say that a class is unlikely: the classes that are off share the same
probability.

## Example

```python
import torch
from torch import nn
from musigma.doctor import Case

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3), nn.ReLU())
x = torch.randn(64, 5, generator=torch.Generator().manual_seed(0))
case = Case(net, x, torch.arange(64) % 3, loss=nn.CrossEntropyLoss())
```

## Use instead

```python
import torch
from torch import nn
from musigma.doctor import Case

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
x = torch.randn(64, 5, generator=torch.Generator().manual_seed(0))
case = Case(net, x, torch.arange(64) % 3, loss=nn.CrossEntropyLoss())
```

## Fix safety

Nothing is mended automatically: the rectifier is part of the model. For outputs that must be positive
use softplus or an exponential, whose gradient never is zero.

## References

Lu, Shin, Su & Karniadakis 2020, "Dying ReLU and initialization", section 3.
"""

from collections.abc import Iterator

from musigma.doctor import _rules
from musigma.doctor._examination import Examination
from musigma.doctor._rules import Symptom
from musigma.doctor.probes._nodes import NodeMeasure
from musigma.doctor.probes._stacks import Link
from musigma.doctor.probes._words import called
from musigma.graph import Edge, kinds


@_rules.rule("SIG406", "rectified-output", severity="warning", needs=("loss", "targets"))
def check(exam: Examination) -> Iterator[Symptom]:
    """One symptom per output that a rectifier makes directly from the last weight layer."""
    if exam.intent == "inference":
        return
    returned = {int(source) for source in exam.graph.output if isinstance(source, Edge)}
    for stack in exam.stacks:
        link = stack.links[-1]
        last = link.after[-1] if link.after else None
        if not stack.head or last is None or last.index not in returned:
            continue
        rectifier = next((n for n in link.after if exam.trace.nodes[n.index].rectifies), None)
        only_views = all(n is rectifier or n.op in kinds.VIEWS for n in link.after)
        if rectifier is None or not only_views:
            continue
        measure = exam.trace.nodes[rectifier.index]
        reason = _reason(exam, measure)
        if reason is not None:
            yield _symptom(measure, link, reason)


def _reason(exam: Examination, measure: NodeMeasure) -> str | None:
    chance = exam.chance
    if chance is not None and chance.classes:
        return "logits of a cross entropy need to be negative as well"
    targets = next((m for m in exam.data if m.name == "targets"), None)
    if chance is not None and targets is not None and targets.low < 0:
        return f"targets go down to {targets.low:.4g}, where no output can follow"
    if measure.dead is not None and bool(measure.dead.any()):
        return "an output that is off for every example gets no gradient"
    return None


def _symptom(measure: NodeMeasure, link: Link, reason: str) -> Symptom:
    node = measure.node
    dead = 0 if measure.dead is None else int(measure.dead.sum())
    units = link.layer.units
    layer = called(link.layer.node.module, root="the last weight layer")
    return Symptom(
        where=(node.module,),
        message=f"{node.op} follows {layer} and makes the output: {measure.zeros:.0%} of it is zero, {dead} "
        f"of {units} units for every example; {reason}.",
        evidence={"op": node.op, "layer": layer, "zeros": measure.zeros, "dead": dead, "units": units},
        fix="take the rectifier off the output (softplus, where it must stay positive)",
    )
