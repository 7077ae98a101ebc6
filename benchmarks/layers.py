"""Time the normalization layers, forward and backward, against torch.nn in one run.

Each cell first compares outputs and gradients with torch.nn in float64, and is not timed if they differ.
Printed are the median and the interquartile range of both, the machine and the versions: a claim about speed
needs them all.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils import benchmark

import musigma as ms
from musigma.cli._env import facts


@dataclass(frozen=True)
class Cell:
    """One layer at one size."""

    name: str
    shape: tuple[int, ...]
    ours: Callable[[], nn.Module]
    peer: Callable[[], nn.Module]


def cells() -> Iterator[Cell]:
    """Rows that fit in cache and rows that don't; vectors and images."""
    # RMSNorm's default eps depends on the type in torch, and does not here
    kinds = {"LayerNorm": {}, "RMSNorm": {"eps": 1e-6}, "BatchNorm1d": {}}
    for rows, width in ((64, 64), (256, 1024), (2048, 4096)):
        for kind, options in kinds.items():
            make = [partial(getattr(library, kind), width, **options) for library in (ms.nn, nn)]
            yield Cell(kind, (rows, width), *make)
    for shape in ((8, 32, 16, 16), (32, 64, 56, 56)):
        c = shape[1]
        yield Cell("BatchNorm2d", shape, partial(ms.nn.BatchNorm2d, c), partial(nn.BatchNorm2d, c))
        yield Cell("GroupNorm", shape, partial(ms.nn.GroupNorm, 8, c), partial(nn.GroupNorm, 8, c))


def step(layer: nn.Module, x: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    """One forward and one backward: the output and every gradient."""
    y = layer(x)
    return (y, *torch.autograd.grad(y, (x, *layer.parameters()), g))


def gate(cell: Cell, seed: int) -> None:
    """Raise unless ours agrees with torch's in float64."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(cell.shape, generator=generator, dtype=torch.float64).requires_grad_()
    g = torch.randn(cell.shape, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(step(cell.ours().double(), x, g), step(cell.peer().double(), x, g))


def timed(make: Callable[[], nn.Module], cell: Cell, seconds: float, seed: int) -> benchmark.Measurement:
    """The time of one step in float32."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(cell.shape, generator=generator).requires_grad_()
    g = torch.randn(cell.shape, generator=generator)
    names = {"step": step, "layer": make(), "x": x, "g": g}
    timer = benchmark.Timer("step(layer, x, g)", globals=names, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=seconds)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--seconds", type=float, default=0.5, help="least time spent on each of the two in a cell"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    table = Table(
        "layer", "shape", "musigma, µs", "torch.nn, µs", "ratio", title="forward and backward, float32"
    )
    for cell in cells():
        gate(cell, options.seed)
        both = [timed(make, cell, options.seconds, options.seed) for make in (cell.ours, cell.peer)]
        shown = [f"{m.median * 1e6:.1f} ± {m.iqr * 1e6:.1f}" for m in both]
        table.add_row(
            cell.name, " × ".join(map(str, cell.shape)), *shown, f"{both[0].median / both[1].median:.2f}"
        )
    console = Console()
    for name, value in facts().items():
        console.print(f"{name}: {value}", highlight=False)
    console.print(table)


if __name__ == "__main__":
    main()
