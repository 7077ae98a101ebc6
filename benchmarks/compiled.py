"""What a compiled model should run: the opaque op, or what torch.compile makes of torch's own function.

Prints the table of docs/guides/kernels.md: both compiled by inductor, one after the other in every round,
one thread on the CPU clock, medians. Memory is reused, as malloc is set to below, so that no page fault
counts for either. An op's name as argument measures that one alone.
"""

from __future__ import annotations

import copy
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator

REUSE = {"MALLOC_MMAP_THRESHOLD_": "33554432", "MALLOC_TRIM_THRESHOLD_": "4294967296", "OMP_NUM_THREADS": "1"}
if any(os.environ.get(name) != value for name, value in REUSE.items()):
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **REUSE})

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import musigma as ms  # noqa: E402

ROWS = [(64, 768), (4096, 1024)]
IMAGES = [(8, 512, 7, 7), (32, 64, 56, 56)]
ROUNDS, SECONDS = 300, 0.5


class Residual(nn.Module):
    """x + linear(norm(x)), half a pre-norm block."""

    def __init__(self, norm: nn.Module, width: int) -> None:
        super().__init__()
        self.norm, self.linear = norm, nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x))


def rows_of(norm: type[nn.Module]) -> Callable[[tuple[int, ...]], dict[str, nn.Module]]:
    return lambda s: {
        "alone": norm(s[-1]),
        "+ GELU": nn.Sequential(norm(s[-1]), nn.GELU()),
        "activation=": ms.nn.NormAct(norm(s[-1]), "gelu"),
        "in a block": Residual(norm(s[-1]), s[-1]),
    }


def images_of(norm: Callable[[int], nn.Module]) -> Callable[[tuple[int, ...]], dict[str, nn.Module]]:
    return lambda s: {
        "alone": norm(s[1]),
        "+ ReLU": nn.Sequential(norm(s[1]), nn.ReLU()),
        "activation=": ms.nn.NormAct(norm(s[1]), "relu"),
        "in a block": nn.Sequential(nn.Conv2d(s[1], s[1], 3, padding=1, bias=False), norm(s[1]), nn.ReLU()),
    }


OPS = {
    "LayerNorm": (ROWS, rows_of(ms.nn.LayerNorm)),
    "RMSNorm": (ROWS, rows_of(ms.nn.RMSNorm)),
    "BatchNorm": (IMAGES, images_of(ms.nn.BatchNorm2d)),
    "GroupNorm": (IMAGES, images_of(lambda c: ms.nn.GroupNorm(32, c))),
}


def step(model: nn.Module, x: Tensor, backward: bool) -> Callable[[], object]:
    compiled = torch.compile(model, fullgraph=True, dynamic=False)
    if not backward:
        return torch.no_grad()(lambda: compiled(x))
    leaves = [x.clone().requires_grad_(), *model.parameters()]
    upstream = torch.randn_like(compiled(leaves[0]))
    return lambda: torch.autograd.grad(compiled(leaves[0]), leaves, upstream)


def measured(model: nn.Module, x: Tensor, backward: bool) -> tuple[float, float]:
    """Microseconds of the opaque op and of the decomposition."""
    runs: dict[ms.ops.Mode, Callable[[], object]] = {}
    for mode in ("auto", "off"):
        torch._dynamo.reset()
        with ms.ops.use_kernels(mode):
            runs[mode] = step(copy.deepcopy(model), x, backward)
            runs[mode]()
    times: dict[ms.ops.Mode, list[float]] = {mode: [] for mode in runs}
    start = time.perf_counter()
    while len(times["auto"]) < 5 or (time.perf_counter() - start < SECONDS and len(times["auto"]) < ROUNDS):
        for mode, run in runs.items():
            with ms.ops.use_kernels(mode):
                begun = time.thread_time()
                run()
                times[mode].append(1e6 * (time.thread_time() - begun))
    return statistics.median(times["auto"]), statistics.median(times["off"])


def cells(wanted: list[str]) -> Iterator[tuple[str, nn.Module, Tensor, bool]]:
    for name, (shapes, models) in OPS.items():
        if wanted and name not in wanted:
            continue
        for shape in shapes:
            for where, model in models(shape).items():
                if where == "in a block" and shape[0] == 4096:
                    continue  # a matrix product of that size hides everything
                for dtype in (torch.float32, torch.bfloat16):
                    x = torch.randn(shape).to(dtype)
                    cast = copy.deepcopy(model).to(dtype)
                    size = "×".join(map(str, shape))
                    for backward in (False, True):
                        label = f"{name} {where} | {size} | {str(dtype)[6:]} | {'f+b' if backward else 'f'}"
                        yield label, cast, x, backward


def main() -> None:
    torch.set_num_threads(1)
    print("| what | shape | dtype | | the op, µs | decomposed, µs | decomposed / op |")
    print("|---|---|---|---|---|---|---|")
    for label, model, x, backward in cells(sys.argv[1:]):
        op, decomposed = measured(model, x, backward)
        print(f"| {label} | {op:.0f} | {decomposed:.0f} | {decomposed / op:.2f} |", flush=True)


if __name__ == "__main__":
    main()
