"""identical-units: units of a layer that start with the same weights, and so learn the same.

Units that read the same inputs with the same weights put out the same number, and where their outgoing
weights agree too they get the same gradient for ever. Half of a layer's units or more must be repeated for
this to be said; the channels of a depthwise convolution read different inputs and are never alike.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from musigma.init.auditing._facts import Facts
from musigma.init.auditing._report import Finding
from musigma.init.auditing._scene import Scene, check
from musigma.init.auditing.checks.repeated_pieces import pieces_of


@check("identical-units")
def check_identical_units(scene: Scene) -> Iterator[Finding]:
    """One finding a weight."""
    for facts in scene.facts:
        judged = facts.kind in ("weight", "embedding") and facts.trainable and facts.finite
        if not judged or (facts.constant and facts.low == 0.0) or scene.laws[facts.name].family == "identity":
            continue
        rows = units_of(facts)
        if rows.shape[1] < 2 or rows.shape[2] == 0 or _clearly_different(rows) or _unshuffled(scene, facts):
            continue
        if pieces_of(facts.values) is not None:
            continue  # shards that repeat each other: another finding
        units, different = _count(rows)
        if 2 * different <= units:
            said = f"only {different} of {units} units are different"
            said += f": all weights are {facts.low:.4g}" if facts.constant else ""
            yield Finding(
                facts.name,
                f"identical-units: {said}; units that start alike learn alike.",
                {"units": units, "different": different, "std": facts.std},
                "draw the weights at random, each unit's independently",
            )


def units_of(facts: Facts) -> Tensor:
    """The weights that each output of a layer reads its inputs with.

    Args:
        facts: a weight of at least two dimensions.

    Returns:
        (groups, units, inputs).

    Example:
        >>> from musigma.init.auditing._facts import read
        >>> tuple(units_of(read(nn.Conv2d(4, 6, 3, groups=2))[0][0]).shape)
        (2, 3, 18)

    References:
        None.
    """
    owner, values = facts.owner, facts.values
    groups = int(getattr(owner, "groups", 1) or 1) if isinstance(owner, nn.modules.conv._ConvNd) else 1
    if values.shape[0] % groups:
        groups = 1
    rows = values.reshape(groups, -1, *values.shape[1:])
    transposed = isinstance(owner, nn.modules.conv._ConvTransposeNd) or type(owner).__name__ == "Conv1D"
    return (rows.transpose(1, 2) if transposed else rows).flatten(2)


def _clearly_different(rows: Tensor) -> bool:
    """Units with different first weights are different: enough for all but a few layers, and cheap."""
    return 2 * sum(len(torch.unique(group)) for group in rows[:, :, 0]) > rows.shape[0] * rows.shape[1]


def _count(rows: Tensor) -> tuple[int, int]:
    return rows.shape[0] * rows.shape[1], sum(len(torch.unique(group, dim=0)) for group in rows)


def _unshuffled(scene: Scene, facts: Facts) -> bool:
    """Whether the repeated units become neighbouring pixels, as ICNR wants them to."""
    graph = scene.graph
    return graph is not None and any(
        reader.op == "pixel_shuffle" for use in scene.uses(facts) for reader in graph.consumers(use)
    )
