"""Ranks that call a SyncBatchNorm a different number of times get an error that says so, and don't hang."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

import musigma as ms
from musigma.statistics import _calls
from ranks import run

WAIT = 6.0
"""Seconds to wait in vain; the other ranks have to get to where they are meanwhile, on a busy machine."""


def net(group: dist.ProcessGroup, wait: float = 60.0) -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(
        ms.nn.SyncBatchNorm(4, process_group=group),
        nn.Linear(4, 6),
        nn.Sequential(nn.ReLU(), ms.nn.SyncBatchNorm(6, process_group=group)),
    )
    for layer in made.modules():
        if isinstance(layer, ms.nn.SyncBatchNorm):
            layer.timeout = timedelta(seconds=wait)
    return made


def x(rank: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))


def said(call: Callable[[], Any]) -> str:
    """What a call raises, or "" if it does not."""
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return ""


def different_layers_meet(rank: int) -> str:
    """Rank 1 takes a branch around the first layer; the second has other channels."""
    model = net(dist.new_group())
    model(x(rank))
    return said(lambda: model[1:](x(rank)) if rank == 1 else model(x(rank)))


def wide_layers_meet(rank: int) -> str:
    """As above, with more channels than one message holds."""
    group = dist.new_group()
    wide, wider = (ms.nn.SyncBatchNorm(c, process_group=group) for c in (700, 2100))
    batch = torch.randn(2, 2100, generator=torch.Generator().manual_seed(rank))
    wide(batch[:, :700])
    return said(lambda: wider(batch) if rank == 1 else wide(batch[:, :700]))


def called_again_after_the_error(rank: int) -> Tensor:
    """Whoever catches the error goes on with all ranks as if nothing had been."""
    model = net(dist.new_group())
    assert said(lambda: model[1:](x(rank)) if rank == 1 else model(x(rank)))
    model(x(rank)).square().sum().backward()
    return model[0].weight.grad


def elsewhere(rank: int) -> str:
    """Rank 2 has run out of batches and does something else; when it comes back nobody is there."""
    model = net(dist.new_group(), WAIT)
    for _ in range(2):
        model(x(rank))
    if rank == 2:
        time.sleep(WAIT + 2 * _calls.SETTLE)
    return said(lambda: model(x(rank)))


def backward_on_some(rank: int) -> str:
    """Rank 0 leaves out a backward, say because its loss was not finite, and makes the next forward."""
    model = net(dist.new_group(), WAIT)
    model(x(rank)).sum().backward()
    y = model(x(rank))
    return said(lambda: model(x(rank)) if rank == 0 else y.sum().backward())


def moments_of_different_shapes(rank: int) -> str:
    group = dist.new_group()
    return said(lambda: ms.moments(x(rank), 0 if rank else 1).all_reduce(group))


SCENARIOS = (
    different_layers_meet,
    wide_layers_meet,
    called_again_after_the_error,
    elsewhere,
    backward_on_some,
    moments_of_different_shapes,
)


def work(rank: int) -> dict[str, Any]:
    _calls.GRACE, _calls.SETTLE = 0.2, 2.0
    return {scenario.__name__: scenario(rank) for scenario in SCENARIOS}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(work, 3, tmp_path_factory.mktemp("ranks"))


def test_different_layers_meet(ranks: list[dict[str, Any]]) -> None:
    for rank, result in enumerate(ranks):
        message = result["different_layers_meet"]
        own = "SyncBatchNorm '2.1'" if rank == 1 else "SyncBatchNorm '0'"
        assert message.startswith(
            f"the ranks do not meet in the forward of {own}: they have met in different calls"
        )
        counts = (1, 2, 1) if rank == 1 else (2, 1, 2)
        for other, count in enumerate(counts):
            layer = "2.1" if other == 1 else "0"
            where = f"rank {other}: in the forward of SyncBatchNorm '{layer}'; call {count} of this forward"
            assert where in message
        assert "a branch that only some ranks take" in message


def test_layers_wider_than_a_message_meet(ranks: list[dict[str, Any]]) -> None:
    for result in ranks:
        assert "they have met in different calls" in result["wide_layers_meet"]


def test_counts_start_again_after_the_error(ranks: list[dict[str, Any]]) -> None:
    grads = [result["called_again_after_the_error"] for result in ranks]
    assert all(g.isfinite().all() for g in grads)


def test_a_rank_that_makes_fewer_calls(ranks: list[dict[str, Any]]) -> None:
    for result in ranks[:2]:
        message = result["elsewhere"]
        assert "the ranks do not meet in the forward of SyncBatchNorm '0'" in message
        for rank in (0, 1):
            assert f"rank {rank}: in the forward of SyncBatchNorm '0'; call 3 of this forward" in message
        assert "rank 2: elsewhere, after 2 calls of this forward" in message
        assert "loaders of different lengths" in message
    # who comes too late hears it too
    assert "the ranks do not meet" in ranks[2]["elsewhere"]


def test_a_backward_that_only_some_ranks_make(ranks: list[dict[str, Any]]) -> None:
    for rank, result in enumerate(ranks):
        message = result["backward_on_some"]
        assert ("the forward of" if rank == 0 else "the backward of") in message.splitlines()[0]
        assert "rank 0: in the forward of SyncBatchNorm '0'" in message
        assert "rank 1: in the backward of SyncBatchNorm '2.1'" in message


def test_moments_of_different_shapes(ranks: list[dict[str, Any]]) -> None:
    for result in ranks:
        message = result["moments_of_different_shapes"]
        assert "Moments[3].all_reduce" in message
        assert "Moments[4].all_reduce" in message


def leaving(rank: int, folder: str, port: int) -> None:
    """Rank 0, whose process keeps the store, ends after two of three steps."""
    torch.set_num_threads(1)
    _calls.SETTLE = 2.0
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=timedelta(seconds=60))
    model = net(dist.group.WORLD)
    keys = dist.group.WORLD.get_group_store().num_keys()
    for _ in range(20):
        model(x(rank)).sum().backward()
    kept = dist.group.WORLD.get_group_store().num_keys() - keys
    dist.barrier()
    message = "" if rank == 0 else said(lambda: model(x(rank)))
    Path(folder, f"{rank}.txt").write_text(f"{kept}\n{message}")
    os._exit(0)  # a process that is gone, and cleans nothing up


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str]]:
    folder = tmp_path_factory.mktemp("left")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(leaving, (str(folder), port), nprocs=2)
    halves = [(folder / f"{rank}.txt").read_text().partition("\n") for rank in range(2)]
    return [(kept, message) for kept, _, message in halves]


def test_a_rank_that_has_left_is_heard_of_at_once(left: list[tuple[str, str]]) -> None:
    _, message = left[1]
    assert "a rank has not come, or has left" in message
    assert (
        "rank 0: unknown, after 20 or 21 calls" in message or "rank 0: elsewhere, after 20 calls" in message
    )
    assert "rank 1: in the forward of SyncBatchNorm '0'; call 21 of this forward" in message


def test_steps_leave_no_keys_in_the_store(left: list[tuple[str, str]]) -> None:
    for kept, _ in left:
        assert int(kept) <= 0, kept
