"""Moments over ranks: three gloo processes, unequal counts, one of them empty."""

import datetime
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

SIZES = [4, 0, 5]


def work(rank: int, rendezvous: str, out: str) -> None:
    import musigma as ms

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=len(SIZES),
        timeout=datetime.timedelta(seconds=60),
    )
    g = torch.Generator().manual_seed(0)
    full = torch.randn(sum(SIZES), 3, generator=g, dtype=torch.float64) + 100
    upstream = torch.randn(sum(SIZES), 3, generator=g, dtype=torch.float64)
    mine = full.split(SIZES)[rank].clone().requires_grad_()
    merged = ms.moments(mine, 0).all_reduce()
    y = (mine - merged.mean) * merged.rstd(1e-5)
    (y * upstream.split(SIZES)[rank]).sum().backward()
    mask = torch.ones(SIZES[rank], 1)
    weighted = ms.moments(mine.detach(), 0, mask=mask).all_reduce()
    torch.save(
        {
            "moments": [merged.count, merged.mean.detach(), merged.m2.detach()],
            "y": y.detach(),
            "grad": mine.grad,
            "weighted": [weighted.count, weighted.mean],
        },
        f"{out}/{rank}.pt",
    )
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(work, (str(folder / "rendezvous"), str(folder)), nprocs=len(SIZES))
    return [torch.load(Path(folder) / f"{r}.pt", weights_only=True) for r in range(len(SIZES))]


@pytest.fixture
def whole() -> dict:
    g = torch.Generator().manual_seed(0)
    full = (torch.randn(sum(SIZES), 3, generator=g, dtype=torch.float64) + 100).requires_grad_()
    upstream = torch.randn(sum(SIZES), 3, generator=g, dtype=torch.float64)
    y = torch.nn.functional.batch_norm(full, None, None, training=True)
    (y * upstream).sum().backward()
    return {"x": full.detach(), "y": y.detach(), "grad": full.grad}


def test_every_rank_has_the_moments_of_the_whole(ranks: list[dict], whole: dict) -> None:
    var, mean = torch.var_mean(whole["x"], 0, correction=0)
    for r in ranks:
        count, merged_mean, m2 = r["moments"]
        assert (count == sum(SIZES)).all()
        torch.testing.assert_close(merged_mean, mean)
        torch.testing.assert_close(m2 / sum(SIZES), var, rtol=1e-10, atol=0)
        torch.testing.assert_close(r["weighted"][1], mean)


def test_every_rank_has_the_same_bits(ranks: list[dict]) -> None:
    for r in ranks[1:]:
        for a, b in zip(r["moments"], ranks[0]["moments"], strict=True):
            assert torch.equal(a, b)


def test_outputs_and_gradients_are_those_of_one_process(ranks: list[dict], whole: dict) -> None:
    for r, y, grad in zip(ranks, whole["y"].split(SIZES), whole["grad"].split(SIZES), strict=True):
        torch.testing.assert_close(r["y"], y, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(r["grad"], grad, rtol=1e-9, atol=1e-9)
