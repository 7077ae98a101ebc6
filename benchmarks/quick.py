"""Times the layers against torch.nn.functional and a copy of the same bytes, interleaved in one process.

    python benchmarks/quick.py [threads] [op ...]

A column holds medians over a copy of the input (read once, written once); trust the ratios, not the times.
With MALLOC_MMAP_THRESHOLD_, MALLOC_TRIM_THRESHOLD_ and MALLOC_TOP_PAD_ raised to a GB outputs reuse memory.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import musigma as ms

# With one thread the processor's clock tells what a busy machine would hide.
CLOCK = time.thread_time if sys.argv[1:2] == ["1"] else time.perf_counter

ROWS = ((64, 768), (4096, 1024), (2048, 4096), (65536, 64), (512, 16384))
IMAGES = ((256, 512), (32, 64, 56, 56), (16, 256, 14, 14), (8, 512, 7, 7))


def cells(
    dtype: torch.dtype,
) -> list[tuple[str, str, Tensor, Callable[..., Tensor], Callable[..., Tensor], list[Tensor]]]:
    found = []
    for shape in ROWS:
        x = torch.randn(shape, dtype=dtype)
        w, b = torch.randn(shape[-1:]), torch.randn(shape[-1:])
        if dtype is not torch.float32:
            w, b = w.to(dtype), b.to(dtype)
        n = shape[-1:]
        found.append(
            (
                "layer_norm",
                f"{shape}",
                x,
                lambda x, w, b, n=n: ms.functional.layer_norm(x, n, w, b),
                lambda x, w, b, n=n: F.layer_norm(x, n, w, b),
                [w, b],
            )
        )
        found.append(
            (
                "rms_norm",
                f"{shape}",
                x,
                lambda x, w, n=n: ms.functional.rms_norm(x, n, w),
                lambda x, w, n=n: F.rms_norm(x, n, w, 1e-6),
                [w],
            )
        )
    for shape in IMAGES:
        for last in (False, True) if len(shape) == 4 else (False,):
            x = torch.randn(shape).to(dtype)
            if last:
                x = x.to(memory_format=torch.channels_last)
            c = shape[1]
            w, b = torch.randn(c), torch.randn(c)
            mean, var = torch.zeros(c), torch.ones(c)
            name = f"{shape}{' last' if last else ''}"
            found.append(
                (
                    "batch_norm",
                    name,
                    x,
                    lambda x, w, b, m=mean, v=var: ms.functional.batch_norm(x, m, v, w, b, True),
                    lambda x, w, b, m=mean, v=var: F.batch_norm(x, m, v, w, b, True),
                    [w, b],
                )
            )
            found.append(
                (
                    "batch_norm_eval",
                    name,
                    x,
                    lambda x, w, b, m=mean, v=var: ms.functional.batch_norm(x, m, v, w, b),
                    lambda x, w, b, m=mean, v=var: F.batch_norm(x, m, v, w, b),
                    [w, b],
                )
            )
            if len(shape) == 4:
                found.append(
                    (
                        "group_norm",
                        name,
                        x,
                        lambda x, w, b: ms.functional.group_norm(x, 32, w, b),
                        lambda x, w, b: F.group_norm(x, 32, w, b),
                        [w, b],
                    )
                )
    return found


def median_time(runs: list[Callable[[], object]], seconds: float = 0.4) -> list[float]:
    times: list[list[float]] = [[] for _ in runs]
    for run in runs:
        run()
    stop = time.perf_counter() + seconds * len(runs)
    while time.perf_counter() < stop or len(times[0]) < 5:
        for run, kept in zip(runs, times, strict=True):
            start = CLOCK()
            run()
            kept.append(CLOCK() - start)
    return [statistics.median(kept) for kept in times]


def measure(
    x: Tensor, ours: Callable[..., Tensor], theirs: Callable[..., Tensor], params: list[Tensor]
) -> str:
    """One row of the table."""
    out, dy = torch.empty_like(x), torch.randn_like(x)
    with torch.no_grad():
        copy, a, b = median_time([lambda: out.copy_(x), lambda: ours(x, *params), lambda: theirs(x, *params)])
    leaves = [t.detach().clone().requires_grad_() for t in (x, *params)]

    def step(f: Callable[..., Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(f(*leaves), leaves, dy)

    c, d = median_time([step(ours), step(theirs)])
    forward = f"{a / copy:13.2f} {b / copy:6.2f} {b / a:7.2f}×"
    return f"{copy * 1e6:8.0f} | {forward} | {c / copy:12.2f} {d / copy:6.2f} {d / c:7.2f}×"


def main() -> None:
    torch.set_num_threads(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
    wanted = set(sys.argv[2:])
    print(f"{'':50} copy µs |  forward: ours  torch  speedup | fwd+bwd: ours  torch  speedup")
    for dtype in (torch.float32, torch.bfloat16):
        for op, shape, x, ours, theirs, params in cells(dtype):
            if not wanted or op in wanted:
                row = measure(x, ours, theirs, params)
                print(f"{op:16}{str(dtype)[6:]:9}{shape:24} {row}", flush=True)


if __name__ == "__main__":
    main()
