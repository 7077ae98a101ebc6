"""off-center: weights with a mean that outweighs their spread.

With n inputs of second moment a² and mean m, a mean μ of the weights adds n²·μ²·m² to what n·σ²·a² makes:
where n·μ² exceeds σ², all units of a layer mostly say the same. U[0, 1] does that from a single input on. A
norm behind the layer subtracts what units have in common.
"""

from collections.abc import Iterator

from musigma.init.auditing._identify import FEW
from musigma.init.auditing._interval import mean_interval
from musigma.init.auditing._report import Finding
from musigma.init.auditing._scene import Scene, check
from musigma.init.schemes._scheme import Law


@check("off-center")
def check_off_center(scene: Scene) -> Iterator[Finding]:
    """One finding a weight."""
    if scene.trained:
        return
    for facts in scene.facts:
        drawn = facts.kind == "weight" and facts.trainable and scene.laws[facts.name].family is not None
        if not drawn or facts.fans is None or facts.constant or scene.as_planned(facts):
            continue
        if scene.laws[facts.name].family in ("identity", "orthogonal", "contaminated"):
            continue
        low, high = mean_interval(Law(0.0, facts.std**2), facts.count, scene.z)
        common = facts.fans.fan_in * facts.mean**2 / facts.std**2
        behind_norm = scene.has_norms if scene.graph is None else scene.norm_follows(facts)
        if facts.count < FEW or low <= facts.mean <= high or common <= 1 or behind_norm:
            continue
        yield Finding(
            facts.name,
            f"off-center: mean {facts.mean:.3g} beside std {facts.std:.3g} on {facts.fans.fan_in:g} inputs, "
            f"so what all units have in common is up to {common:.3g} times what tells them apart.",
            {
                "mean": facts.mean,
                "realised": facts.std,
                "mean_interval": [low, high],
                "common": common,
                "fan_in": facts.fans.fan_in,
                "n": facts.count,
            },
            "draw it with mean 0",
        )
