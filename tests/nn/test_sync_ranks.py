"""SyncBatchNorm on three gloo processes is BatchNorm on one: dtypes, masks, DDP, checkpoints."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import musigma as ms
from ranks import run

SIZES = (4, 0, 5)
Results = list[dict[str, Any]]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def parts(x: Tensor) -> tuple[Tensor, ...]:
    """The ranks' shares of a batch of nine."""
    return x.split(SIZES)


def layer(channels: int = 3, sync: bool = True, **options: Any) -> nn.Module:
    made = (ms.nn.SyncBatchNorm if sync else ms.nn.BatchNorm1d)(channels, **options).double()
    with torch.no_grad():
        made.weight.copy_(draw(channels, seed=1).abs() + 0.5)
        made.bias.copy_(draw(channels, seed=2))
    return made


DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def step(norm: nn.Module, x: Tensor, dy: Tensor, **options: Any) -> dict[str, Tensor]:
    x = x.detach().requires_grad_()
    y = norm(x, **options)
    y.backward(dy)
    state = {name: b.clone() for name, b in norm.named_buffers()}
    return {"y": y.detach(), "dx": x.grad, "dweight": norm.weight.grad, "dbias": norm.bias.grad} | state


def dtypes(rank: int) -> dict[str, dict[str, Tensor]]:
    x, dy = parts(draw(9, 3, 4) + 20)[rank], parts(draw(9, 3, 4, seed=3))[rank]
    return {str(d): step(layer().float(), x.to(d), dy.to(d)) for d in DTYPES[::2] + DTYPES[3:]} | {
        str(torch.float64): step(layer(), x, dy)
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_to_its_own_last_digits(ranks: Results, dtype: torch.dtype) -> None:
    """C61: unequal counts. Against one process in float64, whose input is what the ranks' dtype holds."""
    x, dy = (draw(9, 3, 4) + 20).to(dtype).double(), draw(9, 3, 4, seed=3).to(dtype).double()
    with ms.ops.use_kernels("reference"):
        want = step(layer(sync=False), x, dy)
    got = [r["dtypes"][str(dtype)] for r in ranks]
    unit = torch.finfo(dtype).eps
    spread = x.var((0, 2), correction=0).rsqrt().max() * dy.abs().max() * layer().weight.abs().max()
    y, dx = (torch.cat([g[key] for g in got]) for key in ("y", "dx"))
    assert y.dtype == dx.dtype == dtype
    # In float64 the one process rounds as often.
    k = 4 if dtype is not torch.float64 else 16
    assert (y - want["y"]).abs().max() <= k * unit * want["y"].abs().max()
    assert (dx - want["dx"]).abs().max() <= k * unit * spread
    for key in ("dweight", "dbias"):  # float32 sums of each rank, added
        tolerance = 1e-12 if dtype is torch.float64 else 1e-5
        assert_close(sum(g[key].double() for g in got), want[key], rtol=tolerance, atol=tolerance)
    for key in ("running_mean", "running_var", "num_batches_tracked"):
        for g in got:
            assert_close(g[key].double(), want[key].double(), rtol=1e-6, atol=1e-6)
            assert torch.equal(g[key], got[0][key])


IMAGES = ((2, 3, 4, 5), (0, 3, 2, 2), (3, 3, 1, 7))


def images(rank: int) -> dict[str, Tensor]:
    """Each rank has images of its own size, channels last on one."""
    x, dy = draw(*IMAGES[rank], seed=rank) + 5, draw(*IMAGES[rank], seed=10 + rank)
    if rank == 0:
        x = x.to(memory_format=torch.channels_last)
    return step(layer(), x, dy)


def flat(images: list[Tensor]) -> Tensor:
    return torch.cat([t.movedim(1, -1).flatten(0, -2) for t in images])


def test_images_of_another_size_on_every_rank(ranks: Results) -> None:
    x, dy = (
        flat([draw(*shape, seed=s + r) + (5 if s == 0 else 0) for r, shape in enumerate(IMAGES)])
        for s in (0, 10)
    )
    want, got = step(layer(sync=False), x, dy), [r["images"] for r in ranks]
    for key in ("y", "dx"):
        assert_close(flat([g[key] for g in got]), want[key], rtol=1e-12, atol=1e-12)
    assert_close(sum(g["dweight"] for g in got), want["dweight"], rtol=1e-12, atol=1e-12)


def masks() -> Tensor:
    """Weights for nine examples: booleans, none needed, and weights, as the ranks will have them."""
    kept = draw(9, 1, 2, seed=4)
    kept[:4] = (kept[:4] > -0.5).double()
    return kept.abs()


def masked(rank: int) -> dict[str, Tensor]:
    """A boolean mask on one rank, none on the empty one, weights on the third; a tail behind the norm."""
    x, dy, add, mask = (
        parts(t)[rank] for t in (draw(9, 3, 2) + 5, draw(9, 3, 2, seed=3), draw(9, 3, 2, seed=5), masks())
    )
    own = (mask != 0, None, mask)[rank]
    x = torch.where(mask != 0, x, torch.nan)
    return step(layer(), x, dy, mask=own, add=add, activation="gelu")


def test_each_rank_may_have_a_mask_of_its_own_or_none(ranks: Results) -> None:
    x, mask = draw(9, 3, 2) + 5, masks()
    x = torch.where(mask != 0, x, torch.nan)
    want = step(
        layer(sync=False), x, draw(9, 3, 2, seed=3), mask=mask, add=draw(9, 3, 2, seed=5), activation="gelu"
    )
    got = [r["masked"] for r in ranks]
    for key in ("y", "dx"):
        assert_close(torch.cat([g[key] for g in got]), want[key], rtol=1e-12, atol=1e-12)
    for key in ("running_mean", "running_var"):
        for g in got:
            assert_close(g[key], want[key], rtol=1e-12, atol=1e-12)


def twice(norm: nn.Module, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """The gradient of a penalty on the gradient, and of that again."""
    x = x.detach().requires_grad_()
    (dx,) = torch.autograd.grad((norm(x).tanh() * dy).sum(), x, create_graph=True)
    (ddx,) = torch.autograd.grad(dx.pow(3).sum(), x, create_graph=True)
    (dddx,) = torch.autograd.grad(ddx.pow(2).sum(), x)
    return {"dx": dx.detach(), "ddx": ddx.detach(), "dddx": dddx}


def penalty(rank: int) -> dict[str, Tensor]:
    return twice(layer(), parts(draw(9, 3))[rank], parts(draw(9, 3, seed=3))[rank])


def test_gradients_of_gradients_are_those_of_one_process(ranks: Results) -> None:
    with ms.ops.use_kernels("reference"):  # C23: torch's own BatchNorm has wrong third derivatives
        want = twice(layer(sync=False), draw(9, 3), draw(9, 3, seed=3))
    for key in ("dx", "ddx", "dddx"):
        got = torch.cat([r["penalty"][key] for r in ranks])
        assert_close(got, want[key], rtol=1e-9, atol=1e-9 * want[key].abs().max().item())


def nothing_anywhere(rank: int) -> dict[str, Tensor]:
    return step(layer(), torch.empty(0, 3, dtype=torch.float64), torch.empty(0, 3, dtype=torch.float64))


def test_no_data_on_any_rank_changes_nothing(ranks: Results) -> None:
    """C60: a total count of 0 leaves the statistics alone; the gradients are zero, not missing."""
    for result in ranks:
        got = result["nothing_anywhere"]
        assert got["y"].shape == got["dx"].shape == (0, 3)
        assert_close(got["dweight"], torch.zeros(3).double(), rtol=0, atol=0)
        assert got["running_mean"].tolist() == [0, 0, 0]
        assert got["running_var"].tolist() == [1, 1, 1]
        assert got["num_batches_tracked"] == 0


def empty_rank(rank: int) -> dict[str, Tensor]:
    x = draw(3, 2, 4, 4) + 3 if rank == 0 else torch.zeros(0, 2, 4, 4, dtype=torch.float64)
    return step(layer(2, momentum=1.0), x, torch.ones_like(x))


def test_an_empty_rank_has_the_statistics_of_the_others(ranks: Results) -> None:
    """C60: count-weighted, nothing of the empty side enters; its gradients are zeros."""
    x = draw(3, 2, 4, 4) + 3
    for rank, result in enumerate(ranks):
        got = result["empty_rank"]
        assert_close(got["running_mean"], x.mean((0, 2, 3)), rtol=1e-12, atol=0)
        assert_close(got["running_var"], x.var((0, 2, 3)), rtol=1e-12, atol=0)
        if rank:
            assert not got["dweight"].any()
            assert got["dx"].shape == (0, 2, 4, 4)


def one_value_each(rank: int) -> dict[str, Tensor]:
    norm = ms.nn.SyncBatchNorm(2, momentum=1.0, process_group=dist.new_group([0, 1]))
    if rank == 2:
        return {}
    x = torch.tensor([[[1.0, 5.0]], [[3.0, 9.0]]])[rank]
    return {"y": norm(x).detach(), "running_var": norm.running_var, "running_mean": norm.running_mean}


def test_one_value_a_channel_on_each_rank_is_enough(ranks: Results) -> None:
    """C63: what counts is the count of all ranks."""
    for rank, sign in enumerate((-1.0, 1.0)):
        got = ranks[rank]["one_value_each"]
        assert_close(got["y"], torch.tensor([[sign, sign]]), rtol=1e-5, atol=0)  # eps takes 5e-6
        assert got["running_mean"].tolist() == [2, 7]
        assert got["running_var"].tolist() == [2, 8]


class Net(nn.Module):
    """A layer that is never used, one that is used twice, and one that may be checkpointed."""

    def __init__(self, sync: bool, recompute: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.recompute = recompute  # reentrant or not, or no checkpoint
        self.first = nn.Sequential(nn.Linear(2, 3), layer(3, sync), nn.ReLU())
        self.twice = nn.Sequential(layer(3, sync), nn.Tanh())
        self.unused = nn.Linear(3, 1)
        self.last = nn.Linear(3, 1)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        body = (lambda t: self.twice(self.first(t))) if self.recompute is None else self._checkpointed
        return self.last(self.twice(body(x)))

    def _checkpointed(self, x: Tensor) -> Tensor:
        x = x.requires_grad_(x.is_floating_point())
        return checkpoint(lambda t: self.twice(self.first(t)), x, use_reentrant=self.recompute)


def train(net: nn.Module, batches: list[Tensor], scale: float) -> dict[str, Tensor]:
    """Two accumulated micro-batches a step, three steps; the first without an exchange of gradients."""
    model = net.module if isinstance(net, DistributedDataParallel) else net
    optimizer = torch.optim.SGD([p for n, p in model.named_parameters() if "unused" not in n], lr=0.05)
    for first, second in zip(batches[::2], batches[1::2], strict=True):
        optimizer.zero_grad()
        with net.no_sync() if isinstance(net, DistributedDataParallel) else contextlib.nullcontext():
            (net(first).square().sum() * scale).backward()
        (net(second).square().sum() * scale).backward()
        optimizer.step()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def batches() -> list[Tensor]:
    return [draw(9, 2, seed=s) for s in range(6)]


def ddp(rank: int) -> dict[str, dict[str, Tensor]]:
    mine = [parts(b)[rank] for b in batches()]
    nets = {
        "find unused": DistributedDataParallel(Net(True), find_unused_parameters=True),
        "checkpoint": DistributedDataParallel(Net(True, False), find_unused_parameters=True),
    }
    # DDP averages the ranks' gradients
    return {name: train(net, mine, 3.0) for name, net in nets.items()}


@pytest.mark.parametrize("case", ["find unused", "checkpoint"])
def test_accumulated_steps_under_ddp(ranks: Results, case: str) -> None:
    """Uneven batches, an unused layer, a layer used twice, no_sync; statistics taken in once a forward."""
    want = train(Net(False), batches(), 1.0)
    for result in ranks:
        assert_close(result["ddp"][case], want, rtol=1e-9, atol=1e-12)
    assert want["twice.0.num_batches_tracked"] == 12


def reentrant(rank: int) -> dict[str, Tensor]:
    """Reentrant checkpoints don't go with DDP's search for what is unused; alone they have to work."""
    net = Net(True, True)
    for batch in batches()[:2]:
        net(parts(batch)[rank]).square().sum().backward()
    return {n: p.grad for n, p in net.named_parameters() if p.grad is not None} | dict(net.named_buffers())


def test_a_reentrant_checkpoint_counts_once_and_has_the_same_gradients(ranks: Results) -> None:
    net = Net(False)
    for batch in batches()[:2]:
        net(batch).square().sum().backward()
    for name, p in net.named_parameters():
        if p.grad is not None:
            assert_close(sum(r["reentrant"][name] for r in ranks), p.grad, rtol=1e-9, atol=1e-12)
    for name, b in net.named_buffers():
        for r in ranks:
            assert_close(r["reentrant"][name], b, rtol=1e-9, atol=1e-12)


def two_forwards(rank: int) -> list[str]:
    """C64: two forwards, then one backward, with buffers broadcast before each."""
    failed = []
    for make in (nn.BatchNorm1d, ms.nn.BatchNorm1d, ms.nn.SyncBatchNorm):
        for mode in (True, False):
            for broadcast in (True, False):
                net = nn.Sequential(nn.Linear(3, 3), make(3)).train(mode)
                net = DistributedDataParallel(net, broadcast_buffers=broadcast)
                g = torch.Generator().manual_seed(rank)
                x, z = (torch.randn(4, 3, generator=g) for _ in range(2))
                try:
                    (net(x).sum() + net(z).pow(2).sum()).backward()
                except RuntimeError as error:
                    failed.append(f"{make.__module__} {mode} {broadcast}: {error}")
    return failed


def test_two_forwards_then_a_backward_under_ddp(ranks: Results) -> None:
    for result in ranks:
        assert result["two_forwards"] == []


def refused(rank: int) -> list[bool]:
    """DDP goes on refusing torch's own layer on the CPU, alone and beside ours."""
    outcome = []
    for layers in (
        [ms.nn.SyncBatchNorm(2)],
        [nn.SyncBatchNorm(2)],
        [nn.SyncBatchNorm(2), ms.nn.SyncBatchNorm(2)],
    ):
        try:
            DistributedDataParallel(nn.Sequential(*layers))
            outcome.append(False)
        except ValueError:
            outcome.append(True)
    return outcome


def test_ddp_still_refuses_torchs_layer_on_the_cpu(ranks: Results) -> None:
    for result in ranks:
        assert result["refused"] == [False, True, True]


def modes(rank: int) -> dict[str, Tensor]:
    """Evaluation, a frozen layer and a group of one exchange nothing: only one rank makes the calls."""
    groups = [dist.new_group([r]) for r in range(3)]
    if rank != 1:
        return {}
    x = draw(5, 3)
    alone = ms.nn.SyncBatchNorm(3, process_group=groups[1]).double()
    return {"eval": layer().eval()(x).detach(), "alone": alone(x).detach()}


def test_evaluation_and_a_group_of_one_exchange_nothing(ranks: Results) -> None:
    x = draw(5, 3)
    assert_close(ranks[1]["modes"]["eval"], layer(sync=False).eval()(x).detach(), rtol=0, atol=0)
    assert_close(ranks[1]["modes"]["alone"], ms.nn.BatchNorm1d(3).double()(x).detach(), rtol=0, atol=0)


SCENARIOS = (
    dtypes,
    images,
    masked,
    penalty,
    nothing_anywhere,
    empty_rank,
    one_value_each,
    ddp,
    reentrant,
    two_forwards,
    refused,
    modes,
)


def work(rank: int) -> dict[str, Any]:
    return {scenario.__name__: scenario(rank) for scenario in SCENARIOS}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return run(work, 3, tmp_path_factory.mktemp("ranks"))
