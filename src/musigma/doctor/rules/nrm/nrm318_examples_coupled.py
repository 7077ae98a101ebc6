"""NRM318 examples-coupled: one example's output depends on the others in its batch.

## What it does

With `independent=True` it runs the batch twice, the second time with half of the examples replaced by
copies of the other half, and compares the outputs of those that were kept. Shapes and random numbers are
the same in both runs, so they must agree up to rounding (100 units in the last place of the largest value:
1.2e-5 in float32). Where they don't, every op is compared, and the ones where the difference comes in are
named: a BatchNorm in train mode, an attention or a softmax over the batch axis, a mean over examples.

## Why it hurts

A contrastive loss can be solved by reading the batch mates' statistics instead of the image; clipping "per
example" gradients guarantees nothing when an example acts through its neighbours; a policy sees other
episodes; a service answers the same request differently according to who else asks.

## Example

```python
import torch
from torch import nn
from musigma.doctor import Case

x = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
case = Case(model, x, independent=True)
```

## Use instead

```python
import torch
from torch import nn
from musigma.doctor import Case

x = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 2))
case = Case(model, x, independent=True)
```

## Fix safety

For inference `model.eval()` uncouples BatchNorm and changes no weight. For training the layer has to go:
GroupNorm and LayerNorm look at one example each, and the model must be trained again. SyncBatchNorm or
shuffling over devices hides the leak from a contrastive loss but doesn't close it.

## References

Wu & Johnson 2021, "Rethinking 'Batch' in BatchNorm", section 6 (leakage); He et al. 2020, "Momentum
Contrast", section 3.3; Abadi et al. 2016, "Deep Learning with Differential Privacy".
"""

from collections.abc import Iterator

from musigma.doctor import _rules
from musigma.doctor._examination import Examination
from musigma.doctor._rules import Symptom
from musigma.doctor.probes._words import called, listed
from musigma.graph import kinds


@_rules.rule("NRM318", "examples-coupled", severity="error", needs=("independent",))
def check(exam: Examination) -> Iterator[Symptom]:
    """One symptom that names every place where the dependence comes in."""
    found = exam.coupling
    if found is None or not found.coupled:
        return
    origins = dict.fromkeys((node.op, node.module) for node in found.origins)
    norms = any(node.op in kinds.BATCH_NORMS for node in found.origins)
    yield Symptom(
        where=tuple(dict.fromkeys(path for _, path in origins)),
        message=f"with other batch mates an example's output changes by {found.difference:.3g} (values reach "
        f"{found.scale:.3g}); it comes in at {listed(f'{op} in {called(path)}' for op, path in origins)}.",
        evidence={
            "difference": found.difference,
            "scale": found.scale,
            "kept": found.kept,
            "origins": [{"op": op, "module": path} for op, path in origins],
        },
        fix="call model.eval() for inference; to train, use GroupNorm or LayerNorm in place of BatchNorm"
        if norms
        else "keep the examples apart: check the axis of this op (batch_first, dim)",
    )
