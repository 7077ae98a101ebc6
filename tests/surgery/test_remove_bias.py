"""A bias before a norm that subtracts it: removed where it is dead, left where it only looks so."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import musigma as ms
from musigma.surgery import CertificateError, cancelled_biases, remove_bias
from musigma.surgery._certificate import certified


def names(model: nn.Module, example: Tensor) -> list[str]:
    return [bias.name for bias in cancelled_biases(model, example)]


X2, X3, X4, X5 = (torch.randn(4, 3, *[6] * d, generator=torch.Generator().manual_seed(d)) for d in range(4))


@pytest.mark.parametrize(
    ("layers", "x"),
    [
        ([nn.Linear(3, 5), nn.BatchNorm1d(5)], X2),
        ([nn.Conv1d(3, 5, 3), nn.BatchNorm1d(5)], X3),
        ([nn.Conv2d(3, 6, 3, groups=3), nn.BatchNorm2d(6)], X4),
        ([nn.Conv3d(3, 5, 3), nn.BatchNorm3d(5)], X5),
        ([nn.ConvTranspose2d(3, 5, 3, stride=2), nn.BatchNorm2d(5)], X4),
        ([nn.Conv2d(3, 5, 3), nn.InstanceNorm2d(5)], X4),
        ([nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5, affine=False, track_running_stats=False)], X4),
        ([nn.Conv2d(3, 5, 3), ms.nn.BatchNorm2d(5)], X4),
        ([nn.Conv2d(3, 5, 3), nn.MaxPool2d(2, padding=1), nn.BatchNorm2d(5)], X4),
        ([nn.Linear(3, 5), nn.Unflatten(1, (5, 1)), nn.BatchNorm1d(5)], X2),
    ],
    ids=[
        "linear",
        "conv1d",
        "grouped",
        "conv3d",
        "transposed",
        "instance",
        "no buffers",
        "ours",
        "pooling",
        "view",
    ],
)
def test_dead_bias_is_removed_and_both_modes_agree(layers: list[nn.Module], x: Tensor) -> None:
    net = nn.Sequential(*layers, nn.ReLU())
    for _ in range(3):
        net(x * 2 + 1)  # running statistics that are not 0 and 1
    before = {k: v.clone() for k, v in net.state_dict().items()}
    for training in (True, False):
        net.train(training)
        lighter, certificate = remove_bias(net, x)
        assert lighter[0].bias is None
        assert len(certificate.changed) == 1
        assert certificate.difference <= certificate.bound < 1e-9
        assert lighter.training is training
        copies = [ms.graph.call(m, x) for m in (net, lighter)]
        torch.testing.assert_close(*copies, rtol=1e-4, atol=1e-5)
        net.load_state_dict(before)
    assert net[0].bias is not None


class ThroughTranspose(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 5), nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x).transpose(1, 2))


class WrongAxis(ThroughTranspose):
    """The time axis is as long as the features: shapes match by luck, and the bias is not cancelled."""

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x))


class Residual(ThroughTranspose):
    def forward(self, x: Tensor) -> Tensor:
        z = self.linear(x)
        return self.norm(z.transpose(1, 2)).transpose(1, 2) + z


class Twice(ThroughTranspose):
    def forward(self, x: Tensor) -> Tensor:
        once = self.norm(self.linear(x).transpose(1, 2))
        return once + self.norm(self.linear(2 * x).transpose(1, 2))


class Returned(ThroughTranspose):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.linear(x)
        return self.norm(z.transpose(1, 2)), z


class Functional(ThroughTranspose):
    def forward(self, x: Tensor) -> Tensor:
        z = F.linear(x, self.linear.weight, self.linear.bias).transpose(1, 2)
        return F.batch_norm(z, self.norm.running_mean, self.norm.running_var, training=self.training)


@pytest.mark.parametrize(
    ("model", "dead"),
    [
        (ThroughTranspose, True),
        (Functional, True),
        (WrongAxis, False),
        (Residual, False),
        (Returned, False),
        (Twice, True),
    ],
)
def test_data_flow_decides_not_names(model: type[nn.Module], dead: bool) -> None:
    assert names(model(), torch.randn(2, 5, 3)) == (["linear.bias"] if dead else [])


@pytest.mark.parametrize(
    "between",
    [nn.ReLU(), nn.Dropout(0.5), nn.ZeroPad2d(1), nn.AvgPool2d(2, padding=1)],
    ids=["activation", "dropout", "padding", "padded average"],
)
def test_something_between_keeps_the_bias(between: nn.Module) -> None:
    assert names(nn.Sequential(nn.Conv2d(3, 4, 3), between, nn.BatchNorm2d(4)), X4) == []


@pytest.mark.parametrize(
    "norm",
    [nn.GroupNorm(2, 4), nn.LayerNorm([4, 4, 4]), nn.GroupNorm(1, 4)],
    ids=["group", "layer", "one group"],
)
def test_norms_over_several_channels_do_not_cancel_a_bias(norm: nn.Module) -> None:
    assert names(nn.Sequential(nn.Conv2d(3, 4, 3), norm), X4) == []


def test_a_module_used_twice_has_its_running_mean_shifted_once() -> None:
    net, x = Twice(), torch.randn(2, 5, 3)
    net(x + 1)
    before = net.norm.running_mean.clone()
    lighter, certificate = remove_bias(net, x)
    assert certificate.difference <= certificate.bound < 1e-9
    torch.testing.assert_close(lighter.norm.running_mean, before - net.linear.bias)


class Added(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(3))
        self.tied = nn.Linear(3, 3)
        self.also = nn.Linear(3, 3)
        self.also.bias = self.tied.bias
        self.norms = nn.ModuleList(nn.BatchNorm1d(3) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.norms
        return a(x + self.shift) + b(self.tied(x)) + c(self.also(x))


def test_what_code_adds_or_another_layer_shares_is_left_alone_with_the_reason() -> None:
    _, certificate = remove_bias(Added(), X2)
    assert certificate.changed == ()
    assert certificate.refused == (
        "shift: add adds it, which has to be changed in the model's code",
        "tied.bias: it is tied: tied.bias, also.bias",
    )


def test_a_dead_bias_gets_no_gradient() -> None:
    net = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5)).double()
    weights = torch.randn(4, 5, dtype=torch.float64)
    (net(X2.double()) * weights).sum().backward()
    # Zero but for rounding: four terms of size |g|·rstd are summed, after as many roundings in each.
    rstd = ms.moments(net[0](X2.double()).detach(), 0).rstd(1e-5)
    assert (net[0].bias.grad.abs() < 32 * 2.0**-52 * rstd * weights.abs().sum(0)).all()
    assert net[0].weight.grad.abs().max() > 1e-3


def test_a_change_of_function_is_refused_and_the_model_untouched(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(3, 5), nn.ReLU())
    before = net[0].weight.clone()

    def change(model: nn.Module) -> None:
        model[0].weight.data[0, 0] += 1e-9

    with pytest.raises(CertificateError, match="rounding accounts for"):
        certified("nudge", net, change, X2, changed=("0.weight",))
    assert torch.equal(net[0].weight, before)


def test_a_certificate_is_written_whole_as_json(tmp_path: Path) -> None:
    _, certificate = remove_bias(nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5)), X2)
    certificate.save(tmp_path / "certificate.json")
    read = json.loads((tmp_path / "certificate.json").read_text())
    assert read["operation"] == "remove_bias"
    assert read["difference"] <= read["bound"]
    assert [p.name for p in tmp_path.iterdir()] == ["certificate.json"]
    with pytest.raises(FileNotFoundError):
        certificate.save(tmp_path / "no" / "certificate.json")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_every_dtype(dtype: torch.dtype) -> None:
    net = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5)).to(dtype)
    lighter, certificate = remove_bias(net, X2.to(dtype))
    assert lighter[0].bias is None
    assert lighter[0].weight.dtype == dtype
    assert certificate.rounded <= certificate.rounded_bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_in_place_first_layer_does_not_reach_the_example(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 5), nn.BatchNorm1d(5)).to(dtype)
    x = torch.tensor([[-1.0, 2.0, -3.0], [1.0, -2.0, 3.0]], dtype=dtype)
    before = x.clone()
    remove_bias(model, x)
    assert torch.equal(x, before)


def test_a_bias_that_dropout_scales_in_training_stays_in_eval_mode_too() -> None:
    model = nn.Sequential(
        nn.Linear(3, 5), nn.Dropout(0.5), nn.BatchNorm1d(5), nn.Linear(5, 4), nn.BatchNorm1d(4)
    )
    lighter, certificate = remove_bias(model.eval(), X2)
    assert [line.split(":")[0] for line in certificate.changed] == ["3.bias"]
    assert lighter[0].bias is not None


class TwoIntoOneNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(3, 5), nn.Linear(3, 5), nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.a(x)) + self.norm(self.b(x))


class MeanReadElsewhere(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Linear(3, 5), nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.a(x)) + self.norm.running_mean


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("kind", [TwoIntoOneNorm, MeanReadElsewhere])
def test_a_running_mean_that_others_read_is_not_shifted(kind: type[nn.Module], training: bool) -> None:
    _, certificate = remove_bias(kind().train(training), X2)
    assert certificate.changed == ()
    assert "running mean is also read by" in certificate.refused[0]


def test_a_wrapped_model_is_changed_inside_its_wrapper() -> None:
    lighter, certificate = remove_bias(nn.DataParallel(nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))), X2)
    assert lighter.module[0].bias is None
    assert certificate.changed[0].startswith("0.bias")


def test_a_batch_of_one_that_only_eval_mode_takes_is_refused_with_the_mode() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5)).eval()
    with pytest.raises(ValueError, match="more than 1 value per channel") as caught:
        remove_bias(model, X2[:1])
    assert "run in train mode" in caught.value.__notes__[0]


def test_another_default_device_plays_no_part() -> None:
    model, x = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5)), X2.clone()
    with torch.device("meta"):
        _, certificate = remove_bias(model, x)
    assert len(certificate.changed) == 1
