"""NRM315 train-mode-in-eval: a model that is about to be used still behaves as in training.

## What it does

With intent "inference" it looks, in the run as it was, for what training alone wants: BatchNorms and
InstanceNorms that have running statistics and yet normalize by the input's, and active dropout, in
modules, in attention, in recurrent layers and in calls such as `F.dropout(x)`, whose `training` is True
unless told otherwise.

## Why it hurts

The answer to one request depends on the others in its batch, a single one may fail, and dropout makes it
random. Every forward also moves the running statistics towards the data that is being served.

## Example

```python
import torch
from torch import nn
from musigma.doctor import Case

x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
model = nn.Sequential(nn.BatchNorm1d(8, momentum=None), nn.Dropout(0.1), nn.Linear(8, 2))
model(x)
case = Case(model, x, intent="inference")
```

## Use instead

```python
import torch
from torch import nn
from musigma.doctor import Case

x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
model = nn.Sequential(nn.BatchNorm1d(8, momentum=None), nn.Dropout(0.1), nn.Linear(8, 2))
model(x)
case = Case(model.eval(), x, intent="inference")
```

## Fix safety

`model.eval()` changes no weight. Where the running statistics are stale (NRM304) or were never updated
(NRM305), eval mode gives other answers than train mode did: recalibrate first. Dropout that is meant to
stay on (Monte Carlo dropout) is a reason to ignore this code.

## References

Ioffe & Szegedy 2015, "Batch Normalization", algorithm 2; Srivastava et al. 2014, "Dropout".
"""

from collections.abc import Iterator

from torch import nn

from musigma.doctor import _rules
from musigma.doctor._examination import Examination
from musigma.doctor._rules import Symptom
from musigma.doctor.probes._words import modules
from musigma.graph import Node, kinds

# Where each op keeps its rate and its switch; attention's own kernel takes a rate of 0 for "off".
_DROPPING = {
    **dict.fromkeys(kinds.DROPOUTS, ("p", "training")),
    **dict.fromkeys(kinds.RECURRENT, ("dropout", "train")),
    "multi_head_attention": ("dropout_p", "training"),
    "scaled_dot_product_attention": ("dropout_p", None),
}


@_rules.rule("NRM315", "train-mode-in-eval", severity="error", needs=("intent",), on_failure=True)
def check(exam: Examination) -> Iterator[Symptom]:
    """One symptom with everything that is in train mode."""
    if exam.intent != "inference":
        return
    norms, dropouts = _by_module(exam.model) if exam.failure is not None else _as_it_ran(exam)
    if not norms and not dropouts:
        return
    said = [
        f"{kind} in {modules(paths)}"
        for paths, kind in ((norms, "batch statistics"), (dropouts, "dropout"))
        if paths
    ]
    forced = [path for path in dropouts if not exam.model.get_submodule(path).training]
    yield Symptom(
        where=tuple(dict.fromkeys((*norms, *dropouts))),
        message=f"the model is about to be used, and still runs as in training: {'; '.join(said)}.",
        evidence={"norms": norms, "dropouts": dropouts, "forced": forced, "gap": _gap(exam)},
        fix="call model.eval()" + ("; pass training=self.training to F.dropout" if forced else ""),
    )


def _as_it_ran(exam: Examination) -> tuple[list[str], list[str]]:
    norms = [m.path for m in exam.channels if m.own and m.stored is not None]
    dropouts = [node.module for node in exam.graph if _drops(node)]
    return list(dict.fromkeys(norms)), list(dict.fromkeys(dropouts))


def _by_module(model: nn.Module) -> tuple[list[str], list[str]]:
    """By the modules' flags, where the model didn't run (a single example in a BatchNorm)."""
    active = {name: m for name, m in model.named_modules() if m.training}
    norms = [
        name
        for name, m in active.items()
        if isinstance(m, nn.modules.batchnorm._NormBase) and m.running_mean is not None
    ]
    drops = [name for name, m in active.items() if isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0]
    return norms, drops


def _drops(node: Node) -> bool:
    rate, switch = _DROPPING.get(node.op, ("", None))
    value = node.options.get(rate)
    active = switch is None or node.options.get(switch, True) is True
    return isinstance(value, int | float) and value > 0 and active


def _gap(exam: Examination) -> float | None:
    """How far eval mode's outputs are from these, in their standard deviations; None where there are none."""
    if exam.failure is not None or exam.modes_compared is None:
        return None
    relative = exam.modes_compared.output.relative
    return None if relative != relative else relative
