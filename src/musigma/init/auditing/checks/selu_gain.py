"""selu-gain: a self-normalizing layer drawn with torch's gain of 3/4, which breaks self-normalization.

SELU keeps mean 0 and variance 1 with Var(W) = 1/fan_in. `calculate_gain("selu")` is 3/4: after 50 layers a
standard deviation of 0.18 is left.
"""

import math
from collections.abc import Iterator

from musigma.init.auditing._candidates import cut, normal, uniform
from musigma.init.auditing._identify import within
from musigma.init.auditing._interval import std_interval
from musigma.init.auditing._report import Finding
from musigma.init.auditing._scene import Scene, check

_LAWS = {"normal": normal, "uniform": uniform, "truncated": cut}
_GAIN = 0.75


@check("selu-gain")
def check_selu_gain(scene: Scene) -> Iterator[Finding]:
    """One finding a weight before a SELU that no norm precedes."""
    for facts in scene.facts:
        family = scene.family(facts)
        if facts.kind != "weight" or not family or facts.fans is None:
            continue
        if scene.activation_of(facts) != "selu" or scene.norm_follows(facts) or scene.as_planned(facts):
            continue
        right = _LAWS[family](1 / math.sqrt(facts.fans.fan_in))
        wrong = _LAWS[family](_GAIN * right.std)
        if within(facts, wrong, scene.z) and not within(facts, right, scene.z):
            yield Finding(
                facts.name,
                f"selu-gain: std {facts.std:.4g} is 3/4 of the {right.std:.4g} with which SELU keeps a "
                f"variance of 1.",
                {
                    "realised": facts.std,
                    "expected": right.std,
                    "interval": list(std_interval(right, facts.count, scene.z)),
                    "ratio": facts.std / right.std,
                    "n": facts.count,
                },
                "draw it with Var(W) = 1/fan_in: musigma.init.lecun_normal_",
            )
