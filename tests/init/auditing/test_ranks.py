"""Ranks that draw their pieces of one tensor with the same seed are found out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import musigma as ms
from ranks import run


def audits(rank: int) -> dict[str, list[str]]:
    """Codes and tensors, for shards drawn with one seed and as `apply` draws them."""
    model = nn.Sequential(nn.Linear(16, 32, bias=False), nn.ReLU(), nn.Linear(32, 8, bias=False))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter.to_local(), std=0.2)
    wrong = [f"{f.code} {f.tensor}" for f in ms.init.audit(model) if "rank" in f.evidence]
    ms.init.apply(model, {"*": "he_normal"}, seed=1)
    right = [f"{f.code} {f.tensor}" for f in ms.init.audit(model)]
    return {"wrong": wrong, "right": right}


@pytest.mark.slow
def test_shards_of_one_seed(tmp_path: Path) -> None:
    for found in run(audits, 2, tmp_path):
        assert found == {"wrong": ["repeated-pieces 0.weight", "repeated-pieces 2.weight"], "right": []}
