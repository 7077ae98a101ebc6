"""What recalibration and adaptation read: masks, weights, parts of dicts, several ranks, other domains."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import musigma as ms
import ranks
from musigma.surgery import adapt, freeze, recalibrate

MODES = ["one-pass", "layerwise"]


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3 + 5


class Encoder(nn.Module):
    """Takes two of the things that a batch may hold."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 4, 1)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, tokens: Tensor, scale: float = 1.0) -> Tensor:
        return self.norm(self.conv(tokens) * scale)


@pytest.mark.parametrize("mode", MODES)
def test_padding_is_left_out_by_the_mask_of_a_dict_batch(mode: str) -> None:
    net = Encoder()
    x, mask = values(3, 4, 6), torch.ones(3, 6, dtype=torch.bool)
    mask[1, 4:], mask[2, 1:] = False, False
    batch = {"tokens": x.masked_fill(~mask.unsqueeze(1), 1e4), "mask": mask, "labels": torch.zeros(3)}
    new, _ = recalibrate(net, [batch, batch], mode=mode, mask="mask")
    kept = net.conv(x).transpose(0, 1)[:, mask]
    torch.testing.assert_close(new.norm.running_mean, kept.mean(1))
    torch.testing.assert_close(new.norm.running_var, torch.cat([kept, kept], 1).var(1))


@pytest.mark.parametrize("pick", [1, lambda batch: batch[1]], ids=["index", "function"])
@pytest.mark.parametrize("mode", MODES)
def test_a_weight_of_two_is_the_example_twice_and_of_zero_not_at_all(mode: str, pick: object) -> None:
    x, weights = values(4, 2, 3), torch.tensor([1.0, 2.0, 0.0, 1.0])
    new, _ = recalibrate(nn.BatchNorm1d(2), [(x, weights)], mode=mode, weights=pick)
    whole = x[[0, 1, 1, 3]].transpose(0, 1).flatten(1)
    torch.testing.assert_close(new.running_mean, whole.mean(1))
    torch.testing.assert_close(new.running_var, whole.var(1))


def test_masks_and_weights_multiply_and_reach_flattened_positions() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(2)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x.flatten(0, 1)).view_as(x)

    x, mask = values(3, 4, 2), torch.ones(3, 4)
    mask[0, 2:] = 0
    batch = {"x": x, "m": mask, "w": torch.tensor([1.0, 0.0, 3.0])}
    new, _ = recalibrate(Flat(), batch, mask="m", weights="w", mode="layerwise")
    whole = torch.cat([x[0, :2], x[2], x[2], x[2]])
    torch.testing.assert_close(new.norm.running_mean, whole.mean(0))
    torch.testing.assert_close(new.norm.running_var, whole.var(0))


def test_a_mask_that_fits_no_position_leaves_the_layer_and_names_it() -> None:
    net = nn.Sequential(nn.BatchNorm1d(2), nn.AvgPool1d(2), nn.BatchNorm1d(2))
    batch = (values(3, 2, 6), torch.ones(3, 6))
    new, certificate = recalibrate(net, [batch], mask=1)
    assert [c.split(":")[0] for c in certificate.changed] == ["0"]
    assert certificate.refused == ("2: a mask of shape (3, 6) does not fit its input of shape (3, 2, 3)",)
    assert torch.equal(new[2].running_mean, torch.zeros(2))


def test_a_wrong_place_in_the_batch_is_named() -> None:
    with pytest.raises(ValueError, match=r"nothing at 'mask'; it is the keys \['input'\]"):
        recalibrate(nn.BatchNorm1d(1), {"input": values(3, 1)}, mask="mask")
    with pytest.raises(TypeError, match="must be a tensor, got int"):
        recalibrate(nn.BatchNorm1d(1), {"input": values(3, 1)}, mask=lambda b: 3)
    with pytest.raises(ValueError, match="negative"):
        recalibrate(nn.BatchNorm1d(1), [(values(2, 1), torch.tensor([1.0, -1.0]))], weights=1)


def test_one_value_a_channel_says_what_helps() -> None:
    with pytest.raises(ValueError, match="more than 1 value per channel") as caught:
        recalibrate(nn.BatchNorm1d(1), values(1, 1))
    assert "mode='layerwise'" in caught.value.__notes__[0]


class Noisy(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return torch.rand(3) + np.random.rand()


@pytest.mark.parametrize("mode", MODES)
def test_loaders_that_draw_leave_all_generators_as_they_were(mode: str) -> None:
    loader = torch.utils.data.DataLoader(Noisy(), batch_size=4, shuffle=True)
    # Python's own generator is drawn from by the type checker that tests run under.
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    recalibrate(nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(), nn.BatchNorm1d(3)), loader, mode=mode)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]


