"""tied-embedding-scale: torch's N(0, 1) embedding, tied to the output layer whose logits it makes huge.

Logits of a standard deviation s make the loss at the start ln V + s²/2 nats: with rows of N(0, 1) on d
normalized features s is √d. It is said where the measured logits cost more than a nat; a model that scales
its features before the output layer (T5) is in order.
"""

from collections.abc import Iterator

from torch import nn

from musigma.graph import kinds
from musigma.init.auditing._facts import Facts
from musigma.init.auditing._report import Finding
from musigma.init.auditing._scene import Scene, check

# s²/2 = 1 nat.
_LARGE = 2.0**0.5


@check("tied-embedding-scale")
def check_tied_embedding(scene: Scene) -> Iterator[Finding]:
    """One finding a tied weight."""
    if scene.trained or scene.graph is None or scene.signal is None:
        return
    for facts in scene.facts:
        if facts.kind != "weight" or not _is_embedding(scene, facts) or facts.std < 0.5:
            continue
        for use in scene.uses(facts):
            made = scene.signal.outputs.get(use.index)
            if use.op in kinds.EMBEDDINGS or made is None or not made.rms > _LARGE:
                continue
            wanted = facts.shape[-1] ** -0.5
            yield Finding(
                facts.name,
                f"tied-embedding-scale: an embedding of std {facts.std:.3g} is also the output layer, whose "
                f"values have an rms of {made.rms:.3g}: the loss starts {made.rms**2 / 2:.3g} nats above "
                f"a guess.",
                {
                    "realised": facts.std,
                    "expected": wanted,
                    "ratio": facts.std / wanted,
                    "output_rms": made.rms,
                    "n": facts.count,
                },
                f"draw it with std 1/√d = {wanted:.3g} or less, or scale what enters the output layer by it",
            )
            break


def _is_embedding(scene: Scene, facts: Facts) -> bool:
    owners = [owner for owner, _ in facts.slot.owners.values()]
    read_as = {use.op for use in scene.uses(facts)}
    held = any(isinstance(owner, nn.Embedding | nn.EmbeddingBag) for owner in owners)
    return held and bool(read_as & kinds.EMBEDDINGS) and bool(read_as - kinds.EMBEDDINGS)
