"""GRD504 no-gradient: a trainable parameter gets no gradient, or one that is exactly zero, and keeps
getting none.

## What it does

Lists the trainable parameters whose gradient is missing or exactly zero, and are still without one
after optimizer steps on a copy. Designs that begin at zero (a zero head, zero-γ, LoRA, ReZero, Fixup,
adaLN-zero) hide the parameters behind them for a step or two; they wake and are no finding. A bias that
a normalization layer cancels is NRM301's.

## Why it hurts

A parameter without a gradient never learns. Where the loss doesn't reach it at all it wastes memory,
and DistributedDataParallel waits for it; where it is exactly zero something on the way is dead: weights
that are all zero, units that are off for every example, an output that is constant.

## Example

```python
import torch
from torch import nn
from musigma.doctor import Case

net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 21))
for p in net.parameters():
    nn.init.zeros_(p)
x = torch.randn(210, 8, generator=torch.Generator().manual_seed(0))
case = Case(net, x, torch.arange(210) % 21, loss=nn.CrossEntropyLoss())
```

## Use instead

```python
import torch
from torch import nn
from musigma.doctor import Case

net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 21))
nn.init.zeros_(net[2].weight)
nn.init.zeros_(net[2].bias)
x = torch.randn(210, 8, generator=torch.Generator().manual_seed(0))
case = Case(net, x, torch.arange(210) % 21, loss=nn.CrossEntropyLoss())
```

## Fix safety

Freeze what is not meant to learn (`requires_grad_(False)`), delete what is not used; for the rest mend
what the other findings name.

## References

Goyal et al. 2017, "Accurate, large minibatch SGD", section 5.1 (zero-γ); Hu et al. 2021, "LoRA",
section 4.1.
"""

from collections.abc import Iterator

from musigma.doctor import _rules
from musigma.doctor._examination import Examination
from musigma.doctor._rules import Symptom
from musigma.doctor.probes._step import silent
from musigma.doctor.probes._words import counted, listed
from musigma.graph import kinds


@_rules.rule("GRD504", "no-gradient", severity="error")
def check(exam: Examination) -> Iterator[Symptom]:
    """One symptom for the parameters that are zero, one for those that the loss doesn't reach."""
    trace = exam.trace
    if exam.intent == "inference" or trace.loss_source == "none" or trace.loss != trace.loss:
        return
    trainable = [n for n, p in exam.parameters.items() if p.requires_grad and p.numel()]
    asleep = silent(trace, trainable)
    if not asleep:
        return
    asleep &= silent(exam.settled.after, asleep)
    asleep = frozenset(n for n in asleep if not _cancelled(exam, n))
    unreached = tuple(n for n in trainable if n in asleep and trace.gradients.get(n) is None)
    zero = tuple(n for n in trainable if n in asleep and trace.gradients.get(n) is not None)
    if zero:
        yield _zero(exam, zero, len(trainable))
    if unreached:
        yield Symptom(
            where=unreached,
            message=f"{len(unreached)} of {len(trainable)} trainable parameters are not reached by the loss.",
            evidence={
                "parameters": list(unreached),
                "trainable": len(trainable),
                "loss_source": trace.loss_source,
            },
            fix="delete them, freeze them with requires_grad_(False), or let the loss use what they make",
            severity="warning",
        )


def _cancelled(exam: Examination, name: str) -> bool:
    if not name.rpartition(".")[2].startswith("bias"):
        return False
    norm = exam.graph.norm_after(name, only=False)
    return norm is not None and norm.op in kinds.CENTERING_NORMS


def _zero(exam: Examination, names: tuple[str, ...], trainable: int) -> Symptom:
    trace, chance = exam.trace, exam.chance
    all_zero = [n for n in exam.weights if exam.weights[n].zeros == 1.0]
    said = (
        f"{len(names)} of {trainable} trainable parameters have a gradient of exactly zero, also after "
        f"{counted(exam.settled.count, 'optimizer step')}"
    )
    if trace.loss_source != "projection":
        said += f"; the loss is {trace.loss:.5g}"
    if chance is not None and chance.classes and abs(trace.loss - chance.value) < 1e-4:
        said += f" = ln {chance.classes}, a uniform guess"
    if dormant := [n for n in all_zero if n in names]:
        said += f"; all-zero tensors: {listed(dormant)}"
    return Symptom(
        where=names,
        message=said + ".",
        evidence={
            "parameters": list(names),
            "trainable": trainable,
            "steps": exam.settled.count,
            "loss": trace.loss,
            "chance": None if chance is None else chance.value,
            "all_zero": all_zero,
        },
        fix="initialize the weights at random, or mend the dead units that stand between them and the loss",
    )