def test_an_error_in_the_middle_leaves_the_model_alone() -> None:
    net = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3))
    net[0].eval()
    state = {k: v.clone() for k, v in net.state_dict().items()}
    with pytest.raises(RuntimeError):
        recalibrate(net, [values(4, 3), values(4, 5)])
    assert all(torch.equal(v, state[k]) for k, v in net.state_dict().items())
    assert [m.training for m in net.modules()] == [True, False, True]
    assert not net[0]._forward_pre_hooks


@pytest.mark.parametrize("mode", MODES)
def test_what_freeze_froze_is_left_alone(mode: str) -> None:
    net, _ = freeze(nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3)), where="0")
    new, certificate = recalibrate(net, values(8, 3), mode=mode)
    assert torch.equal(new[0].running_mean, torch.zeros(3))
    assert [c.split(":")[0] for c in certificate.changed] == ["1"]


def test_progress_is_drawn_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    recalibrate(nn.BatchNorm1d(3), [values(4, 3)] * 3, progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert "recalibrate" in err
    assert "100%" in err


PARTS = [[values(3, 2, seed=0), values(5, 2, seed=1)], [], [values(4, 2, seed=2)]]


def net_of_ranks() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 3), nn.Tanh(), nn.BatchNorm1d(3))


def on_a_rank(rank: int) -> list[Tensor]:
    new, _ = recalibrate(net_of_ranks(), PARTS[rank], mode="layerwise")
    return list(new.state_dict().values())


@pytest.mark.slow
def test_ranks_have_the_statistics_of_the_whole_and_one_may_have_no_data(tmp_path: Path) -> None:
    alone, _ = recalibrate(net_of_ranks(), [x for part in PARTS for x in part], mode="layerwise")
    for state in ranks.run(on_a_rank, 3, tmp_path):
        for mine, whole in zip(state, alone.state_dict().values(), strict=True):
            torch.testing.assert_close(mine, whole)


@pytest.mark.parametrize("mode", MODES)
def test_adapting_takes_the_shift_between_domains_out(mode: str) -> None:
    torch.manual_seed(0)
    x = values(64, 6)
    net = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 5), nn.ReLU(), nn.BatchNorm1d(5), nn.Linear(5, 2))
    net, _ = recalibrate(net, x, mode=mode)
    expected = net.eval()(x)
    darker = x * 0.3 - 7  # each feature moved and scaled: a BatchNorm in front undoes that
    assert not torch.allclose(net(darker), expected, atol=0.1)
    adapted, certificate = adapt(net, darker, mode=mode)
    # the eps of 1e-5 weighs more against 9 % of the variance
    torch.testing.assert_close(adapted(darker), expected, atol=1e-3, rtol=1e-3)
    assert all(torch.equal(p, q) for p, q in zip(adapted.parameters(), net.parameters(), strict=True))
    assert certificate.operation == "adapt"


def test_the_prior_weighs_the_old_statistics_as_so_many_examples() -> None:
    norm = nn.BatchNorm2d(1)
    norm.running_mean.fill_(2.0)
    norm.running_var.fill_(9.0)
    x = values(6, 1, 4, 4)
    new, _ = adapt(norm, list(x.split(2)), prior=18.0)
    torch.testing.assert_close(new.running_mean, 0.75 * torch.tensor([2.0]) + 0.25 * x.mean())
    torch.testing.assert_close(new.running_var, 0.75 * torch.tensor([9.0]) + 0.25 * x.var())
    with pytest.raises(ValueError, match="prior must be a number of examples"):
        adapt(norm, x, prior=-1.0)


def test_adapting_layer_by_layer_measures_behind_the_blended_layers() -> None:
    net = nn.Sequential(nn.BatchNorm1d(1, affine=False, eps=0.0), nn.BatchNorm1d(1, affine=False))
    x = values(8, 1)
    new, _ = adapt(net, x, prior=8.0, mode="layerwise")
    mean, var = x.mean() / 2, (1 + x.var()) / 2
    torch.testing.assert_close(new[0].running_mean, mean.reshape(1))
    behind = (x - mean) / var.sqrt()
    torch.testing.assert_close(new[1].running_mean, behind.mean().reshape(1) / 2)


def test_statistics_of_ours_and_a_mask_of_its_own() -> None:
    class Ours(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = ms.nn.BatchNorm1d(1)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x, mask=x < 100)

    x = torch.tensor([[1.0], [3.0], [999.0]])
    new, _ = recalibrate(Ours(), [(x, torch.ones(3))], weights=1)
    assert new.norm.running_mean.item() == 2.0
