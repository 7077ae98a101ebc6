"""residual-unscaled: branches of a residual stream that add up without having been scaled for it.

A stream to which n branches add variance v each grows to 1 + n·v. GPT-2 therefore divides the last weight of
every branch by √n. Ports that look for it under a name their model doesn't have leave it undone, or scale
another weight. It is seen where weights of different fans share one fixed spread (in GPT-2's manner, normal
0.02): the last weight of a branch then must have less than the others. Fan-scaled laws, branches that a
norm follows (post-norm, and ResNets whose branch ends in one), branches that begin at 0 and branches with a
learned scale are left alone.
"""

import math
from collections.abc import Iterator
from statistics import median

from musigma.graph import Branch, kinds
from musigma.init.auditing._facts import Facts
from musigma.init.auditing._identify import FEW
from musigma.init.auditing._interval import std_interval
from musigma.init.auditing._report import Finding
from musigma.init.auditing._scene import Scene, check
from musigma.init.schemes._scheme import Law

# Two blocks of two branches: fewer make no difference that √n would have to undo.
_FEWEST = 4


@check("residual-unscaled")
def check_residual(scene: Scene) -> Iterator[Finding]:
    """One finding for every branch's last weight."""
    if scene.trained or scene.graph is None:
        return
    branches = [branch for branch in scene.branches if _adds_plainly(scene, branch)]
    ends = {f.name: f for b in branches if (f := scene.find(str(b.last_parameter))) is not None}
    count = sum(scene.find(str(b.last_parameter)) is not None for b in branches)
    if count < _FEWEST:
        return
    inner = _inner(scene, branches, ends)
    base = _fixed_spread(inner)
    if base is None:
        return
    unscaled = [f for f in ends.values() if _near(f, base, scene.z) and not scene.as_planned(f)]
    smaller = [f for f in inner if _near(f, base / math.sqrt(count), scene.z)] if unscaled else []
    for facts in unscaled:
        yield _finding(scene, facts, base, count, [f.name for f in smaller])
    for facts in smaller:
        yield _instead(scene, facts, base, count, unscaled[0].name)


def _instead(scene: Scene, facts: Facts, base: float, count: int, end: str) -> Finding:
    return Finding(
        facts.name,
        f"residual-unscaled: it has been scaled to {facts.std:.4g} = {base:.4g}/√{count}, but ends no "
        f"residual branch; {end} does, and has not been.",
        {
            "realised": facts.std,
            "expected": base,
            "interval": list(std_interval(Law(0.0, base**2), facts.count, scene.z)),
            "ratio": facts.std / base,
            "branches": count,
            "n": facts.count,
            "not_scaled": end,
        },
        f"multiply it by √{count}, and divide the last weight of each branch by that",
    )


def _finding(scene: Scene, facts: Facts, base: float, count: int, smaller: list[str]) -> Finding:
    wanted = base / math.sqrt(count)
    instead = f"; {smaller[0]} has been scaled in its place" if smaller else ""
    return Finding(
        facts.name,
        f"residual-unscaled: it ends one of {count} residual branches and has the std {facts.std:.4g} of all "
        f"other weights, where {wanted:.4g} = {base:.4g}/√{count} keeps the sum{instead}.",
        {
            "realised": facts.std,
            "expected": wanted,
            "interval": list(std_interval(Law(0.0, wanted**2), facts.count, scene.z)),
            "ratio": facts.std / wanted,
            "branches": count,
            "n": facts.count,
            "scaled_instead": smaller,
            "stream_growth": _growth(scene),
        },
        f"divide it by √{count} (once): musigma.init.initialize(model, example, scheme='gpt2') finds the "
        f"branches by what is added, not by name",
    )


def _adds_plainly(scene: Scene, branch: Branch) -> bool:
    """Whether what the branch's last weight puts out is added as it is, to a stream that goes on as it is."""
    graph = scene.graph
    assert graph is not None
    if branch.last_parameter is None or branch.scalings or branch.add.op in kinds.NORMS:
        return False
    after = max((node.index for node in branch.nodes if graph.weights(node)), default=-1)
    if any(norm.index > after for norm in branch.norms) or any(
        node.op in kinds.NORMS for node in branch.skip
    ):
        return False
    readers = graph.consumers(branch.add)
    # Post-norm: the sum goes into a norm and nowhere else, but for the last of all.
    return not (len(readers) == 1 and readers[0].op in kinds.NORMS) or branch is scene.branches[-1]


def _inner(scene: Scene, branches: list[Branch], ends: dict[str, Facts]) -> list[Facts]:
    """The other weights of the branches."""
    graph = scene.graph
    assert graph is not None
    found: dict[str, Facts] = {}
    for branch in branches:
        for node in branch.nodes:
            found |= {f.name: f for f in scene.weights(node) if f.name not in ends and f.kind == "weight"}
    return list(found.values())


def _fixed_spread(weights: list[Facts]) -> float | None:
    """The one spread of weights whose fans differ or, where they don't, a spread that no fan explains."""
    judged = [f for f in weights if f.count >= FEW and f.std > 0 and f.fans is not None]
    if len(judged) < 2:
        return None
    # Some may have been scaled by mistake: half must agree, and the larger of two halves is the base.
    groups = [[f for f in judged if abs(f.std / one.std - 1) < 0.1] for one in judged]
    alike = max(groups, key=lambda group: (len(group), median(f.std for f in group)))
    if 2 * len(alike) < len(judged):
        return None
    base = median(f.std for f in alike)
    fans = {f.fans.fan_in for f in alike if f.fans is not None}
    # Var·fan_in of the usual laws runs from 1/3 (torch) to 2 (He); 0.02 leaves less up to a width of 800.
    low = all(f.std**2 * f.fans.fan_in < 0.3 for f in alike if f.fans is not None)
    return base if (len(fans) > 1 and max(fans) > 1.5 * min(fans)) or low or _is_named(base) else None


def _is_named(base: float) -> bool:
    """GPT-2's and BERT's own spread."""
    return abs(base / 0.02 - 1) < 0.02


def _near(facts: Facts, std: float, z: float) -> bool:
    low, high = std_interval(Law(0.0, std**2), facts.count, z)
    # The base is itself a median of realised spreads.
    return low * 0.97 <= facts.std <= high * 1.03


def _growth(scene: Scene) -> float | None:
    """Second moment of the stream after its last branch over that after its first."""
    signal = scene.signal
    assert signal is not None
    sums = [signal.outputs[b.add.index].square for b in scene.branches if b.add.index in signal.outputs]
    return sums[-1] / sums[0] if len(sums) > 1 and sums[0] > 0 else None
