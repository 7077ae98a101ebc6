"""repeated-pieces: a tensor put together from pieces that hold the same numbers.

Ranks or shards that draw with the same seed fill every piece alike: the layer has a fraction of the units it
seems to have.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from musigma.init.auditing._report import Finding
from musigma.init.auditing._scene import Scene, check

_MOST = 64


@check("repeated-pieces")
def check_repeated_pieces(scene: Scene) -> Iterator[Finding]:
    """One finding a tensor, with the largest number of equal pieces."""
    yield from _across_ranks(scene)
    for facts in scene.facts:
        drawn = facts.kind in ("weight", "embedding") and facts.finite and not facts.constant
        if not drawn or scene.laws[facts.name].family in ("identity", "sparse"):
            continue
        found = pieces_of(facts.values)
        if found is None:
            continue
        pieces, dim = found
        if pieces == facts.shape[dim] and not facts.trainable:
            continue
        yield Finding(
            facts.name,
            f"repeated-pieces: its {pieces} pieces along dim {dim} hold the same numbers, as from shards "
            f"drawn with one seed.",
            {"pieces": pieces, "dim": dim, "entries": facts.count},
            "draw the whole tensor from one seed and cut it, or give every piece a seed of its own "
            "(musigma.init.apply does the former)",
        )


def _across_ranks(scene: Scene) -> Iterator[Finding]:
    """Pieces of one sharded tensor that two ranks hold alike; all ranks have to make the audit."""
    sharded = {f.name: f for f in scene.facts if _is_sharded(f.slot.parameter)}
    if not sharded or not dist.is_initialized():
        return
    mine = {
        name: (_place(f.slot.parameter), None if f.constant else (f.mean, f.std, f.low, f.high))
        for name, f in sharded.items()
    }
    everyone: list[dict[str, tuple[tuple[int, ...], object]]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, mine)
    for name, (place, numbers) in mine.items():
        if numbers is None:
            continue
        others = [(rank, held[name]) for rank, held in enumerate(everyone) if name in held]
        alike = [rank for rank, held in others if held[1] == numbers and held[0] != place]
        if alike:
            yield Finding(
                name,
                f"repeated-pieces: ranks {dist.get_rank()} and {', '.join(map(str, alike))} hold the same "
                f"numbers for different pieces: they drew with one seed.",
                {"rank": dist.get_rank(), "same_as": alike, "entries": sharded[name].count},
                "draw the whole tensor from one seed and cut it: musigma.init.apply and initialize do",
            )


def _is_sharded(parameter: Tensor) -> bool:
    return any(placement.is_shard() for placement in getattr(parameter, "placements", ()))


def _place(parameter: Any) -> tuple[int, ...]:
    """Which piece of the tensor this rank holds: its coordinates along the mesh dims that cut it."""
    coordinate = parameter.device_mesh.get_coordinate() or ()
    return tuple(c for c, p in zip(coordinate, parameter.placements, strict=False) if p.is_shard())


def pieces_of(values: Tensor) -> tuple[int, int] | None:
    """(number of equal pieces, dim) of the finest division in which all pieces agree; None if there is none.

    Args:
        values: (rows, columns, *).

    Returns:
        None also where every row (or every column) is the same.

    Example:
        >>> pieces_of(torch.arange(8.0).reshape(4, 2).repeat(3, 1))
        (3, 0)

    References:
        None.
    """
    for dim in range(min(values.dim(), 2)):
        size = values.shape[dim]
        for pieces in range(min(size // 2, _MOST), 1, -1):
            if size % pieces == 0 and _agree(values, dim, size // pieces):
                return pieces, dim
    return None


def _agree(values: Tensor, dim: int, length: int) -> bool:
    first, second = values.narrow(dim, 0, length), values.narrow(dim, length, length)
    corner = (slice(0, 4), slice(0, 4))
    if first[corner].numel() < 4 or not torch.equal(first[corner], second[corner]):
        return False
    if torch.equal(first.narrow(dim, 0, 1), first.narrow(dim, 1, 1)):
        return False  # repeated units, which is another finding
    rest = values.narrow(dim, length, values.shape[dim] - length)
    return torch.equal(values.narrow(dim, 0, values.shape[dim] - length), rest) and bool(first.std() > 0)
