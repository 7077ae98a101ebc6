"""unwritten: a tensor that nothing wrote: not finite, random memory, or zeros where none may be.

Memory that was only reserved (`to_empty`, `torch.empty`, keys that a checkpoint lacked) holds NaN, bits of
something else, or zeros. Bits of something else spread over many orders of magnitude: no law in use has a
finite share of numbers a trillion times smaller than the median, nor any ten billion times larger.

All zeros are right in many places: biases, the last layer, the end of a residual branch (Fixup, LoRA), a
gate (adaLN-Zero), a query. With an example the place is known: a layer may start at zero where its output is
added to another signal, multiplied with one, or returned. Without one, zeros that the same layer of several
blocks share are taken for meant.
"""

import math
from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from musigma.graph import Node, kinds
from musigma.init.auditing._facts import Facts, buffers, sampled
from musigma.init.auditing._report import Finding
from musigma.init.auditing._scene import Scene, check

# A normal law has 1e-12·(0.54 n) entries below 1e-12 medians: none in a sample.
_TINY = 1e-12
# ... and none beyond 10 medians; heavy tails of a trained tensor reach a thousand.
_HUGE = 1e10
_PASSED = (
    kinds.VIEWS | kinds.DROPOUTS | kinds.PADDINGS | kinds.POOLINGS | kinds.ACTIVATIONS | kinds.UPSAMPLINGS
)
_REMEDY = "write it: musigma.init.initialize, or the module's own reset_parameters()"


@check("unwritten")
def check_unwritten(scene: Scene) -> Iterator[Finding]:
    """One finding a tensor, buffers included."""
    zero = [
        facts for facts in scene.facts if facts.constant and facts.low == 0.0 and _must_not_be_zero(facts)
    ]
    kin = Counter(_suffix(facts) for facts in zero)
    for facts in scene.facts:
        garbage = _garbage(facts.values, facts.sample)
        if garbage is not None:
            yield _finding(facts.name, *garbage)
        elif facts in zero and not _may_be_zero(scene, facts, kin):
            yield _finding(facts.name, "every entry is zero", {"zeros": facts.count, "entries": facts.count})
    for name, owner, leaf, values in buffers(scene.model):
        garbage = _garbage_buffer(owner, leaf, values)
        if garbage is not None:
            yield _finding(name, *garbage)


def _finding(name: str, what: str, evidence: dict[str, float]) -> Finding:
    return Finding(name, f"unwritten: {what}, as in memory that nothing has written to.", evidence, _REMEDY)


def _garbage(values: Tensor, sample: Tensor) -> tuple[str, dict[str, float]] | None:
    """What is wrong with numbers whatever they are for."""
    low, high = (float(end) for end in torch.aminmax(values))
    count = values.numel()
    if not (math.isfinite(low) and math.isfinite(high)):
        finite = int(values.isfinite().sum())
        nans = int(values.isnan().sum())
        said = f"{count - finite} of {count} entries are not finite ({nans} NaN)"
        return said, {"not_finite": count - finite, "nan": nans, "entries": count}
    # The sample tells the middle, and whether tiny numbers are common; the largest is known of all entries.
    size = sample.abs()
    size = size[size > 0]
    if len(size) < 4:
        return None
    median, largest = float(size.median()), max(high, -low)
    tiny, smallest = int((size < _TINY * median).sum()), float(size.min())
    if largest > _HUGE * median or tiny > 1:
        said = f"the entries run from {smallest:.3g} to {largest:.3g} about a median of {median:.3g}"
        return said, {
            "smallest": smallest,
            "median": median,
            "largest": largest,
            "tiny_share": tiny / len(size),
        }
    return None


def _garbage_buffer(owner: nn.Module, leaf: str, values: Tensor) -> tuple[str, dict[str, float]] | None:
    if leaf == "running_var" and bool((values <= 0).all()):
        said = "no running variance is positive"
        return said, {"largest": float(values.max()), "entries": values.numel()}
    if leaf in ("running_mean", "running_var"):
        # A variance may span any range.
        judged = leaf == "running_mean" or not values.isfinite().all()
        return _garbage(values, sampled(values)) if judged else None
    # A mask is made of −inf and 0: only NaN is wrong everywhere.
    nans = int(values.isnan().sum())
    if nans:
        said = f"{nans} of {values.numel()} entries are NaN"
        return said, {"nan": nans, "entries": values.numel()}
    return None


def _must_not_be_zero(facts: Facts) -> bool:
    if facts.kind in ("weight", "embedding"):
        return True
    # Some write their norm's weight as 1 + w: only those whose formula is known count.
    home = type(facts.owner).__module__.partition(".")[0]
    return facts.kind == "norm" and facts.leaf == "weight" and home in ("torch", "musigma")


def _suffix(facts: Facts) -> str:
    """The name without its block: `blocks.3.fc.weight` and `blocks.7.fc.weight` are kin."""
    return ".".join("#" if part.isdigit() else part for part in facts.name.split("."))


def _may_be_zero(scene: Scene, facts: Facts, kin: Counter[str]) -> bool:
    if scene.graph is None:
        matrices = [f for f in scene.facts if f.kind in ("weight", "embedding")]
        last = bool(matrices) and facts is matrices[-1] and len(matrices) > 1
        return last or ("#" in _suffix(facts) and kin[_suffix(facts)] > 1 and len(kin) < _kinds_of(scene))
    if any(branch.last_parameter in facts.names for branch in scene.branches):
        return True
    uses = scene.uses(facts)
    return bool(uses) and all(_ends_well(scene, use) for use in uses)


def _kinds_of(scene: Scene) -> int:
    """How many kinds of layers there are: where all of them are zero, none is meant to be."""
    return len({_suffix(f) for f in scene.facts if _must_not_be_zero(f)})


def _ends_well(scene: Scene, use: Node) -> bool:
    """Whether a zero that a layer puts out leaves another signal alone, or is the model's own output."""
    graph = scene.graph
    assert graph is not None
    pending, seen = [use], {use.index}
    while pending:
        node = pending.pop()
        if any(isinstance(s, int) and int(s) == node.index for s in graph.output):
            continue
        readers = graph.consumers(node)
        if not readers:
            continue
        for reader in readers:
            signals = sum(map(graph.is_live, reader.inputs))
            if graph.weights(reader) or (signals > 1 and reader.op in kinds.CONCATENATIONS):
                return False
            passed = reader.op in _PASSED or reader.op in kinds.NORMS or signals == 1
            if signals < 2 and passed and reader.index not in seen:
                seen.add(reader.index)
                pending.append(reader)
    return True
