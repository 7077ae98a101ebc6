"""identical-clone: a weight that is, number for number, another weight of the model.

Layers made by `copy.deepcopy` (nn.TransformerEncoder's) start identical. A copy that is not trained (a target
network, a teacher) is meant to be one.
"""

from collections.abc import Iterator

import torch

from musigma.init.auditing._facts import Facts
from musigma.init.auditing._report import Finding
from musigma.init.auditing._scene import Scene, check


@check("identical-clone")
def check_clones(scene: Scene) -> Iterator[Finding]:
    """One finding for every tensor that repeats an earlier one."""
    originals: dict[object, list[Facts]] = {}
    for facts in scene.facts:
        drawn = facts.kind in ("weight", "embedding") and facts.finite and not facts.constant
        if not (drawn and facts.trainable) or scene.laws[facts.name].family == "identity":
            continue
        # A tensor of one entry or two may be another's by chance in half precision.
        if facts.count < 8:
            continue
        alike = originals.setdefault((facts.shape, facts.mean, facts.std, facts.low, facts.high), [])
        first = next((f for f in alike if torch.equal(f.values, facts.values)), None)
        if first is None:
            alike.append(facts)
            continue
        yield Finding(
            facts.name,
            f"identical-clone: it holds the same {facts.count} numbers as {first.name}; the two layers start "
            f"as one.",
            {"same_as": first.name, "entries": facts.count, "std": facts.std},
            "draw each layer's weights independently (deepcopy copies them), or tie the two on purpose",
        )
