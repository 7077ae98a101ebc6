"""INI209 dead-relu: more units are off for every example than chance explains.

## What it does

Counts the units behind a rectifier that are zero for every example at every position. With zero-mean
weights a unit's pre-activations over the batch are Gaussian, so the chance that it is off for all n
examples is 2⁻ⁿ where these are unlike, but near one half where they look alike, as they do deep in a
healthy net; it is measured with random mixtures of the layer's own units, and with its own biases under
a random sign. The rule fires where the count exceeds that by four standard errors and by a tenth of the
units, and still does after an optimizer step on a copy.

## Why it hurts

A unit that is off for every example gets no gradient from any of them; only a change in the layers
before it can wake it. Negative biases, a mean in the inputs that the weights share, or a step that was
too large switch off whole layers, and a layer that is off altogether stops everything behind it.

## Example

```python
import torch
from torch import nn
from musigma.doctor import Case

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
nn.init.constant_(net[0].bias, -3.0)
case = Case(net, torch.randn(64, 8, generator=torch.Generator().manual_seed(0)))
```

## Use instead

```python
import torch
from torch import nn
from musigma.doctor import Case

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
nn.init.zeros_(net[0].bias)
case = Case(net, torch.randn(64, 8, generator=torch.Generator().manual_seed(0)))
```

## Fix safety

The treatment draws the weights before the rectifier anew with He's variance and sets their biases to 0.
Units that died in training can be specialised rather than dead: look at more than one batch first.

## References

Lu, Shin, Su & Karniadakis 2020, "Dying ReLU and initialization", section 3.
"""

from collections.abc import Iterator

from musigma.doctor import _rules
from musigma.doctor._examination import Examination
from musigma.doctor._rules import Symptom
from musigma.doctor.probes._nodes import MIXTURES, NodeMeasure
from musigma.doctor.probes._trace import Trace
from musigma.doctor.probes._words import called
from musigma.graph import Edge, Node, kinds

_SIGMAS = 4.0
# A tenth of a layer is what one may lose without noticing; below it the finding would be noise to its reader.
_SHARE = 0.1


@_rules.rule("INI209", "dead-relu", severity="warning")
def check(exam: Examination) -> Iterator[Symptom]:
    """One symptom per rectifier with more dead units than chance gives."""
    if not exam.fresh or exam.batch < 2:
        return
    for measure in exam.trace.nodes:
        layer = _layer_before(exam.trace, measure.node)
        if measure.node.op not in kinds.RECTIFIERS or layer is None or not _exceeds(measure):
            continue
        if _exceeds(exam.step.trace.nodes[measure.node.index]):
            yield _symptom(measure, layer, exam.batch)


def _layer_before(trace: Trace, node: Node) -> Node | None:
    """The weight layer whose output a rectifier takes, with nothing but views between."""
    above = _source(trace, node)
    while above is not None and above.op in kinds.VIEWS:
        above = _source(trace, above)
    return above if above is not None and trace.graph.weights(above) else None


def _source(trace: Trace, node: Node) -> Node | None:
    sources = node.arguments.get("input", ())
    return trace.graph.nodes[sources[0]] if len(sources) == 1 and isinstance(sources[0], Edge) else None


def _exceeds(measure: NodeMeasure) -> bool:
    if measure.dead is None:
        return False
    units, chance = measure.dead.numel(), measure.dead_by_chance
    # Of the count among the units and of the share among the mixtures; a share that was never seen there may
    # still be one in so many units.
    error = (max(chance, 1 / units) * (1 - chance) * (1 / units + 1 / MIXTURES)) ** 0.5
    return float(measure.dead.double().mean()) > chance + max(_SIGMAS * error, _SHARE)


def _symptom(measure: NodeMeasure, layer: Node, batch: int) -> Symptom:
    assert measure.dead is not None
    dead = measure.dead.nonzero().flatten().tolist()
    units = measure.dead.numel()
    expected = measure.dead_by_chance * units
    return Symptom(
        where=tuple(n for n in layer.parameters) or (layer.module,),
        message=f"{len(dead)} of {units} units of {called(layer.module)} are off for all {batch} "
        f"examples, where chance gives {expected:.1f}, also after an optimizer step.",
        evidence={
            "dead": len(dead),
            "units": units,
            "expected": expected,
            "examples": batch,
            "indices": dead[:100],
            "op": measure.node.op,
        },
        fix="set the biases to 0 and draw the weights with He's variance; standardize what comes in",
        severity="error" if len(dead) == units else None,
    )
