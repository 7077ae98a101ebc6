"""GRD505 update-ratio: one optimizer step is longer than the weight that it moves.

## What it does

Takes one step of the given optimizer on a copy and compares its length with that of the weight,
‖ΔW‖/‖W‖, for weights whose output goes into a normalization and nowhere else. There the loss doesn't
depend on the length of W, only on its direction; the rule makes sure of it by the gradient, which is
then orthogonal to W. It fires where the ratio exceeds 10: after such a step 99 % of the weight comes from
this one batch. A ratio near 1 does no harm: the step lengthens the weight, and so the next steps turn it
less. Weights that no normalization follows are left out: heads and gates that start near zero on purpose
move by many times their length and train well.

## Why it hurts

For a scale-invariant weight ∇L(cW) = ∇L(W)/c, so a step turns W by about lr·‖∇L‖/‖W‖ ~ lr/‖W‖²: a
weight that starts a hundred times too small is turned ten thousand times further. The first steps throw
the direction about. Each also lengthens W (the step is orthogonal to it, and lengths add in squares),
until the steps are small: the length at which training goes on, and with it the effective learning
rate, is decided by the first few batches.

## Example

```python
import torch
from torch import nn
from musigma.doctor import Case

generator = torch.Generator().manual_seed(0)
x, y = torch.randn(64, 16, generator=generator), torch.randint(3, (64,), generator=generator)
model = nn.Sequential(nn.Linear(16, 32, bias=False), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3))
nn.init.normal_(model[0].weight, 0.0, 0.01, generator=generator)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
case = Case(model, x, y, loss=nn.functional.cross_entropy, optimizer=optimizer, intent="train")
```

## Use instead

```python
import torch
from torch import nn
import musigma as ms
from musigma.doctor import Case

generator = torch.Generator().manual_seed(0)
x, y = torch.randn(64, 16, generator=generator), torch.randint(3, (64,), generator=generator)
model = nn.Sequential(nn.Linear(16, 32, bias=False), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3))
ms.init.he_normal_(model[0].weight, generator=generator)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
case = Case(model, x, y, loss=nn.functional.cross_entropy, optimizer=optimizer, intent="train")
```

## Fix safety

Lengthening W and the bias beside it leaves the model's function as it is, up to the normalization's
eps; stored running statistics must be lengthened with them, which the treatment does. Lowering the
learning rate instead slows every other parameter as well.

## References

van Laarhoven 2017, "L2 Regularization versus Batch and Weight Normalization", equations 5 to 8. Arora,
Li & Lyu 2019, "Theoretical Analysis of Auto Rate-Tuning by Batch Normalization", lemma 2.4.
"""

from collections.abc import Iterator

import torch

from musigma.doctor import _rules
from musigma.doctor._examination import Examination
from musigma.doctor._rules import Symptom
from musigma.doctor.probes._words import listed

# Measured on digits (64-64-32-10 with BatchNorm and a LeCun head, SGD, five seeds): lengthening weights of
# std 0.01 to He's cost at ratios of 2 and 6 (rates 0.1 and 0.3: mean test accuracy .942 to .847, .936 to
# .915), and helped at 21, 43 and 108 (rates 1, 2 and 5: .923 to .938, .910 to .932, .356 to .849).
_LIMIT = 10.0
# The cosine of gradient and weight that eps leaves where the variance is a hundred times eps.
_ORTHOGONAL = 1e-2


@_rules.rule("GRD505", "update-ratio", severity="warning", needs=("loss", "optimizer"))
def check(exam: Examination) -> Iterator[Symptom]:
    """One symptom for all such weights: one learning rate moves them."""
    candidates = [n for n, p in exam.parameters.items() if p.ndim >= 2 and _scale_is_hidden(exam, n)]
    if not candidates or exam.step.optimizer == "SGD(lr=0.1, clipped)":  # not the optimizer that was given
        return
    stepped = dict(exam.step.model.named_parameters())
    lengths = {n: _length(exam.parameters[n]) for n in candidates}
    ratios = {n: _length(stepped[n] - exam.parameters[n]) / lengths[n] for n in candidates}
    far = {n: r for n, r in ratios.items() if r > _LIMIT}
    if not far:
        return
    said = listed(f"{n} by {r:.3g} times its own length" for n, r in far.items())
    yield Symptom(
        where=tuple(far),
        message=f"the first step of {exam.step.optimizer} moves {said}, and a normalization hides that.",
        evidence={
            "optimizer": exam.step.optimizer,
            "weights": {n: {"ratio": r, "length": lengths[n], "std": _std(exam, n)} for n, r in far.items()},
        },
        fix="initialize these weights at the scale of the activation behind them, or lower the learning rate",
    )


def _length(t: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(t.detach().double()))


def _std(exam: Examination, name: str) -> float:
    return float(exam.weights[name].values.std())


def _scale_is_hidden(exam: Examination, name: str) -> bool:
    gradient, weight, norm = (
        exam.trace.gradients.get(name),
        exam.parameters[name],
        exam.graph.norm_after(name),
    )
    if gradient is None or norm is None:
        return False
    # A norm that runs on stored statistics divides by a constant.
    own = {"batch_norm": "training", "instance_norm": "use_input_stats"}.get(norm.op)
    if own is not None and not norm.options.get(own, True):
        return False
    along = float((gradient.double() * weight.detach().double()).sum())
    across = _length(gradient) * _length(weight)
    # NaN and 0 compare false: a gradient that is missing or not finite is another rule's.
    return 0 < across < float("inf") and abs(along) < _ORTHOGONAL * across
