"""INI202 wrong-gain: weights whose variance doesn't fit the activation behind them, in a stack that
drifts.

## What it does

In plain stacks (weight layers with nothing but activations, pooling, dropout and views between them) it
compares Var(W)·fan_in with the square of the gain of the activation that really follows. It fires where
that differs by more than sampling error and the signal really drifts because of it: the second moment,
or the part of it that tells examples apart, leaves its scale by three orders of magnitude along the
stack. Weights that a normalization layer follows, weights that start at zero, and short stacks with
torch's default don't fire.

## Why it hurts

E[z²] = fan_in·Var(W)·E[a²]. After a ReLU half of E[z²] is left, so a layer multiplies the second moment
by Var(W)·fan_in/2: by 1 with He's variance, by 1/6 with torch's default, and by that to the power of
the depth in a stack. Forward the layers receive nothing that differs from one example to the next;
backward the gradient suffers the same factor.

## Example

```python
import torch
from torch import nn
from musigma.doctor import Case

torch.manual_seed(0)
layers = [m for _ in range(20) for m in (nn.Linear(64, 64), nn.ReLU())]
case = Case(nn.Sequential(*layers), torch.randn(64, 64, generator=torch.Generator().manual_seed(0)))
```

## Use instead

```python
import torch
from torch import nn
from musigma.doctor import Case

torch.manual_seed(0)
layers = [m for _ in range(20) for m in (nn.Linear(64, 64), nn.ReLU())]
for layer in layers[::2]:
    nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    nn.init.zeros_(layer.bias)
case = Case(nn.Sequential(*layers), torch.randn(64, 64, generator=torch.Generator().manual_seed(0)))
```

## Fix safety

The treatment draws the named weights anew with the gain of what follows and sets their biases to 0. It
must not be applied to weights that were trained or loaded; the rule is silent where weights have
visibly aligned with their inputs, and for `intent` "finetune" and "inference".

## References

He, Zhang, Ren & Sun 2015, "Delving deep into rectifiers", eq. 10; Glorot & Bengio 2010, eq. 12.
"""

import math
from collections.abc import Iterator

from musigma import init
from musigma.doctor import _rules
from musigma.doctor._examination import Examination
from musigma.doctor._rules import Symptom
from musigma.doctor.probes._layers import LayerMeasure
from musigma.doctor.probes._signal import collapse_of, explodes, forward_drift, vanishes
from musigma.doctor.probes._stacks import Link, Stack
from musigma.graph import kinds

# Standard errors that are forgiven; a net has a few hundred weight tensors at most.
_SIGMAS = 4.0
# A gain that is off by less costs less than 5 % of the standard deviation a layer.
_TOLERANCE = math.log(1.1)


@_rules.rule("INI202", "wrong-gain", severity="warning")
def check(exam: Examination) -> Iterator[Symptom]:
    """One symptom per plain stack that drifts because of its gains."""
    if not exam.fresh:
        return
    for stack in exam.stacks:
        direction = _direction(exam, stack)
        if not direction:
            continue
        off = [(link, wanted) for link in stack.links if (wanted := _wanted(exam, link, stack)) is not None]
        off = [(link, wanted) for link, wanted in off if direction * _excess(link.layer, wanted) > 0]
        if off:
            yield _symptom(stack, off)


def _direction(exam: Examination, stack: Stack) -> int:
    """−1 where the signal (or what tells examples apart in it) vanishes, 1 where it explodes, else 0."""
    if explodes(stack):
        return 1
    return -1 if vanishes(stack) or collapse_of(stack, exam.batch) is not None else 0


def _wanted(exam: Examination, link: Link, stack: Stack) -> float | None:
    """gain² of the activation that follows; None where nothing is asked of this weight."""
    layer = link.layer
    if layer.weight is None or float(layer.weights.var()) == 0:
        return None
    if exam.graph.norm_after(layer.weight, only=False) is not None:
        return None
    activation = link.activation
    if activation is None:
        # An output may be as small as it likes; that it is too large is what an exploding stack shows.
        return 1.0
    options = {
        k: v for k, v in activation.options.items() if k not in ("inplace", "training", "dim", "dtype")
    }
    try:
        return init.gain((activation.op, options)) ** 2
    except (TypeError, ValueError):
        return None


def _excess(layer: LayerMeasure, wanted: float) -> float:
    """ln(Var(W)·fan_in / gain²) where it is beyond chance and tolerance, else 0.

    The sample variance of n normal weights has the relative standard error √(2/n).
    """
    off = math.log(layer.gain_squared / wanted)
    chance = _SIGMAS * (2 / float(layer.weights.count)) ** 0.5
    return off if abs(off) > max(chance, _TOLERANCE) else 0.0


def _symptom(stack: Stack, off: list[tuple[Link, float]]) -> Symptom:
    layers = [link.layer for link, _ in off]
    link, wanted = max(off, key=lambda pair: abs(_excess(pair[0].layer, pair[1])))
    realised = link.layer.gain_squared
    follows = link.activation.op if link.activation is not None else "what"
    found = forward_drift(stack)
    factors = {str(one.layer.weight): one.layer.gain_squared / gain for one, gain in off}
    said = f"{len(off)} of {len(stack.links)} layers" if len(off) > 1 else f"{link.layer.weight}"
    have = "have" if len(off) > 1 else "has"
    tail = (
        f"the second moment changes by a factor {realised / wanted:.3g} a layer there"
        if found is None
        else f"a factor {realised / wanted:.3g} a layer, and {math.exp(found.total):.3g} over the stack"
    )
    return Symptom(
        where=tuple(str(layer.weight) for layer in layers),
        message=f"{said} {have} Var(W)·fan_in = {realised:.3g} where the {follows} that follows wants "
        f"{wanted:.3g}: {tail}.",
        evidence={
            "var_times_fan_in": {str(layer.weight): layer.gain_squared for layer in layers},
            "wanted": {str(one.layer.weight): gain for one, gain in off},
            "factor_per_layer": factors,
            "factor": realised / wanted,
            "total": None if found is None else math.exp(found.total),
            "activation": follows,
        },
        fix=f"use a scheme with gain² = {wanted:.3g}: musigma.init.he_normal_(w, nonlinearity={follows!r})"
        if follows in kinds.ACTIVATIONS
        else f"scale the weights to Var(W) = {wanted:.3g}/fan_in",
    )
