"""A few gloo processes for a test: each runs the same function, which returns what the test looks at."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT = timedelta(seconds=120)
"""Longer than anything takes on a busy machine; what has to wait in vain has a shorter one of its own."""


def run(work: Callable[[int], Any], size: int, folder: Path) -> list[Any]:
    """What `work(rank)` returns, by rank. It has to be a function of a module, and its results plain."""
    mp.spawn(_process, (work, size, str(folder)), nprocs=size)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(size)]


def _process(rank: int, work: Callable[[int], Any], size: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/rendezvous", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    torch.save(work(rank), f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
