"""INI209 dead-relu: more units are off for every example than chance explains.

## What it does

Counts the units behind a rectifier that are zero for every example at every position, however the
rectifier is written (`nn.ReLU6`, `h.clamp(min=0)`, `torch.maximum(h, zeros)`), and whatever norm or
dropout stands between it and the layer with weights. With zero-mean weights a unit's pre-activations
over the batch are Gaussian, so the chance that it is off for all n examples is 2⁻ⁿ where these are
unlike, but near one half where they look alike, as they do deep in a healthy net; it is measured with
random mixtures of the layer's own units, and with its own biases under a random sign; behind a norm
with biases of 0, as norms start. The rule fires where the count exceeds that by four standard errors
and by a tenth of the units, and still does after an optimizer step on a copy. It names the norm's bias
or weight where that is what keeps the units off.

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

The treatment draws the weights before the rectifier anew with He's variance and sets their biases to 0; of
a norm that is to blame, it sets the bias to 0 or the weight to 1 and draws nothing.
Units that died in training can be specialised rather than dead: look at more than one batch first.

## References

Lu, Shin, Su & Karniadakis 2020, "Dying ReLU and initialization", section 3.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from musigma.doctor import _rules
from musigma.doctor._examination import Examination
from musigma.doctor._rules import Symptom
from musigma.doctor.probes._nodes import MIXTURES, NodeMeasure
from musigma.doctor.probes._trace import Trace
from musigma.doctor.probes._words import called
from musigma.graph import Edge, Node, Parameter, kinds

_SIGMAS = 4.0
# A tenth of a layer is what one may lose without noticing; below it the finding would be noise to its reader.
_SHARE = 0.1


# What may stand between a rectifier and what makes its units: it keeps their signs, or makes them 0.
_BETWEEN = kinds.VIEWS | kinds.DROPOUTS


@_rules.rule("INI209", "dead-relu", severity="warning")
def check(exam: Examination) -> Iterator[Symptom]:
    """One symptom per rectifier with more dead units than chance gives."""
    if not exam.fresh or exam.batch < 2:
        return
    for measure in exam.trace.nodes:
        if measure.rectifies is None or not _exceeds(measure):
            continue
        norm, layer = _makers(exam.trace, measure)
        if norm is None and layer is None:
            continue
        if _exceeds(exam.step.trace.nodes[measure.node.index]):
            yield _symptom(exam, measure, _culprit(exam, measure, norm), layer or norm)


def _makers(trace: Trace, measure: NodeMeasure) -> tuple[Node | None, Node | None]:
    """The norm and the weight layer whose output a rectifier takes, as far as there are such."""
    fused = measure.node.op in kinds.NORMS
    norm = measure.node if fused else None
    above = _source(trace, measure.node, measure.rectifies or "input")
    while above is not None and (above.op in _BETWEEN or (above.op in kinds.NORMS and norm is None)):
        norm = above if above.op in kinds.NORMS else norm
        above = _source(trace, above)
    return norm, above if above is not None and trace.graph.weights(above) else None


def _source(trace: Trace, node: Node, argument: str = "input") -> Node | None:
    sources = node.arguments.get(argument, ())
    return trace.graph.nodes[sources[0]] if len(sources) == 1 and isinstance(sources[0], Edge) else None


def _exceeds(measure: NodeMeasure) -> bool:
    if measure.dead is None:
        return False
    units, chance = measure.dead.numel(), measure.dead_by_chance
    # Of the count among the units and of the share among the mixtures; a share that was never seen there may
    # still be one in so many units.
    error = (max(chance, 1 / units) * (1 - chance) * (1 / units + 1 / MIXTURES)) ** 0.5
    return float(measure.dead.double().mean()) > chance + max(_SIGMAS * error, _SHARE)


@dataclass(frozen=True)
class _Culprit:
    """A norm's parameter that keeps units off, and the median of its values there."""

    node: Node
    parameter: str
    kind: str
    value: float


def _culprit(exam: Examination, measure: NodeMeasure, norm: Node | None) -> _Culprit | None:
    if norm is None or measure.dead is None or not bool(measure.dead.any()):
        return None
    dead = measure.dead
    bias, weight = (_per_unit(exam, norm, kind, dead.numel()) for kind in ("bias", "weight"))
    if bias is not None and float((beta := bias[1][dead]).median()) < 0:
        made = exam.trace.nodes[norm.index].units
        # What the layer before adds beside the norm's own bias, on the median unit that is off.
        rest = 0.0 if norm is measure.node or made is None else float((made.mean[dead] - beta).abs().median())
        if rest < float(beta.abs().median()):
            return _Culprit(norm, bias[0], "bias", float(beta.median()))
    if weight is not None and not bool(weight[1][dead].any()):
        return _Culprit(norm, weight[0], "weight", 0.0)
    return None


def _per_unit(exam: Examination, norm: Node, kind: str, units: int) -> tuple[str, Tensor] | None:
    sources = norm.arguments.get(kind, ())
    if len(sources) != 1 or not isinstance(sources[0], Parameter):
        return None
    value = exam.parameters.get(exam.graph.canonical(sources[0].name))
    if value is None or value.numel() != units:
        return None
    return sources[0].name, value.detach().double().flatten().to("cpu")


def _symptom(
    exam: Examination, measure: NodeMeasure, culprit: _Culprit | None, maker: Node | None
) -> Symptom:
    assert measure.dead is not None
    assert maker is not None
    dead = measure.dead.nonzero().flatten().tolist()
    units = measure.dead.numel()
    expected = measure.dead_by_chance * units
    made_by = maker if culprit is None else culprit.node
    said = (
        f"{len(dead)} of {units} units of {called(made_by.module)} are off for all {exam.batch} "
        f"examples, where chance gives {expected:.1f}, also after an optimizer step"
    )
    fix = "set the biases to 0 and draw the weights with He's variance; standardize what comes in"
    if culprit is not None:
        said += f": its {culprit.kind} is {culprit.value:.4g} there"
        fix = f"set {culprit.parameter} to {0 if culprit.kind == 'bias' else 1}, where it starts"
    return Symptom(
        where=(culprit.parameter,) if culprit is not None else maker.parameters or (maker.module,),
        message=f"{said}.",
        evidence={
            "dead": len(dead),
            "units": units,
            "expected": expected,
            "examples": exam.batch,
            "indices": dead[:100],
            "op": measure.node.op,
            "norm": None if culprit is None else culprit.parameter,
        },
        fix=fix,
        severity="error" if len(dead) == units else None,
    )
