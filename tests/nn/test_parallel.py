"""Layers under DDP, FSDP2 and as DTensors: two gloo processes against one with the whole batch."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

import musigma as ms

RANKS = 2


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 6),
        ms.nn.LayerNorm(6),
        nn.Linear(6, 6),
        ms.nn.RMSNorm(6),
        ms.nn.GroupNorm(2, 6),
        ms.nn.SyncBatchNorm(6),
        nn.Linear(6, 3),
    )


def batch() -> Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(1))


def full(t: Tensor) -> Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t


def result(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Gradients of a sum over the whole batch, and state; DDP and FSDP average over the ranks."""
    (model(x).pow(2).sum() * (8 // len(x))).backward()
    names = [n.removeprefix("module.").removeprefix("_orig_mod.") for n, _ in model.named_parameters()]
    grads = {n: full(p.grad).clone() for n, p in zip(names, model.parameters(), strict=True)}
    buffers = {n.rpartition(".")[2]: full(b).clone() for n, b in model.named_buffers()}
    return grads | buffers


def worker(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=RANKS, timeout=timedelta(seconds=60))
    x = batch().chunk(RANKS)[rank]
    results: dict[str, Any] = {"ddp": result(DistributedDataParallel(net()), x)}
    if "compile" in folder:
        ddp = torch.compile(DistributedDataParallel(net()), backend="aot_eager")
        results = {"compiled ddp": {k.removeprefix("module."): v for k, v in result(ddp, x).items()}}
    else:
        mesh = init_device_mesh("cpu", (RANKS,))
        sharded = net()
        for layer in sharded:
            fully_shard(layer, mesh=mesh)
        results["fsdp2"] = result(fully_shard(sharded, mesh=mesh), x)
        rows = distribute_tensor(batch(), mesh, [Shard(0)])
        with torch.no_grad():
            y = ms.functional.layer_norm(rows, (6,))
        assert y.placements == (Shard(0),)
        results["dtensor"] = {"y": full(y)}
    torch.save(results, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def ranks(folder: Path) -> list[dict[str, dict[str, Tensor]]]:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    torch.multiprocessing.spawn(worker, (port, str(folder)), nprocs=RANKS)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(RANKS)]


def assert_one_process(got: dict[str, Tensor]) -> None:
    want = result(net(), batch())
    assert set(got) == set(want)
    for name, value in want.items():
        # float32 sums over the ranks in another order
        assert_close(got[name], value, rtol=1e-5, atol=1e-5)


def test_two_ranks_learn_what_one_process_learns(tmp_path: Path) -> None:
    for found in ranks(tmp_path):
        assert_one_process(found["ddp"])
        assert_one_process(found["fsdp2"])
        assert_close(found["dtensor"]["y"], ms.functional.layer_norm(batch(), (6,)))


@pytest.mark.compile
def test_compiled_by_two_ranks(tmp_path: Path) -> None:
    folder = tmp_path / "compile"
    folder.mkdir()
    for found in ranks(folder):
        assert_one_process(found["compiled ddp"])
