"""The statistics of a whole data set, by merging moments."""

import pytest
import torch
from torch import Tensor, nn

import musigma as ms
from musigma.surgery import recalibrate

DATA = [torch.tensor([[1.0], [2.0], [3.0], [6.0]]), torch.tensor([[4.0], [8.0]]), torch.tensor([[0.0]])]
WHOLE = torch.cat(DATA)


@pytest.mark.parametrize("mode", ["one-pass", "layerwise"])
def test_by_hand_with_unequal_batches(mode: str) -> None:
    # 24/7, and Σ(x − 24/7)²/6; an average of averages would give (3 + 6 + 0)/3 = 3
    net, certificate = recalibrate(nn.BatchNorm1d(1), [*DATA[:2], torch.tensor([[0.0], [0.0]])], mode=mode)
    whole = torch.cat([*DATA[:2], torch.tensor([[0.0], [0.0]])])
    torch.testing.assert_close(net.running_mean, whole.mean(0))
    torch.testing.assert_close(net.running_var, whole.var(0))
    assert "8 values a channel" in certificate.changed[0]


def test_a_last_batch_of_one_is_no_obstacle_layer_by_layer() -> None:
    net, _ = recalibrate(nn.BatchNorm1d(1), DATA, mode="layerwise")
    torch.testing.assert_close(net.running_mean, WHOLE.mean(0))
    torch.testing.assert_close(net.running_var, WHOLE.var(0))


@pytest.mark.parametrize("mode", ["one-pass", "layerwise"])
def test_model_modes_random_state_and_momentum_play_no_part(mode: str) -> None:
    net = nn.Sequential(nn.Linear(1, 3), nn.BatchNorm1d(3, momentum=0.0), nn.Dropout(0.5), nn.BatchNorm1d(3))
    net[2].eval()
    state = {k: v.clone() for k, v in net.state_dict().items()}
    rng = torch.get_rng_state()
    twin, _ = recalibrate(net, DATA[:2], mode=mode)
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(torch.equal(v, state[k]) for k, v in net.state_dict().items())
    assert [m.training for m in twin.modules()] == [m.training for m in net.modules()]
    assert not torch.equal(twin[1].running_mean, net[1].running_mean)
    assert twin[1].num_batches_tracked == 2


def test_layerwise_is_what_test_time_gives() -> None:
    g = torch.Generator().manual_seed(0)
    data = [torch.randn(5, 3, generator=g) * s + s for s in (1.0, 2.0, 5.0)]
    net = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 4), nn.ReLU(), nn.BatchNorm1d(4, eps=1e-12))
    twin, _ = recalibrate(net, data, mode="layerwise")
    twin.eval()
    out = torch.cat([twin(x) for x in data])
    # biased 1/n of the data, unbiased 1/(n-1) in the buffer: 15 values
    torch.testing.assert_close(out.mean(0), torch.zeros(4), atol=1e-5, rtol=0)
    torch.testing.assert_close(out.var(0), torch.ones(4), atol=1e-4, rtol=0)


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(1)
        self.unused = nn.BatchNorm1d(1)

    def forward(self, *, image: Tensor, scale: float) -> Tensor:
        return self.norm(image * scale)


def test_dict_batches_limits_and_layers_that_nothing_reaches() -> None:
    twin, certificate = recalibrate(Keywords(), [{"image": x, "scale": 2.0} for x in DATA], max_batches=2)
    torch.testing.assert_close(twin.norm.running_mean, 2 * torch.cat(DATA[:2]).mean(0))
    assert certificate.refused == ("unused: no batch reached it",)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(1)

    def forward(self, x: Tensor, y: Tensor, scale: float = 1.0) -> Tensor:
        return self.norm(x + y) * scale


