"""Which cells there are: the whole product, the full grid and the quick one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import product

from musigma.lab.bench._cell import CHANNELS, DTYPES, ROWS, Cell

TOKEN, FEW = (1, 768), (64, 768)
MATRICES = ((4096, 1024), (2048, 4096), (65536, 64), (512, 16384))
VECTORS = (256, 512)
EARLY, MIDDLE, LATE, CLIP = (32, 64, 56, 56), (16, 256, 14, 14), (8, 512, 7, 7), (2, 32, 16, 56, 56)
IMAGES = (EARLY, MIDDLE, LATE, CLIP)
FLOAT, BFLOAT = ("float32",), ("bfloat16",)
BOTH = tuple(DTYPES)
FIRST, LAST = (False,), (True,)
EITHER = (False, True)

# Activations that models put behind these norms: ResNet's, EfficientNet's, a diffusion U-Net's, data2vec's, a
# gated RMSNorm's, style transfer's.
_WITH_ACTIVATION = {
    "layer_norm": ("gelu",),
    "rms_norm": ("silu",),
    "batch_norm": ("relu", "silu"),
    "batch_norm_eval": ("relu",),
    "group_norm": ("silu",),
    "instance_norm": ("relu",),
}


def _family(
    variants: str, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[str], last: Sequence[bool] = FIRST
) -> list[Cell]:
    """The product of variants (names with blanks between), shapes, dtypes and layouts; forward alone."""
    return [
        Cell(op, shape, dtype, layout, "add" in more, next((m for m in more if m != "add"), None))
        for (op, *more), shape, dtype, layout in product(
            (variant.split("+") for variant in variants.split()), shapes, dtypes, last
        )
    ]


def _chosen() -> list[Cell]:
    """The full grid's ops and inputs: everything plain, and fused forms where a model would have them."""
    return [
        *_family("layer_norm rms_norm", (TOKEN, FEW, *MATRICES), BOTH),
        *_family("add_layer_norm add_rms_norm", (FEW, *MATRICES[:2]), BOTH),
        *_family("layer_norm+gelu rms_norm+silu", MATRICES[:1], BOTH),
        *_family("batch_norm batch_norm_eval", (VECTORS,), BOTH),
        *_family("batch_norm batch_norm+relu", (EARLY,), BOTH, EITHER),
        *_family("batch_norm", (MIDDLE, LATE, CLIP), FLOAT, EITHER),
        *_family("batch_norm", (LATE,), BFLOAT, LAST),
        *_family("batch_norm+relu", (MIDDLE,), BOTH, LAST),
        *_family("batch_norm+add+relu", (EARLY,), BOTH, EITHER),
        *_family("batch_norm+add+relu", (MIDDLE,), BOTH),
        *_family("batch_norm+silu", (MIDDLE,), BOTH, LAST),
        *_family("batch_norm_eval", (EARLY,), BOTH, EITHER),
        *_family("batch_norm_eval+relu", (EARLY, LATE), FLOAT, EITHER),
        *_family("batch_norm_eval+add+relu", (EARLY,), BFLOAT, LAST),
        *_family("group_norm", (EARLY, MIDDLE), BOTH, EITHER),
        *_family("group_norm", (VECTORS, CLIP), FLOAT),
        *_family("group_norm", (LATE,), FLOAT, EITHER),
        *_family("group_norm+silu", (MIDDLE,), BOTH, EITHER),
        *_family("group_norm+silu", (EARLY,), BOTH, LAST),
        *_family("instance_norm", (EARLY,), BOTH, EITHER),
        *_family("instance_norm", (MIDDLE, CLIP), FLOAT),
        *_family("instance_norm+relu", (EARLY,), BOTH),
    ]


def _first_looked_at() -> list[Cell]:
    """The quick grid's: each op where it is large, and where a call's overhead is what it costs."""
    return [
        *_family("layer_norm", (TOKEN,), FLOAT),
        *_family("layer_norm rms_norm", (FEW, MATRICES[0]), FLOAT),
        *_family("layer_norm rms_norm add_rms_norm", (MATRICES[0],), BFLOAT),
        *_family("add_layer_norm", (FEW,), FLOAT),
        *_family("batch_norm group_norm", (VECTORS,), FLOAT),
        *_family("batch_norm+relu", (EARLY,), FLOAT, EITHER),
        *_family("batch_norm+add+relu", (EARLY,), BFLOAT, LAST),
        *_family("batch_norm_eval+relu", (LATE,), FLOAT),
        *_family("group_norm", (MIDDLE,), FLOAT, EITHER),
        *_family("group_norm+silu", (MIDDLE,), BFLOAT, LAST),
        *_family("instance_norm", (LATE,), FLOAT),
    ]


