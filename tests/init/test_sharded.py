"""Four ranks that hold shards fill them with their pieces of the tensors that one process draws."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from musigma.init import apply, initialize, orthogonal_, truncated_normal_
from ranks import run

RULES: dict[str, Any] = {
    "up.weight": "he_normal",
    "down.weight": orthogonal_,
    "table.weight": functools.partial(truncated_normal_, std=0.02),
    "*.bias": lambda b: b.uniform_(-0.1, 0.1),
}


class Net(nn.Module):
    """Sizes that four ranks can't share evenly; the table's last row is padding, the bias has 2 entries."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 7, padding_idx=10)
        self.up = nn.Linear(7, 13)
        self.down = nn.Linear(13, 2)


def shards(rank: int) -> dict[str, dict[str, Tensor]]:
    """What every rank can see of the global tensors, for several ways to cut them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    line = init_device_mesh("cpu", (4,))
    models = {"fsdp": Net(), "bfloat16": Net().bfloat16(), "2d": Net(), "grid": Net(), "replicated": Net()}
    for name in ("fsdp", "bfloat16"):
        for child in models[name].children():
            fully_shard(child, mesh=line)
        fully_shard(models[name], mesh=line)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(models["2d"], mesh["model"], plan)
    fully_shard(models["2d"], mesh=mesh["data"])
    _place(models["grid"], mesh, lambda p: (Shard(0), Shard(p.dim() - 1)))
    _place(models["replicated"], mesh, lambda p: (Replicate(), Shard(0)))
    found = {}
    models["alike"] = _alike()
    fully_shard(models["alike"], mesh=line)
    for name, model in models.items():
        apply(model, {"*": "he_normal"} if name == "alike" else RULES, seed=5)
        named = list(model.named_parameters(remove_duplicate=False))
        found[name] = {n: p.detach().full_tensor() for n, p in named}
        # Different ranks hold different rows, none of them those of another.
        found[name + " here"] = {n: p.detach().to_local() for n, p in named}
    return found


def _alike() -> nn.Sequential:
    model = nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(3)))
    model[2].weight = model[1].weight
    return model


def _place(model: nn.Module, mesh: Any, how: Any) -> None:
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            placements: tuple[Placement, ...] = how(p)
            module.register_parameter(name, nn.Parameter(distribute_tensor(p, mesh, placements)))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(shards, 4, Path(tmp_path_factory.mktemp("ranks")))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["fsdp", "bfloat16", "2d", "grid", "replicated"])
def test_shards_are_pieces_of_the_tensor_that_one_process_draws(
    ranks: list[dict[str, Any]], way: str
) -> None:
    alone = Net().bfloat16() if way == "bfloat16" else Net()
    apply(alone, RULES, seed=5)
    for seen in ranks:
        for name, value in alone.named_parameters():
            assert torch.equal(seen[way][name], value), name


@pytest.mark.slow
def test_ranks_do_not_repeat_each_other(ranks: list[dict[str, Any]]) -> None:
    rows = [row for seen in ranks for row in seen["fsdp here"]["up.weight"]]
    assert len(rows) == 13
    assert len({tuple(row.tolist()) for row in rows}) == 13


@pytest.mark.slow
def test_shards_of_one_shape_are_not_taken_for_one_tensor(ranks: list[dict[str, Any]]) -> None:
    """A DTensor's data_ptr is 0, whichever it is; and a rank's piece of three rows on four ranks is empty."""
    for seen in ranks:
        first, second, third = (seen["alike"][f"{i}.weight"] for i in range(3))
        assert not torch.equal(first, second)
        assert torch.equal(second, third)


def examples() -> Tensor:
    return torch.randn(16, 7, generator=torch.Generator().manual_seed(0))


def whole() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Linear(7, 13), nn.ReLU(), nn.Linear(13, 13), nn.BatchNorm1d(13), nn.ReLU(), nn.Linear(13, 3))
    )


def planned(rank: int) -> dict[str, dict[str, Tensor]]:
    found = {}
    for scheme in ("auto", "fixup", "lsuv"):
        model = whole() if scheme != "fixup" else nn.Sequential(Branch(), nn.Linear(7, 3))
        for child in (model[0], model[2] if scheme != "fixup" else model[1]):
            fully_shard(child, mesh=init_device_mesh("cpu", (4,)))
        fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
        initialize(model, examples(), scheme=scheme, seed=4, verify=scheme == "auto")
        found[scheme] = {n: p.detach().full_tensor() for n, p in model.named_parameters()}
        model(examples()).sum().backward()  # FSDP's books are in order
    return found


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(7, 7), nn.Linear(7, 7)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.relu(self.a(x)))


@pytest.mark.slow
def test_a_sharded_model_is_planned_as_a_whole_one(tmp_path: Path) -> None:
    """FSDP2 puts gathered parameters in place of shards while it runs; the recording follows them."""
    alone = {s: whole() for s in ("auto", "lsuv")} | {"fixup": nn.Sequential(Branch(), nn.Linear(7, 3))}
    for scheme, model in alone.items():
        initialize(model, examples(), scheme=scheme, seed=4, verify=False)
    for seen in run(planned, 4, tmp_path):
        for scheme, model in alone.items():
            for name, value in model.named_parameters():
                assert torch.equal(seen[scheme][name], value), (scheme, name)
