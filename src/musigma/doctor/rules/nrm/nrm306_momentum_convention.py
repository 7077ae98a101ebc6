"""NRM306 momentum-convention: a momentum that means the opposite in PyTorch, or 0.

## What it does

Looks at the momentum of every layer with running statistics. In PyTorch it is the weight of the *new*
value,

    running ← (1 − momentum)·running + momentum·batch            default 0.1

while Keras, Flax, TensorFlow and many texts give the weight of the *old* one (defaults 0.99, 0.9): their
0.99 is 0.01 here. It fires above 2/3 and at 0. An exponential average with new weight m is worth (2 − m)/m
batches: 19 at 0.1, but fewer than two above 2/3, and only 1.02 at 0.99; at 0 the statistics never move.
`None`, the plain average of all batches, and exactly 1, the last batch alone, say what they mean and are
left alone.

## Why it hurts

With 0.9 the statistics of eval mode are those of the last batch, whatever it held: outputs and validation
loss jump from step to step. With 0 they stay mean 0 and variance 1, and eval mode doesn't normalize.

## Example

```python
import torch
from torch import nn
from musigma.doctor import Case

x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
case = Case(nn.Sequential(nn.BatchNorm1d(8, momentum=0.99), nn.Linear(8, 2)), x, intent="train")
```

## Use instead

```python
import torch
from torch import nn
from musigma.doctor import Case

x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
case = Case(nn.Sequential(nn.BatchNorm1d(8, momentum=0.01), nn.Linear(8, 2)), x, intent="train")
```

## Fix safety

1 − momentum is what was meant where the number came from the other convention. The weights are not
touched, and training doesn't change: only the statistics for eval mode do, after the next updates. A
momentum of 0 may be a freeze on purpose; say so with `musigma.nn.FrozenBatchNorm`, since this layer still
normalizes by the batch in train mode.

## References

Ioffe & Szegedy 2015, "Batch Normalization", algorithm 2.
"""

from collections.abc import Iterator

from musigma.doctor import _rules
from musigma.doctor._examination import Examination
from musigma.doctor._rules import Symptom
from musigma.doctor.probes._words import modules

# (2 − m)/m < 2: the average is worth fewer than two batches.
_LIMIT = 2 / 3


@_rules.rule("NRM306", "momentum-convention", severity="warning")
def check(exam: Examination) -> Iterator[Symptom]:
    """One symptom per value of the momentum."""
    by_value: dict[float, dict[str, None]] = {}
    for m in exam.channels:
        momentum = None if m.stored is None else m.stored.momentum
        # A function that is called to evaluate takes no momentum; a frozen layer has none.
        if momentum is None or not (m.own or _module_says(exam, m.path)):
            continue
        if momentum == 0 or _LIMIT < momentum < 1:
            by_value.setdefault(momentum, {})[m.path] = None
    for momentum, paths in by_value.items():
        yield _symptom(exam, momentum, tuple(paths))


def _module_says(exam: Examination, path: str) -> bool:
    return isinstance(getattr(exam.model.get_submodule(path), "momentum", None), int | float)


def _symptom(exam: Examination, momentum: float, paths: tuple[str, ...]) -> Symptom:
    if momentum == 0:
        said = f"momentum 0 never moves the running statistics of {modules(paths)}"
        fix = "set a momentum of 0.1, or freeze the layer with musigma.nn.FrozenBatchNorm"
        worth = 0.0
    else:
        worth = (2 - momentum) / momentum
        said = (
            f"momentum {momentum:g} is the weight of the new value in PyTorch, so the running statistics of "
            f"{modules(paths)} are worth {worth:.3g} batches; it looks like the weight of the old one"
        )
        fix = f"set momentum={1 - momentum:.4g}, which is {momentum:g} in the convention of Keras and Flax"
    return Symptom(
        where=paths,
        message=said + ".",
        evidence={"momentum": momentum, "keep": 1 - momentum, "batches": worth, "layers": list(paths)},
        fix=fix,
        # It no longer acts, but the statistics may have been taken with it.
        severity="info" if exam.intent == "inference" else None,
    )
