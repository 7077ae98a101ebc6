"""SyncBatchNorm on three gloo processes, one with an empty batch, against one process with all of it."""

from __future__ import annotations

import copy
import os
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

import musigma as ms

SIZES = (4, 0, 5)
ENDS = (0, 4, 4, 9)


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (sum(SIZES), 3, 2)
    x, g = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    return x * 2 + 5, g


def layer(**options: Any) -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    made = ms.nn.SyncBatchNorm(3, **options).double()
    with torch.no_grad():
        made.weight.copy_(torch.rand(3, generator=generator) + 0.5)
        made.bias.copy_(torch.rand(3, generator=generator))
    return made


def steps(norm: nn.Module, part: slice) -> dict[str, Tensor]:
    """Two training steps and an evaluation; outputs, gradients and state."""
    x, g = data()
    mine = x[part].clone().requires_grad_()
    norm(mine).mul(g[part]).sum().backward()
    norm(mine.detach() * 2)
    result = {"dx": mine.grad, "dweight": norm.weight.grad, "dbias": norm.bias.grad}
    result |= {k: v.clone() for k, v in norm.state_dict().items()}
    return result | {"train": norm(mine).detach(), "eval": norm.eval()(mine).detach()}


def masked_steps(norm: nn.Module, part: slice) -> Tensor:
    x, _ = data()
    keep = torch.arange(sum(SIZES)).remainder(3).ne(1)[:, None, None]
    return norm(x[part], mask=keep[part]).detach()


def alone(norm: nn.Module) -> Tensor:
    """One value a channel on all ranks together: every rank has to raise, or the others wait for ever."""
    x = torch.ones(1 if dist.get_rank() == 2 else 0, 3, 1, dtype=torch.float64)
    before = copy.deepcopy(norm.state_dict())
    with pytest.raises(ValueError, match="too few on all ranks of the group together"):
        norm(x)
    assert_close(norm.state_dict(), before, rtol=0, atol=0)
    return torch.zeros(())


def trained_by_ddp(rank: int) -> dict[str, Tensor]:
    """Uneven batches under DDP, which averages the ranks' gradients."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 1)).double()
    net = DistributedDataParallel(ms.nn.SyncBatchNorm.convert_sync_batchnorm(net))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x = torch.randn(9, 2, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    for _ in range(3):
        optimizer.zero_grad()
        # the sum over all nine, as each rank's share of the average that DDP takes
        (net(x[ENDS[rank] : ENDS[rank + 1]]).square().sum() * 3).backward()
        optimizer.step()
    return {k: v.clone() for k, v in net.module.state_dict().items()}


def trained_alone() -> dict[str, Tensor]:
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 1)).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x = torch.randn(9, 2, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    for _ in range(3):
        optimizer.zero_grad()
        net(x).square().sum().backward()
        optimizer.step()
    return net.state_dict()


def worker(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=3, timeout=timedelta(seconds=60))
    part = slice(ENDS[rank], ENDS[rank + 1])
    pair = dist.new_group([0, 2])
    results: dict[str, Any] = {
        "exponential": steps(layer(), part),
        "cumulative": steps(layer(momentum=None), part),
        "masked": masked_steps(layer(), part),
        "alone": alone(layer()),
        "ddp": trained_by_ddp(rank),
    }
    if rank != 1:
        results["pair"] = steps(layer(process_group=pair), part)
    torch.save(results, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    torch.multiprocessing.spawn(worker, (port, str(folder)), nprocs=3)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(3)]


def single(norm: nn.Module) -> dict[str, Tensor]:
    return steps(norm, slice(None))


@pytest.mark.parametrize("case", ["exponential", "cumulative", "pair"])
def test_three_ranks_are_one_process(ranks: list[dict[str, Any]], case: str) -> None:
    """Outputs, dx, running statistics; the weights' gradients add up. (`pair` leaves the empty rank out.)"""
    expected = single(layer(momentum=None if case == "cumulative" else 0.1))
    parts = [r[case] for r in ranks if case in r]
    for key in ("train", "eval", "dx"):
        assert_close(torch.cat([p[key] for p in parts]), expected[key], rtol=1e-12, atol=1e-12)
    for key in ("dweight", "dbias"):
        assert_close(sum(p[key] for p in parts), expected[key], rtol=1e-12, atol=1e-12)
    for key in ("running_mean", "running_var", "num_batches_tracked"):
        for p in parts:
            assert_close(p[key], expected[key], rtol=1e-12, atol=1e-12)
            assert_close(p[key], parts[0][key], rtol=0, atol=0)  # the same bits on every rank


def test_masks_are_each_ranks_own(ranks: list[dict[str, Any]]) -> None:
    expected = masked_steps(layer(), slice(None))
    assert_close(torch.cat([r["masked"] for r in ranks]), expected, rtol=1e-12, atol=1e-12)


def test_training_under_ddp_with_uneven_batches(ranks: list[dict[str, Any]]) -> None:
    expected = trained_alone()
    for r in ranks:
        assert_close(r["ddp"], expected, rtol=1e-9, atol=1e-12)


def test_without_a_process_group_it_is_batch_norm() -> None:
    sync, plain = ms.nn.SyncBatchNorm(3), ms.nn.BatchNorm2d(3)
    x = torch.randn(4, 3, 5, 5)
    assert_close(sync(x), plain(x), rtol=0, atol=0)
    assert_close(sync.state_dict(), plain.state_dict(), rtol=0, atol=0)
    assert sync(torch.randn(4, 3)).shape == (4, 3)
    with pytest.raises(ValueError, match="at least 2D"):
        sync(torch.randn(3))
    with pytest.raises(ValueError, match="non-zero"):
        ms.nn.SyncBatchNorm(0)(torch.randn(3, 0))


def test_conversion_keeps_tensors_modes_and_ties() -> None:
    shared = nn.BatchNorm1d(3, bias=False)
    plain = ms.nn.BatchNorm2d(4, affine=False, momentum=None, eps=1e-3).eval()
    net = nn.Sequential(
        shared,
        nn.Sequential(shared, plain),
        ms.nn.FrozenBatchNorm1d(3),
        nn.BatchNorm1d(2, track_running_stats=False),
    )
    out = ms.nn.SyncBatchNorm.convert_sync_batchnorm(net)
    assert out is net
    assert type(net[0]) is ms.nn.SyncBatchNorm
    assert isinstance(net[0], nn.SyncBatchNorm)
    assert net[0] is net[1][0]
    assert net[0].weight is shared.weight
    assert net[0].bias is None
    assert net[0].running_mean is shared.running_mean
    assert (net[1][1].eps, net[1][1].momentum, net[1][1].training) == (1e-3, None, False)
    assert type(net[2]) is ms.nn.FrozenBatchNorm1d
    assert net[3].running_mean is None
    assert type(ms.nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(3))) is ms.nn.SyncBatchNorm
