"""SIG405 constant-output: what the model puts out doesn't depend on what goes in.

## What it does

Compares the outputs of the examples in the batch. The rule fires where they are equal up to rounding
although the inputs differ, and still are after optimizer steps on a copy: an output that starts
constant on purpose (a zero head) moves after one. Where an activation follows the last weight layer and
every unit of it is off, it is named.

## Why it hurts

A constant answer has the loss of a guess (ln C for C classes, the targets' variance for a regression),
and where it is constant because units are dead its gradient is zero: it stays.

## Example

```python
import torch
from torch import nn
from musigma.doctor import Case

net = nn.Sequential(nn.Linear(5, 3), nn.ReLU())
nn.init.constant_(net[0].bias, -5.0)
x = torch.rand(64, 5, generator=torch.Generator().manual_seed(0))
case = Case(net, x, torch.arange(64) % 3, loss=nn.CrossEntropyLoss())
```

## Use instead

```python
import torch
from torch import nn
from musigma.doctor import Case

net = nn.Sequential(nn.Linear(5, 3))
x = torch.rand(64, 5, generator=torch.Generator().manual_seed(0))
case = Case(net, x, torch.arange(64) % 3, loss=nn.CrossEntropyLoss())
```

## Fix safety

Nothing is mended automatically: taking an activation off the output changes what the model is. The
other findings on the same model (dead units, collapsed samples, all-zero weights) say how it came
about.

## References

Lu, Shin, Su & Karniadakis 2020, "Dying ReLU and initialization", theorem 3 (a net born dead is a
constant).
"""

from collections.abc import Iterator

from torch import Tensor

from musigma.doctor import _rules
from musigma.doctor._examination import Examination
from musigma.doctor._rules import Symptom
from musigma.doctor.probes import _calls
from musigma.doctor.probes._pass import Pass
from musigma.doctor.probes._words import counted
from musigma.graph import Edge, Node, kinds


@_rules.rule("SIG405", "constant-output", severity="error")
def check(exam: Examination) -> Iterator[Symptom]:
    """One symptom for the model."""
    if exam.batch < 2 or not _inputs_vary(exam) or not is_constant(exam.trace, exam.batch):
        return
    steps = 0 if exam.intent == "inference" else exam.settled.count
    if steps and not is_constant(exam.settled.after, exam.batch):
        return
    output = _batched(exam.trace, exam.batch)[0]
    first, last = output[0].flatten()[:4].tolist(), _last_activation(exam)
    values = ", ".join(f"{v:.4g}" for v in first) + (", …" if output[0].numel() > 4 else "")
    dead = last is not None and not bool(output.any())
    said = f"all {exam.batch} examples get the same output ({values})"
    if dead and last is not None:
        said += f": {last.op} follows the last weight layer and every unit of it is off"
    chance = exam.chance
    loss = f"; the loss is {exam.trace.loss:.5g}" if exam.loss is not None else ""
    if chance is not None and chance.classes:
        loss += f", for a uniform guess ln {chance.classes} = {chance.value:.5g}"
    yield Symptom(
        where=(last.module if dead and last is not None else "",),
        message=said + (f", also after {counted(steps, 'optimizer step')}" if steps else "") + f"{loss}.",
        evidence={
            "output": first,
            "examples": exam.batch,
            "steps": steps,
            "loss": exam.trace.loss,
            "chance": None if chance is None else chance.value,
            "activation": last.op if last is not None else None,
        },
        fix="take the activation off the output"
        if dead
        else "mend what the other findings name; the output hears nothing",
    )


def _inputs_vary(exam: Examination) -> bool:
    tensors = [t for t in _calls.tensors_in(exam.inputs) if t.ndim and t.shape[0] == exam.batch]
    return any(bool((t != t[:1]).any()) for t in tensors)


def _batched(run: Pass, batch: int) -> list[Tensor]:
    return [t for t in _calls.floating_outputs(run.output) if t.ndim and t.shape[0] == batch]


def is_constant(run: Pass, batch: int) -> bool:
    """Whether every output with a batch axis is the same for all examples, up to rounding."""
    outputs = _batched(run, batch)
    return bool(outputs) and all(_same(t) for t in outputs)


def _same(t: Tensor) -> bool:
    # A dot product over n terms is good to about √n roundings; 64 covers four thousand.
    eps = 64 * 2.0**-23 if t.element_size() >= 4 else 64 * 2.0**-8
    return bool(((t - t[:1]).abs() <= eps * t.abs().amax()).all())


def _last_activation(exam: Examination) -> Node | None:
    """The activation between the last weight layer and the output, where nothing but views stands between."""
    for source in exam.graph.output:
        while isinstance(source, Edge):
            node = exam.graph.nodes[source]
            if node.op in kinds.ACTIVATIONS:
                return node
            inputs = node.arguments.get("input", ())
            if node.op not in kinds.VIEWS or len(inputs) != 1:
                break
            source = inputs[0]
    return None
