"""NRM303 one-value-per-channel: a normalization over a single value, whose output is constant.

## What it does

Counts from the recorded shapes how many values each mean is taken over: a channel of the batch for
BatchNorm, an example's channel for InstanceNorm, an example's group for GroupNorm, a row for LayerNorm and
RMSNorm. It fires where that is one. In training torch refuses one value for BatchNorm and InstanceNorm
(and for a GroupNorm that holds a single group); then the rule explains the failure and names the layer
that raised.

## Why it hurts

x − mean(x) is 0 for one value: the output is the layer's bias whatever comes in, and no gradient comes
back. RMSNorm divides the value by its own magnitude and leaves its sign.

## Example

```python
import torch
from torch import nn
from musigma.doctor import Case

x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
model = nn.Sequential(nn.Linear(16, 4), nn.GroupNorm(4, 4), nn.ReLU(), nn.Linear(4, 2))
case = Case(model, x, intent="train")
```

## Use instead

```python
import torch
from torch import nn
from musigma.doctor import Case

x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
model = nn.Sequential(nn.Linear(16, 4), nn.LayerNorm(4), nn.ReLU(), nn.Linear(4, 2))
case = Case(model, x, intent="train")
```

## Fix safety

Nothing is mended automatically. Where the last batch of an epoch holds one example, `drop_last=True` loses
only that one; where a pooling has left one position, put the normalization before it or use LayerNorm over
the channels; at inference call `.eval()`.

## References

Wu & He 2018, "Group Normalization", section 3.
"""

from collections.abc import Iterator, Sequence
from math import prod
from types import FrameType, TracebackType
from typing import Any

from torch import nn

from musigma.doctor import _rules
from musigma.doctor._examination import Examination
from musigma.doctor._rules import Symptom
from musigma.doctor.probes._words import called
from musigma.graph import Node, kinds

# How torch (and musigma) begin the refusal.
_REFUSALS = ("Expected more than 1 value per channel", "Expected more than 1 spatial element")
_FIX = (
    "normalize over more values: more examples or positions, fewer groups, or LayerNorm over the channels; "
    "drop a last batch of one; call eval() for inference"
)


@_rules.rule("NRM303", "one-value-per-channel", severity="error", on_failure=True)
def check(exam: Examination) -> Iterator[Symptom]:
    """One symptom per layer with a single value a mean, or for the layer that refused."""
    if exam.failure is not None:
        yield from _refusal(exam, exam.failure)
        return
    seen: set[str] = set()
    for node in exam.graph:
        if values_per_mean(node) != 1 or node.module in seen:
            continue
        seen.add(node.module)
        signs = node.op in kinds.RMS_NORMS
        shape = node.outputs[0].shape
        yield Symptom(
            where=(node.module,),
            message=f"{node.op} in {called(node.module)} normalizes over a single value (input {shape}): "
            + ("it leaves only the sign." if signs else "its output is constant."),
            evidence={"values": 1, "op": node.op, "shape": list(shape), "raised": False},
            fix=_FIX,
            severity="warning" if signs else None,
        )


def values_per_mean(node: Node) -> int | None:
    """How many values each mean of a norm is taken over; None where it is no norm or takes none."""
    if node.op not in kinds.NORMS or not node.outputs:
        return None
    shape = [int(size) for size in node.outputs[0].shape]
    if node.op in kinds.BATCH_NORMS and node.options.get("training") is True and len(shape) > 1:
        return shape[0] * prod(shape[2:])
    if node.op == "instance_norm" and node.options.get("use_input_stats", True) is True and len(shape) > 1:
        return prod(shape[2:])
    groups, normalized = node.options.get("num_groups"), node.options.get("normalized_shape")
    if node.op == "group_norm" and isinstance(groups, int) and groups > 0 and len(shape) > 1:
        return shape[1] // groups * prod(shape[2:])
    if isinstance(normalized, list | tuple):
        return prod(normalized)
    return None


def _refusal(exam: Examination, failure: Exception) -> Iterator[Symptom]:
    if not isinstance(failure, ValueError) or not str(failure).startswith(_REFUSALS):
        return
    path, shape = _culprit(exam.model, failure.__traceback__)
    yield Symptom(
        where=(path,),
        message=f"{called(path)} can't normalize {f'input {tuple(shape)}' if shape else 'one value'}: "
        f"{str(failure).splitlines()[0]}.",
        evidence={"values": 1, "shape": list(shape) if shape else None, "raised": True},
        fix=_FIX,
    )


def _culprit(model: nn.Module, trace: TracebackType | None) -> tuple[str, Sequence[int] | None]:
    """The innermost module of the model that was running when it raised, and the shape it got."""
    paths = {id(m): name for name, m in model.named_modules()}
    path, shape = "", None
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if id(owner) in paths:
            path = paths[id(owner)]
        shape = _shape(trace.tb_frame) or shape
        trace = trace.tb_next
    return path, shape


def _shape(frame: FrameType) -> Sequence[int] | None:
    received: Any = frame.f_locals.get("input")
    return getattr(received, "shape", None)
