"""INI202 wrong-gain: weights whose variance doesn't fit the activation behind them, in a stack that
drifts.

## What it does

In plain stacks (weight layers with nothing but activations, pooling, dropout and views between them) it
compares Var(W)·fan_in with the square of the gain of the activation that really follows. It fires where
that differs by more than sampling error and the signal really drifts because of it: along the stack the
second moment grows a thousandfold or falls to a ten-thousandth, or the part of it that tells examples
apart is lost (INI205, INI206, INI207), and the gains account for most of that. Weights that a
normalization layer follows, weights that start at zero, and short stacks with torch's default don't
fire.

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

# Standard errors that are forgiven; a net has a few hundred weight tensors at most.
_SIGMAS = 4.0
# A gain that is off by less costs less than 5 % of the standard deviation a layer.
_TOLERANCE = math.log(1.1)
# "Because of it": the gains account for more of the drift than anything else does.
_EXPLAINED = 0.5


@_rules.rule("INI202", "wrong-gain", severity="warning")
def check(exam: Examination) -> Iterator[Symptom]:
    """One symptom per plain stack that drifts because of its gains."""
    if not exam.fresh:
        return
    for stack in exam.stacks:
        gone = _lost(exam, stack)
        # An output may be as small as it likes: a head counts only where the signal explodes.
        counted = gone > 0 or stack.links[-1].activation is not None
        links = stack.links if counted else stack.hidden
        wanted = [(link, _wanted(exam, link)) for link in links]
        off = [(link, w) for link, w in wanted if w is not None and gone * _excess(link.layer, w) > 0]
        explained = abs(sum(_excess(link.layer, w) for link, w in off))
        if off and explained > _EXPLAINED * abs(gone):
            yield _symptom(stack, off)


def _lost(exam: Examination, stack: Stack) -> float:
    """By how much the signal vanishes (below 0) or explodes along a stack, in logarithms; 0 where it doesn't.

    That is its second moment or, where biases hold that up, the part of it that tells examples apart.
    """
    found = explodes(stack) or vanishes(stack)
    if found is not None:
        return found.total
    collapse = collapse_of(stack, exam.batch)
    if collapse is None:
        return 0.0
    return math.log(collapse.share / collapse.critical) if collapse.share > 0 else -math.inf


def _wanted(exam: Examination, link: Link) -> float | None:
    """gain² of the activation that follows; None where nothing is asked of this weight."""
    layer = link.layer
    if layer.weight is None or float(layer.weights.var()) == 0:
        return None
    if exam.graph.norm_after(layer.weight, only=False) is not None:
        return None
    activation = link.activation
    if activation is None:
        return 1.0
    options = {
        k: v for k, v in activation.options.items() if k not in ("inplace", "training", "dim", "dtype")
    }
    try:
        return init.gain((activation.op, options)) ** 2
    except (TypeError, ValueError):
        return None


def _excess(layer: LayerMeasure, wanted: float) -> float:
    """ln(E[z²]/E[x²] / gain²) where it is beyond chance and tolerance, else 0.

    The sample variance of n normal weights has the relative standard error √(2/n); a sample mean of √(Var/n)
    adds about one part in the number of units where the inputs are all positive.
    """
    if not layer.amplification > 0:
        return 0.0
    off = math.log(layer.amplification / wanted)
    chance = _SIGMAS * ((2 / float(layer.weights.count)) ** 0.5 + 1 / layer.units)
    return off if abs(off) > max(chance, _TOLERANCE) else 0.0


def _symptom(stack: Stack, off: list[tuple[Link, float]]) -> Symptom:
    link, wanted = max(off, key=lambda pair: abs(_excess(pair[0].layer, pair[1])))
    layer, follows = link.layer, link.activation.op if link.activation is not None else None
    found = forward_drift(stack)
    said = f"{len(off)} of {len(stack.links)} layers have" if len(off) > 1 else f"{layer.weight} has"
    factor = layer.amplification / wanted
    total = "" if found is None else f", and {math.exp(found.total):.3g} over the stack"
    mean = float(layer.weights.mean)
    # A mean that adds more than the variance does is what is wrong.
    biased = layer.amplification > 2 * layer.gain_squared
    cause = f" and a mean of {mean:.3g}" if biased else ""
    return Symptom(
        where=tuple(str(one.layer.weight) for one, _ in off),
        message=f"{said} Var(W)·fan_in = {layer.gain_squared:.3g}{cause} where {_follower(follows)} wants "
        f"{wanted:.3g}: the mean square changes by a factor {factor:.3g} a layer{total}.",
        evidence={
            "var_times_fan_in": {str(one.layer.weight): one.layer.gain_squared for one, _ in off},
            "mean": {str(one.layer.weight): float(one.layer.weights.mean) for one, _ in off},
            "wanted": {str(one.layer.weight): gain for one, gain in off},
            "factor_per_layer": {str(one.layer.weight): one.layer.amplification / gain for one, gain in off},
            "factor": factor,
            "total": None if found is None else math.exp(found.total),
            "activation": follows,
        },
        fix=f"draw the weights with mean 0 and variance {wanted:.3g}/fan_in"
        + (f": musigma.init.he_normal_(w, nonlinearity={follows!r})" if follows else ""),
    )


def _follower(activation: str | None) -> str:
    return f"the {activation} that follows" if activation else "a layer without activation"
