"""INI201 symmetric-units: units of a layer, or parallel branches, are identical and learn identically.

## What it does

Compares the units of every linear and convolutional layer: the weights that come in. It fires where at
least half of a hidden layer's units repeat another one (all of them in the layer that makes the
outputs, where classes that don't occur in the batch look alike on purpose), or where two layers that
read the same values hold the same weights; and only if that is still so after optimizer steps on a
copy. Layers one behind the other that begin as clones, as `nn.TransformerEncoder` makes them, part at
the first step and are no finding.

## Why it hurts

Identical units get identical gradients and stay identical: a layer of a thousand of them has the
capacity of one. Constants, zero the most common, do this; so do copies where independent branches were
meant. Weights that are all zero stop the gradient as well, and the loss stays where it is, at ln C.

## Example

```python
import torch
from torch import nn
from musigma.doctor import Case

net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
for p in net.parameters():
    nn.init.constant_(p, 0.1)
x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
case = Case(net, x, torch.arange(64) % 3, loss=nn.CrossEntropyLoss())
```

## Use instead

```python
import torch
from torch import nn
import musigma as ms
from musigma.doctor import Case

net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
ms.init.he_normal_(net[0].weight, nonlinearity="relu", generator=torch.Generator().manual_seed(0))
x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
case = Case(net, x, torch.arange(64) % 3, loss=nn.CrossEntropyLoss())
```

## Fix safety

The treatment draws the named weights anew, at the scale that the activation behind them wants. Don't
apply it to weights that were loaded on purpose.

## References

Goodfellow, Bengio & Courville 2016, "Deep Learning", section 8.4 (breaking symmetry).
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from musigma.doctor import _rules
from musigma.doctor._examination import Examination
from musigma.doctor._rules import Symptom
from musigma.doctor.probes._layers import LayerMeasure
from musigma.doctor.probes._words import counted, listed
from musigma.graph import Edge
from musigma.statistics import moments

_Tensors = Mapping[str, Tensor]


# The part of the gradient's squared norm that is common to all units: 0 where they pull in directions of
# their own, 1 where they move as one. Beyond three quarters their differences never catch up.
_COMMON = 0.75


@_rules.rule("INI201", "symmetric-units", severity="error")
def check(exam: Examination) -> Iterator[Symptom]:
    """One symptom for the layers whose units are alike, one per pair of parallel clones."""
    if not exam.fresh:
        return
    held = {n: p.detach() for n, p in exam.parameters.items() if p.requires_grad}
    layers = {layer.weight: layer for layer in exam.trace.layers if layer.weight in held}
    suspects = {n: layer for n, layer in layers.items() if n is not None and _repeats(exam, layer, held)}
    clones = list(_parallel_clones(exam, held))
    if not suspects and not clones:
        return
    stuck = {n: layer for n, layer in suspects.items() if _stays(exam, layer)}
    if stuck:
        yield _alike(exam, stuck, held)
    after = dict(exam.settled.model.named_parameters())
    for first, second in clones:
        if torch.equal(after[first], after[second]):
            yield Symptom(
                where=(first, second),
                message=f"{first} and {second} read the same values, hold the same weights, and still do "
                f"after {counted(exam.settled.count, 'optimizer step')}.",
                evidence={"first": first, "second": second, "steps": exam.settled.count},
                fix="initialize the branches independently of each other",
            )


def units_of(layer: LayerMeasure, held: _Tensors) -> Tensor:
    """(groups, units, inputs): the weights that each output of a layer reads its inputs with.

    Units of different groups read different inputs and are never alike.
    """
    weight = held[str(layer.weight)]
    rows = weight.reshape(layer.groups, -1, *weight.shape[1:])
    return (rows.transpose(1, 2) if "transpose" in layer.node.op else rows).flatten(2)


def count_units(rows: Tensor) -> tuple[int, int]:
    """How many units there are, and how many of them are different within their group."""
    return rows.shape[0] * rows.shape[1], sum(len(torch.unique(group, dim=0)) for group in rows)


def _repeats(exam: Examination, layer: LayerMeasure, held: _Tensors) -> bool:
    rows = units_of(layer, held)
    if rows.shape[1] == 1:
        return False  # one unit a group has no other to be like
    # Units with different first weights are different: enough for all but a few layers, and cheap.
    if 2 * sum(len(torch.unique(group)) for group in rows[:, :, 0]) > rows.shape[0] * rows.shape[1]:
        return False
    units, different = count_units(rows)
    return different == len(rows) if _makes_output(exam, layer) else 2 * different <= units


def _stays(exam: Examination, layer: LayerMeasure) -> bool:
    """Whether steps left the units alike, and the next one will: their gradients are alike as well."""
    after = {n: p.detach() for n, p in exam.settled.model.named_parameters()}
    name = str(layer.weight)
    gradient = exam.settled.after.gradients.get(name)
    pull = units_of(layer, {name: torch.zeros_like(after[name]) if gradient is None else gradient})
    rows = torch.cat([units_of(layer, after), pull], dim=2)
    units, different = count_units(rows)
    makes_output = _makes_output(exam, layer)
    if different == len(rows) if makes_output else 2 * different <= units:
        return True
    # Different biases alone tell constant units apart, but hardly. (Zeros are left out: they start together
    # in many designs and part for good; so are outputs, which may well agree.)
    start = units_of(layer, exam.parameters)
    constant = count_units(start)[1] == len(rows) and bool(start.any())
    total = float(pull.double().square().sum())
    common = float(moments(pull, 1).mean.square().sum()) * pull.shape[1]
    return constant and not makes_output and common > _COMMON * total


def _makes_output(exam: Examination, layer: LayerMeasure) -> bool:
    below = exam.graph.descendants(layer.node)
    return not any(exam.graph.weights(exam.graph.nodes[i]) for i in below)


def _parallel_clones(exam: Examination, held: _Tensors) -> Iterator[tuple[str, str]]:
    readers: dict[object, dict[str, LayerMeasure]] = {}
    for layer in exam.trace.layers:
        if layer.weight in held:
            sources = layer.node.arguments["input"]
            key = tuple(s.key if isinstance(s, Edge) else s for s in sources)
            readers.setdefault(key, {})[str(layer.weight)] = layer
    for layers in readers.values():
        names = list(layers)
        for i, one in enumerate(names):
            for other in names[i + 1 :]:
                if _cloned(layers[one], layers[other], held):
                    yield one, other


def _cloned(one: LayerMeasure, other: LayerMeasure, held: _Tensors) -> bool:
    a, b = held[str(one.weight)], held[str(other.weight)]
    # Constants that repeat within a layer are the other finding.
    if a.shape != b.shape or not torch.equal(a, b) or not bool((a != a.flatten()[0]).any()):
        return False
    biases = [held.get(str(layer.bias)) for layer in (one, other)]
    if biases[0] is None or biases[1] is None:
        return biases[0] is biases[1]
    return torch.equal(biases[0], biases[1])


def _alike(exam: Examination, stuck: Mapping[str, LayerMeasure], held: _Tensors) -> Symptom:
    counts = {n: count_units(units_of(layer, held)) for n, layer in stuck.items()}
    zero = [n for n in stuck if exam.weights[n].zeros == 1.0]
    name, (units, different) = next(iter(counts.items()))
    said = f"{name} has {units} units of which only {different} {'is' if different == 1 else 'are'} different"
    if len(stuck) > 1:
        said = f"the units of {len(stuck)} layers repeat each other ({said})"
    if zero:
        said += f"; all zero: {listed(zero)}"
    chance, loss = exam.chance, ""
    if chance is not None and chance.classes:
        guess = f"ln {chance.classes} = {chance.value:.5g}"
        loss = f"; the loss is {exam.trace.loss:.5g}, a uniform guess has {guess}"
    return Symptom(
        where=tuple(stuck),
        message=f"{said}, also after {counted(exam.settled.count, 'optimizer step')}{loss}.",
        evidence={
            "units": {n: c[0] for n, c in counts.items()},
            "different": {n: c[1] for n, c in counts.items()},
            "all_zero": zero,
            "steps": exam.settled.count,
            "loss": exam.trace.loss,
            "chance": None if chance is None else chance.value,
        },
        fix="draw the weights at random, each unit's independently",
    )
