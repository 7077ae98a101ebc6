"""Statistics of parts of a batch: ghosts share one norm, auxiliary parts have their own."""

import copy

import pytest
import torch
from torch import Tensor, nn

import musigma as ms
from musigma.surgery import split, sync

SHAPES = {1: (7, 3, 5), 2: (7, 3, 4, 2), 3: (7, 3, 2, 2, 2)}


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3 + 5


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_ghosts_are_the_norm_called_on_one_part_after_the_other(dims: int, momentum: float | None) -> None:
    norm = getattr(nn, f"BatchNorm{dims}d")(3, momentum=momentum)
    x = values(*SHAPES[dims])
    ghosts, certificate = split(norm, x, parts=3)
    y = ghosts(x)
    torch.testing.assert_close(y, torch.cat([norm(part) for part in x.tensor_split(3)]))
    assert list(ghosts.state_dict()) == list(norm.state_dict())
    for mine, theirs in zip(ghosts.state_dict().values(), norm.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, theirs)
    torch.testing.assert_close(ghosts.eval()(x), norm.eval()(x))
    assert certificate.difference <= certificate.bound


def test_auxiliary_norms_learn_their_own_parts() -> None:
    norm = nn.BatchNorm1d(3)
    norm.weight.requires_grad_(False)
    net, _ = split(nn.Sequential(norm), values(4, 3), parts=2, auxiliary=True)
    clean, other = values(4, 3), values(4, 3, seed=1) * 10
    y = net(torch.cat([clean, other]))
    alone = copy.deepcopy(norm)
    torch.testing.assert_close(y[:4], alone(clean))
    for key in ("running_mean", "running_var"):
        torch.testing.assert_close(net.state_dict()[f"0.{key}"], alone.state_dict()[key])
    torch.testing.assert_close(net[0].auxiliary[0].running_mean, 0.1 * other.mean(0))
    assert [p.requires_grad for p in net[0].auxiliary[0].parameters()] == [False, True]
    torch.testing.assert_close(net.eval()(clean), alone.eval()(clean))
    assert set(norm.state_dict()) < {k.removeprefix("0.") for k in net.state_dict()}


def test_masks_and_sums_are_split_with_the_batch() -> None:
    x, add = values(6, 3), values(6, 3, seed=1)
    mask = torch.tensor([[True], [True], [True], [False], [True], [True]])
    ghosts = ms.nn.SplitBatchNorm1d(3, num_splits=2)
    y = ghosts(x, mask=mask, add=add, activation="relu")
    plain = ms.nn.BatchNorm1d(3)
    parts = [plain(x[i : i + 3], mask=mask[i : i + 3], add=add[i : i + 3], activation="relu") for i in (0, 3)]
    torch.testing.assert_close(y, torch.cat(parts))


@pytest.mark.parametrize("auxiliary", [False, True])
def test_a_part_with_one_value_is_refused_and_no_other_taken_in(auxiliary: bool) -> None:
    norm = ms.nn.SplitBatchNorm1d(3, num_splits=2, auxiliary=auxiliary)
    state = {k: v.clone() for k, v in norm.state_dict().items()}
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        norm(values(3, 3))
    assert all(torch.equal(v, state[k]) for k, v in norm.state_dict().items())


def test_too_few_examples_or_parts_are_refused() -> None:
    with pytest.raises(ValueError, match="as many examples at least, got 2"):
        ms.nn.SplitBatchNorm1d(3, num_splits=3)(values(2, 3))
    with pytest.raises(ValueError, match="at least 2, got 1"):
        split(nn.BatchNorm1d(3), parts=1)
    shared, _ = sync(nn.Sequential(nn.BatchNorm1d(3)))
    assert "unsync it first" in split(shared)[1].refused[0]
