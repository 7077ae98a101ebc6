"""wrong-fan: a law that scales with a fan, drawn with the fan that the shape suggests and the layer hasn't.

torch.nn.init counts fans by shape: of a transposed convolution, stored (in, out/groups, k…), it takes the
outputs for the inputs and leaves the stride out; of a grouped one it counts the outputs of all groups; of
transformers' Conv1D, stored (in, out), it swaps the two. Where a norm follows the factor is divided out
again, and nothing is said.
"""

from collections.abc import Iterator

from torch import nn

from musigma.init.auditing._candidates import SUFFIX, candidates
from musigma.init.auditing._facts import Facts
from musigma.init.auditing._interval import std_interval
from musigma.init.auditing._report import Finding
from musigma.init.auditing._scene import Scene, check
from musigma.init.schemes._scheme import Law


@check("wrong-fan")
def check_wrong_fan(scene: Scene) -> Iterator[Finding]:
    """One finding a weight, where no law with the true fans explains its spread."""
    for facts in scene.facts:
        meant = _meant(scene, facts)
        if meant is None or scene.norm_follows(facts) or scene.as_planned(facts):
            continue
        label, law = meant
        if scene.graph is None and scene.has_norms:
            scene.notes.append(
                f"{facts.name} fits {label} with fans that its shape suggests and the layer hasn't; pass an "
                f"example to know whether a norm makes up for it"
            )
            continue
        yield _finding(scene, facts, label, law)


def _meant(scene: Scene, facts: Facts) -> tuple[str, Law] | None:
    """The law that was drawn with torch's fans, as it is with the true ones."""
    found = scene.laws[facts.name]
    if facts.kind != "weight" or not _counts_differ(facts) or found.label is None or found.law is None:
        return None
    labels = [found.label, *found.others]
    # Where torch swaps the two, what it calls fan_in is the true fan_out.
    wrong = [
        label for label in labels if label.endswith((SUFFIX, "(fan_out)") if _swapped(facts) else SUFFIX)
    ]
    if len(wrong) < len(labels):
        return None
    label = wrong[0].removesuffix(SUFFIX).replace("(fan_out)", "" if _swapped(facts) else "(fan_out)")
    law = next((c.law for c in candidates(facts) if c.label == label), None)
    return None if law is None else (label, law)


def _counts_differ(facts: Facts) -> bool:
    owner = facts.owner
    if _swapped(facts):
        return True
    # A stride alone is left out by He et al. as well: only groups are counted wrong.
    return isinstance(owner, nn.modules.conv._ConvNd) and owner.groups > 1


def _swapped(facts: Facts) -> bool:
    """Whether the weight is stored inputs first."""
    owner = facts.owner
    return isinstance(owner, nn.modules.conv._ConvTransposeNd) or type(owner).__name__ == "Conv1D"


def _finding(scene: Scene, facts: Facts, label: str, law: Law) -> Finding:
    fans, counted = facts.fans, facts.torch_fans
    assert fans is not None
    assert counted is not None
    return Finding(
        facts.name,
        f"wrong-fan: std {facts.std:.4g} is that of {label} with fans {counted.fan_in:g} → "
        f"{counted.fan_out:g}; the layer has {fans.fan_in:g} → {fans.fan_out:g}, which "
        f"makes it {law.std:.4g}.",
        {
            "realised": facts.std,
            "expected": law.std,
            "interval": list(std_interval(law, facts.count, scene.z)),
            "ratio": facts.std / law.std,
            "fan_in": fans.fan_in,
            "fan_out": fans.fan_out,
            "counted_fan_in": counted.fan_in,
            "counted_fan_out": counted.fan_out,
            "n": facts.count,
        },
        "pass the layer's own fans: fans=musigma.init.fans(module)",
    )
