"""outlier-entries: entries that the law of all others can't have drawn, or a heap of them on its bound.

torch's trunc_normal_ takes its bounds in the weight's own units: ±2 at std 0.02 is a hundred standard
deviations, and before torch 2.12 rounding put some entries there (in bfloat16 two in a thousand).
"""

from collections.abc import Iterator

from musigma.init.auditing._facts import Facts
from musigma.init.auditing._identify import FEW
from musigma.init.auditing._outliers import Outliers, outliers_of
from musigma.init.auditing._report import Finding
from musigma.init.auditing._scene import Scene, check

# The heap must be eight entries of the sample, and four times the next value's: coarse dtypes have ties.
_HEAP, _TIMES = 8, 4


@check("outlier-entries")
def check_outliers(scene: Scene) -> Iterator[Finding]:
    """One finding a tensor."""
    if scene.trained:
        return
    for facts in scene.facts:
        judged = facts.kind in ("weight", "embedding") and facts.finite and facts.count >= FEW
        if not judged or scene.laws[facts.name].family in ("constant", "identity", "sparse"):
            continue
        outliers = outliers_of(facts)
        found = _heap(facts) if outliers is None else _told(outliers, facts)
        if found is not None:
            said, evidence = found
            yield Finding(
                facts.name,
                f"outlier-entries: {said}.",
                evidence,
                "draw it anew: musigma.init.truncated_normal_ counts its bounds in standard deviations",
            )


def _told(found: Outliers, facts: Facts) -> tuple[str, dict[str, float]]:
    said = (
        f"{found.count} of {facts.count} entries lie beyond {found.limit:.1f} standard deviations "
        f"({found.sigma:.3g}) of the others, the farthest at {found.farthest:.0f}"
    )
    return said, {
        "outliers": found.count,
        "entries": facts.count,
        "expected": found.sigma,
        "farthest_in_sigmas": found.farthest,
        "low": facts.low,
        "high": facts.high,
        "realised": facts.std,
    }


def _heap(facts: Facts) -> tuple[str, dict[str, float]] | None:
    """Many entries exactly on the largest or the smallest value."""
    x = facts.sample
    counts = {}
    for bound, inner in ((facts.high, x[x < facts.high]), (facts.low, x[x > facts.low])):
        heap = int((x == bound).sum())
        if len(inner):
            neighbour = float(inner.max() if bound == facts.high else inner.min())
            if heap >= _HEAP and heap > _TIMES * int((x == neighbour).sum()):
                counts[bound] = int((facts.values == bound).sum())
    if not counts:
        return None
    places = " and ".join(f"{many} at {bound:.4g}" for bound, many in counts.items())
    said = f"entries are heaped on a bound ({places} of {facts.count}): they were clamped, not truncated"
    return said, {
        "at_bound": sum(counts.values()),
        "entries": facts.count,
        "low": facts.low,
        "high": facts.high,
    }