@pytest.mark.parametrize("mode", ["one-pass", "layerwise"])
def test_every_way_to_hand_over_data(mode: str) -> None:
    x, targets = WHOLE, torch.arange(len(WHOLE))
    loader = torch.utils.data.DataLoader
    dataset = torch.utils.data.TensorDataset
    plain, both = nn.BatchNorm1d(1), Two()
    ways = [
        (plain, x),
        (plain, (x,)),
        (plain, {"input": x}),
        (plain, [(x, targets)]),
        (plain, loader(dataset(x), batch_size=4)),
        (plain, loader(dataset(x, targets), batch_size=4)),
        (both, (x, torch.zeros_like(x))),
        (both, loader(dataset(x, torch.zeros_like(x), targets), batch_size=4)),
    ]
    for model, data in ways:
        twin, _ = recalibrate(model, data, mode=mode)
        norm = twin if model is plain else twin.norm
        torch.testing.assert_close(norm.running_mean, x.mean(0))
        torch.testing.assert_close(norm.running_var, x.var(0))


def test_data_that_is_none_is_refused() -> None:
    with pytest.raises(TypeError, match="a loader; got int"):
        recalibrate(nn.BatchNorm1d(1), 3)


def test_frozen_layers_are_left_alone() -> None:
    frozen = ms.nn.FrozenBatchNorm1d(1)
    twin, certificate = recalibrate(nn.Sequential(frozen, nn.BatchNorm1d(1)), DATA[:2])
    assert torch.equal(twin[0].running_mean, torch.zeros(1))
    assert [c.split(":")[0] for c in certificate.changed] == ["1"]


@pytest.mark.parametrize("mode", ["one-pass", "layerwise"])
def test_nothing_to_read_and_a_used_up_iterator(mode: str) -> None:
    with pytest.raises(ValueError, match="at least one batch"):
        recalibrate(nn.BatchNorm1d(1), [], mode=mode)
    with pytest.raises(ValueError, match="not an iterator"):
        recalibrate(nn.BatchNorm1d(1), iter(DATA), mode="layerwise")


def test_public_failure_c92_accuracy_comes_back() -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(512, 10, generator=g) * 3 + 100
    y = ((x - 100) @ torch.randn(10, generator=g) > 0).long()
    net = nn.Sequential(nn.BatchNorm1d(10, momentum=0.001), nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()

    def accuracy(model: nn.Module) -> float:
        return (model.eval()(x).argmax(1) == y).float().mean().item()

    assert accuracy(net) < 0.7
    assert accuracy(recalibrate(net, x.split(128))[0]) > 0.95


@pytest.mark.parametrize("mode", ["one-pass", "layerwise"])
def test_an_in_place_first_layer_does_not_reach_the_batches(mode: str) -> None:
    x = torch.tensor([[-1.0], [2.0], [-3.0]])
    recalibrate(nn.Sequential(nn.ReLU(inplace=True), nn.BatchNorm1d(1)), [x], mode=mode)
    assert x.flatten().tolist() == [-1.0, 2.0, -3.0]


class Padded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = ms.nn.BatchNorm1d(2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.norm(input=x, mask=mask)


@pytest.mark.parametrize("mode", ["one-pass", "layerwise"])
def test_padding_that_a_mask_drops_stays_out_and_arguments_have_names(mode: str) -> None:
    x = torch.tensor([[1.0, 10.0], [2.0, 20.0], [6.0, 60.0], [999.0, 999.0]])
    mask = torch.tensor([[True], [True], [True], [False]])
    net, _ = recalibrate(Padded(), [(x, mask), (x, mask)], mode=mode)
    torch.testing.assert_close(net.norm.running_mean, torch.tensor([3.0, 30.0]))
    torch.testing.assert_close(net.norm.running_var, torch.cat([x[:3], x[:3]]).var(0))


def test_a_channel_that_nan_reached_keeps_what_it_had_and_is_named() -> None:
    x = torch.tensor([[1.0, 1.0], [3.0, float("nan")]])
    net, certificate = recalibrate(nn.BatchNorm1d(2), [x])
    assert net.running_mean.tolist() == [2.0, 0.0]
    assert net.running_var.tolist() == [2.0, 1.0]
    assert "channels 1 keep" in certificate.refused[0]