def _compiled() -> list[Cell]:
    """Where torch.compile is a peer too: a compile takes seconds, so not everywhere."""
    return [
        *_family("layer_norm rms_norm", (FEW, MATRICES[0]), FLOAT),
        *_family("layer_norm rms_norm", (MATRICES[0],), BFLOAT),
        *_family("add_layer_norm", (MATRICES[0],), FLOAT),
        *_family("add_rms_norm", (MATRICES[0],), BFLOAT),
        *_family("layer_norm+gelu", (MATRICES[0],), FLOAT),
        *_family("rms_norm+silu", (MATRICES[0],), BFLOAT),
        *_family("batch_norm", (VECTORS,), FLOAT),
        *_family("batch_norm+relu", (EARLY,), FLOAT, EITHER),
        *_family("batch_norm+relu", (EARLY,), BFLOAT, LAST),
        *_family("batch_norm+add+relu", (EARLY,), BFLOAT, LAST),
        *_family("batch_norm_eval+relu", (EARLY,), FLOAT),
        *_family("group_norm", (MIDDLE,), FLOAT, EITHER),
        *_family("group_norm+silu", (MIDDLE,), BFLOAT, LAST),
        *_family("instance_norm", (EARLY,), FLOAT),
    ]


# In the quick grid every compile is one second in twenty.
_COMPILED_QUICK = (
    "layer_norm 4096×1024 float32",
    "rms_norm 4096×1024 bfloat16",
    "batch_norm+relu 32×64×56×56 float32 f",
)


def _directions(cells: Iterable[Cell], threads: Sequence[int]) -> list[Cell]:
    """Each cell forward alone and with backward, at every number of threads; none twice.

    By stored statistics one mostly infers: their backward is timed at one size.
    """
    found = [
        replace(cell, backward=backward, threads=n)
        for cell in dict.fromkeys(cells)
        for n in threads
        for backward in EITHER
        if not (backward and cell.op == "batch_norm_eval" and cell.shape != EARLY)
    ]
    return list(dict.fromkeys(found))


def full(threads: Sequence[int] = (1, 2)) -> list[Cell]:
    """The grid that `musigma bench` runs.

    Args:
        threads: the numbers of threads each cell runs on.

    Example:
        >>> from musigma.lab import bench
        >>> {cell.op for cell in bench.full()} == {*bench.ROWS, *bench.CHANNELS}
        True
    """
    return _directions(_chosen(), threads)


def quick(threads: Sequence[int] = (2,)) -> list[Cell]:
    """About forty cells, for two minutes."""
    return _directions(_first_looked_at(), threads)


def everything(threads: Sequence[int] = (1, 2)) -> list[Cell]:
    """The whole product, to pick single cells from while a kernel is being written."""
    cells = []
    for op in (*ROWS, *CHANNELS):
        more = [f"{op}+{activation}" for activation in _WITH_ACTIVATION.get(op, ())]
        more += [f"{op}+add+relu"] if op.startswith("batch_norm") else []
        names = " ".join([op, *more])
        if op in ROWS:
            cells += _family(names, (TOKEN, FEW, *MATRICES), BOTH)
        else:
            # an instance of one position a channel has no spread
            cells += _family(names, (VECTORS,), BOTH) if op != "instance_norm" else []
            cells += _family(names, IMAGES, BOTH, EITHER)
    return _directions(cells, threads)


def compiled(cells: Sequence[Cell], *, quick: bool = False) -> frozenset[Cell]:
    """Those of the cells that torch.compile is timed on: named ones, on the most threads asked for."""
    most = max((cell.threads for cell in cells), default=0)
    named = {replace(cell, backward=False, threads=1) for cell in _compiled()}
    return frozenset(
        cell
        for cell in cells
        if cell.threads == most
        and replace(cell, backward=False, threads=1) in named
        and (not quick or cell.name.startswith(_COMPILED_QUICK))
    )


def select(cells: Iterable[Cell], patterns: Sequence[str]) -> list[Cell]:
    """The cells whose name a pattern matches.

    Args:
        cells: where to look.
        patterns: shell patterns of a name's beginning; an x between digits stands for ×.

    Raises:
        ValueError: a pattern matches nothing; the message shows what names look like.

    Example:
        >>> from musigma.lab import bench
        >>> [cell.name for cell in bench.select(bench.full(), ["rms_norm 64x768 bf*backward*2"])]
        ['rms_norm 64×768 bfloat16 forward+backward, 2 threads']
    """
    cells = list(cells)
    found: dict[Cell, None] = {}
    for pattern in patterns:
        wanted = re.sub(r"(?<=\d)x(?=[\d*])", "×", pattern)
        matched = [cell for cell in cells if fnmatchcase(cell.name, wanted + "*")]
        if not matched:
            example = cells[0].name if cells else "none"
            raise ValueError(f"no cell is called {pattern!r}; a name looks like {example!r}")
        found |= dict.fromkeys(matched)
    return [cell for cell in cells if cell in found]
