"""FrozenBatchNorm: nothing it holds moves, and a BatchNorm's state passes through it unchanged."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import update_bn
from torch.testing import assert_close

import musigma as ms

FAMILY = {
    1: (ms.nn.FrozenBatchNorm1d, nn.BatchNorm1d, ms.nn.BatchNorm1d),
    2: (ms.nn.FrozenBatchNorm2d, nn.BatchNorm2d, ms.nn.BatchNorm2d),
    3: (ms.nn.FrozenBatchNorm3d, nn.BatchNorm3d, ms.nn.BatchNorm3d),
}


def trained(make: type[nn.Module], dims: int, **options: bool) -> nn.Module:
    norm = make(3, **options)
    for parameter in norm.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
    norm(torch.randn(4, 3, *[5] * dims) * 2 + 1)
    return norm


@pytest.mark.parametrize("options", [{}, {"affine": False}, {"bias": False}], ids=str)
@pytest.mark.parametrize("dims", FAMILY)
@pytest.mark.parametrize("which", [1, 2], ids=["torch", "ours"])
def test_it_evaluates_as_the_batch_norm_it_came_from(dims: int, which: int, options: dict[str, bool]) -> None:
    norm = trained(FAMILY[dims][which], dims, **options)
    frozen = FAMILY[dims][0].from_batchnorm(norm)
    x = torch.randn(2, 3, *[4] * dims)
    expected = norm.eval()(x)
    for mode in (True, False):
        assert_close(frozen.train(mode)(x), expected)
    assert list(frozen.parameters()) == []
    norm.weight = None  # the copy is its own
    assert_close(frozen(x), expected)


@pytest.mark.parametrize("options", [{}, {"affine": False}, {"bias": False}], ids=str)
@pytest.mark.parametrize("dims", FAMILY)
def test_state_dict_goes_both_ways(dims: int, options: dict[str, bool]) -> None:
    frozen_type, *norm_types = FAMILY[dims]
    for norm_type in norm_types:
        norm = trained(norm_type, dims, **options)
        frozen = frozen_type(3, **options)
        frozen.load_state_dict(norm.state_dict())
        assert_close(frozen.state_dict(), norm.state_dict(), rtol=0, atol=0)
        fresh = norm_type(3, **options)
        fresh.load_state_dict(frozen.state_dict())
        assert_close(fresh.state_dict(), norm.state_dict(), rtol=0, atol=0)


def test_a_checkpoint_without_a_counter_loads() -> None:
    state = ms.nn.FrozenBatchNorm2d(3).state_dict()
    del state["num_batches_tracked"]
    ms.nn.FrozenBatchNorm2d(3).load_state_dict(state)


def test_convert_replaces_every_batch_norm_by_the_class_for_its_dims() -> None:
    shared = nn.BatchNorm1d(3)
    net = nn.Sequential(
        shared,
        nn.Sequential(shared, ms.nn.BatchNorm2d(4)),
        nn.BatchNorm3d(5),
        nn.SyncBatchNorm(6),
        nn.LayerNorm(3),
    )
    reference = copy.deepcopy(net)
    out = ms.nn.FrozenBatchNorm.convert(net)
    assert out is net
    kinds = [type(net[0]), type(net[1][1]), type(net[2]), type(net[3]), type(net[4])]
    assert kinds == [
        ms.nn.FrozenBatchNorm1d,
        ms.nn.FrozenBatchNorm2d,
        ms.nn.FrozenBatchNorm3d,
        ms.nn.FrozenBatchNorm,
        nn.LayerNorm,
    ]
    assert net[0] is net[1][0]
    assert_close(net.state_dict(), reference.state_dict(), rtol=0, atol=0)
    only = ms.nn.FrozenBatchNorm2d.convert(reference)
    assert [type(only[0]), type(only[1][1])] == [nn.BatchNorm1d, ms.nn.FrozenBatchNorm2d]
    assert type(ms.nn.FrozenBatchNorm.convert(nn.BatchNorm1d(3))) is ms.nn.FrozenBatchNorm1d


def test_a_batch_norm_without_statistics_is_not_frozen_and_nothing_else_either() -> None:
    net = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3, track_running_stats=False))
    with pytest.raises(ValueError, match="track_running_stats=False"):
        ms.nn.FrozenBatchNorm.convert(net)
    assert type(net[0]) is nn.BatchNorm1d
    with pytest.raises(TypeError, match="freezes a BatchNorm, got Linear"):
        ms.nn.FrozenBatchNorm1d.from_batchnorm(nn.Linear(2, 2))


def test_what_resets_batch_norms_passes_it_by() -> None:
    """swa_utils.update_bn resets the statistics of every torch BatchNorm: a frozen layer must not be one."""
    net = nn.Sequential(ms.nn.FrozenBatchNorm1d.from_batchnorm(trained(nn.BatchNorm1d, 0)))
    before = copy.deepcopy(net.state_dict())
    update_bn([torch.randn(4, 3)], net)
    ms.nn.SyncBatchNorm.convert_sync_batchnorm(net)
    assert_close(net.state_dict(), before, rtol=0, atol=0)
    assert type(net[0]) is ms.nn.FrozenBatchNorm1d


def test_gradients_go_through_to_the_input() -> None:
    frozen = ms.nn.FrozenBatchNorm1d.from_batchnorm(trained(nn.BatchNorm1d, 0))
    x = torch.randn(4, 3, requires_grad=True)
    (dx,) = torch.autograd.grad(frozen(x).sum(), x)
    assert_close(dx, (frozen.weight / (frozen.running_var + frozen.eps).sqrt()).expand(4, 3))


@pytest.mark.parametrize(
    ("dims", "x"), [(1, torch.ones(2, 3, 4, 4)), (2, torch.ones(2, 3)), (3, torch.ones(2, 3, 4, 4))]
)
def test_other_numbers_of_dims_are_refused_in_torchs_words(dims: int, x: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"expected .*D input \(got \dD input\)"):
        FAMILY[dims][0](3)(x)
