"""SIG401 non-finite-activation: an op makes NaN or infinity out of finite numbers.

## What it does

Finds the op that made the first values that are not finite, among those that reach the model's output
or its loss, from arguments that all were. An infinity that is put in on purpose and disappears again
(the −inf of an attention mask) is no finding; a row that is masked completely is, at the softmax that
turns it into NaN. Where a parameter itself isn't finite, the op that reads it is named with the
parameter.

## Why it hurts

The loss becomes NaN, every gradient with it, and one optimizer step later every weight. By then the
place where it began can't be seen any more.

## Example

```python
import torch
from torch import nn
from musigma.doctor import Case

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        return torch.log(self.layer(x))

case = Case(Net(), torch.randn(64, 4, generator=torch.Generator().manual_seed(0)))
```

## Use instead

```python
import torch
from torch import nn
from musigma.doctor import Case

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        return torch.log(nn.functional.softplus(self.layer(x)) + 1e-6)

case = Case(Net(), torch.randn(64, 4, generator=torch.Generator().manual_seed(0)))
```

## Fix safety

Nothing is mended automatically. Compute in a wider type, bound the argument (add the epsilon inside the
root, subtract the maximum before the exponential), or use the function that does it: `log_softmax`,
`logsumexp`, `softplus`, `logaddexp`.

## References

Goldberg 1991, "What every computer scientist should know about floating-point arithmetic", section 2.2.
"""

import math
from collections.abc import Iterator

import torch

from musigma.doctor import _rules
from musigma.doctor._examination import Examination
from musigma.doctor._rules import Symptom
from musigma.doctor.probes import _calls
from musigma.doctor.probes._nodes import NodeMeasure
from musigma.doctor.probes._words import called
from musigma.graph import Edge

# They put an infinity where the caller asked for one.
_MASKING = frozenset(
    ("masked_fill", "where", "full", "fill", "full_like", "new_full", "setitem", "triu", "tril")
)


@_rules.rule("SIG401", "non-finite-activation", severity="error")
def check(exam: Examination) -> Iterator[Symptom]:
    """One symptom: the op that made the first one."""
    if any(m.first_nonfinite is not None for m in exam.data):
        return  # INP103 has said where it entered
    output_is_bad = any(not bool(torch.isfinite(t).all()) for t in _calls.floating_outputs(exam.trace.output))
    loss_is_bad = exam.trace.loss_source != "none" and not math.isfinite(exam.trace.loss)
    if not (output_is_bad or loss_is_bad):
        return
    origin = _origin(exam)
    if origin is not None:
        yield _symptom(exam, origin)
    elif not output_is_bad:
        yield Symptom(
            where=("",),
            message=f"every activation is finite, but the loss is {exam.trace.loss}.",
            evidence={"loss": exam.trace.loss},
            fix="look at the loss function: a logarithm or a division of what the model put out",
        )


def _origin(exam: Examination) -> NodeMeasure | None:
    reach: set[int] = set()
    for source in exam.graph.output:
        if isinstance(source, Edge):
            reach |= exam.graph.ancestors(source)
    bad = [n for n in exam.trace.nodes if n.node.index in reach and n.nonfinite]
    made = [n for n in bad if not n.inputs_nonfinite and n.node.op not in _MASKING]
    # A softmax over a row of −inf, or inf − inf: NaN where there was only infinity.
    turned = [n for n in bad if n.nan and not n.inputs_nan]
    poisoned = [n for n in bad if _poisoned(exam, n)]
    return next(iter(sorted(made + turned + poisoned, key=lambda n: n.node.index)), None)


def _poisoned(exam: Examination, measure: NodeMeasure) -> tuple[str, ...]:
    mine = (exam.parameters.get(name) for name in measure.node.parameters)
    pairs = zip(measure.node.parameters, mine, strict=True)
    return tuple(name for name, p in pairs if p is not None and not bool(torch.isfinite(p).all()))


def _symptom(exam: Examination, origin: NodeMeasure) -> Symptom:
    node, poisoned = origin.node, _poisoned(exam, origin)
    total = sum(math.prod(spec.shape) for spec in node.outputs)
    what = f"{origin.nan} NaN" if origin.nan == origin.nonfinite else f"{origin.nonfinite} non-finite"
    said = f"{node.op} in {called(node.module)} made {what} among {total} values"
    cause = f"its parameter {', '.join(poisoned)} is not finite" if poisoned else "from finite arguments"
    if origin.inputs_nonfinite and not poisoned:
        cause = "from infinite arguments"
    return Symptom(
        where=poisoned or (node.module,),
        message=f"{said}, {cause}.",
        evidence={
            "op": node.op,
            "module": node.module,
            "index": node.index,
            "nonfinite": origin.nonfinite,
            "nan": origin.nan,
            "values": total,
            "parameters": list(poisoned),
            "dtype": str(node.outputs[0].dtype).removeprefix("torch.") if node.outputs else None,
        },
        fix="write the parameter anew"
        if poisoned
        else f"bound the argument of {node.op}, or compute it in a wider type",
    )
