"""identical-clone: a weight that is, number for number, another weight of the model, or begins like one.

Layers made by `copy.deepcopy` (nn.TransformerEncoder's) start identical. Layers of different sizes that were
drawn after the same `manual_seed` hold one stream of numbers, scaled. A copy that is not trained (a target
network, a teacher) is meant to be one.
"""

from collections.abc import Iterator

import torch

from musigma.init.auditing._facts import Facts
from musigma.init.auditing._report import Finding
from musigma.init.auditing._scene import Scene, check

# Numbers of a stream that are compared; those of two streams agree by chance in none of their digits.
_FIRST = 32
# 1 − cosine, for entries rounded to bfloat16's nine bits.
_ROUNDED = 1e-4
_REMEDY = "draw each layer's weights independently (a deepcopy or a repeated seed doesn't), or tie the two"


@check("identical-clone")
def check_clones(scene: Scene) -> Iterator[Finding]:
    """One finding for every tensor that repeats an earlier one."""
    drawn = [facts for facts in scene.facts if _is_drawn(scene, facts)]
    if not drawn:
        return
    starts = torch.stack([_start(facts) for facts in drawn])
    alike = (starts @ starts.mT).tril(-1) > 1 - _ROUNDED
    for facts, row in zip(drawn, alike, strict=True):
        if bool(row.any()):
            yield _finding(facts, [drawn[i] for i in row.nonzero().flatten().tolist()])


def _is_drawn(scene: Scene, facts: Facts) -> bool:
    usual = facts.kind in ("weight", "embedding") and facts.finite and facts.trainable
    # A tensor of a few entries may be another's by chance in half precision.
    return usual and not facts.constant and facts.count >= 8 and scene.laws[facts.name].family != "identity"


def _start(facts: Facts) -> torch.Tensor:
    """The first numbers of a tensor, as a vector of length 1; zeros where they say nothing."""
    rows = facts.values[: _FIRST if facts.values[0].numel() < _FIRST else 1]
    first = rows.flatten()[:_FIRST].double().cpu()
    if len(first) < 8 or bool((first == first[0]).all()) or int(first.count_nonzero()) < 8:
        return torch.zeros(_FIRST, dtype=torch.float64)
    padded = torch.nn.functional.pad(first, (0, _FIRST - len(first)))
    return padded / padded.norm()


def _finding(facts: Facts, earlier: list[Facts]) -> Finding:
    whole = [f for f in earlier if f.shape == facts.shape and torch.equal(f.values, facts.values)]
    first = (whole or earlier)[0]
    said = (
        f"it holds the same {facts.count} numbers as {first.name}"
        if whole
        else f"its numbers are those of {first.name} times {facts.std / first.std:.3g}, drawn with one seed"
    )
    return Finding(
        facts.name,
        f"identical-clone: {said}; the two layers start as one.",
        {"same_as": first.name, "entries": facts.count, "std": facts.std, "exact": bool(whole)},
        _REMEDY,
    )
