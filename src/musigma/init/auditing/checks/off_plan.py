"""off-plan: a tensor that does not have the law its plan chose.

Said only where a plan is given. Mean and standard deviation must lie within the sampling interval of the law;
constants must be that constant.
"""

from collections.abc import Iterator

from musigma.init.auditing._expected import meets
from musigma.init.auditing._interval import mean_interval, std_interval
from musigma.init.auditing._report import Finding
from musigma.init.auditing._scene import Scene, check


@check("off-plan")
def check_off_plan(scene: Scene) -> Iterator[Finding]:
    """One finding a tensor."""
    if not scene.planned:
        return
    for facts in scene.facts:
        entry, law = scene.entries.get(facts.name), scene.expected.get(facts.name)
        if entry is None or law is None or meets(facts, law, scene.z):
            continue
        low, high = std_interval(law, facts.count, scene.z)
        yield Finding(
            facts.name,
            f"off-plan: mean {facts.mean:.4g} and std {facts.std:.4g} where the plan's {entry.scheme} has "
            f"{law.mean:.4g} and {law.std:.4g} (from {low:.4g} to {high:.4g} by chance).",
            {
                "realised": facts.std,
                "expected": law.std,
                "interval": [low, high],
                "mean": facts.mean,
                "expected_mean": law.mean,
                "mean_interval": list(mean_interval(law, facts.count, scene.z)),
                "ratio": facts.std / law.std if law.std else None,
                "n": facts.count,
            },
            "plan.apply(model), and look for what wrote it afterwards",
        )
