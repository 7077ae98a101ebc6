"""Norms folded into the layers around them: same function, or left alone with the reason."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.surgery.folding.nets import Net, settled
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import musigma as ms
from musigma.surgery import fold


def assert_folded(model: nn.Module, x: Tensor, paths: list[str]) -> nn.Module:
    state = {k: v.clone() for k, v in model.state_dict().items()}
    folded, certificate = fold(model, x)
    assert [line.split(":")[0] for line in certificate.changed] == paths, str(certificate)
    assert not certificate.refused
    for path in paths:
        assert type(folded.get_submodule(path)) is nn.Identity
    # one weight less between, so each output is off by rounding alone: float32 sums of up to ~100 products
    twin = copy.deepcopy(model).eval()
    want = twin(x)
    error = (folded.eval()(x) - want).abs().max()
    assert error <= 64 * torch.finfo(x.dtype).eps * want.abs().max(), error
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    return folded


@pytest.mark.parametrize(
    ("cin", "cout", "groups", "bias"),
    [(4, 6, 1, True), (4, 4, 2, False), (6, 9, 3, True), (4, 4, 4, True), (4, 8, 4, False)],
)
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_public_failure_c49_grouped_transposed_convolutions(
    cin: int, cout: int, groups: int, bias: bool, dims: int
) -> None:
    conv = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[dims - 1]
    norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dims - 1]
    net = nn.Sequential(
        conv(cin, cout, 3, stride=2, padding=1, output_padding=1, groups=groups, bias=bias), norm(cout)
    )
    assert_folded(settled(net), torch.randn(2, cin, *[5] * dims), ["1"])


def test_public_failure_c50_a_transposed_convolution_is_seen_without_a_flag() -> None:
    net = settled(nn.Sequential(nn.ConvTranspose2d(6, 6, 3), nn.BatchNorm2d(6)))
    assert_folded(net, torch.randn(2, 6, 7, 7), ["1"])


@pytest.mark.parametrize("bias", [True, False])
def test_public_failure_c52_the_bias_is_scaled_and_the_shift_kept(bias: bool) -> None:
    net = settled(nn.Sequential(nn.Conv2d(3, 5, 3, bias=bias), nn.BatchNorm2d(5)))
    folded = assert_folded(net, torch.randn(1, 3, 6, 6), ["1"])
    s = net[1].weight / (net[1].running_var + net[1].eps).sqrt()
    b = net[0].bias if bias else torch.zeros(5)
    torch.testing.assert_close(folded[0].bias, (b - net[1].running_mean) * s + net[1].bias)


@pytest.mark.parametrize("padding", [0, 1, (2, 0), "same"])
def test_public_failure_c53_forward_into_a_convolution_that_pads_with_zeros(padding: object) -> None:
    net = settled(nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3, padding=padding)))
    folded = assert_folded(net, torch.randn(1, 3, 8, 8), ["0"])
    x = torch.randn(2, 3, 5, 6)  # another size than the example's
    torch.testing.assert_close(folded(x), net(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", ["circular", "reflect", "replicate"])
def test_forward_through_every_other_padding(mode: str) -> None:
    net = nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 6, 3, padding=1, padding_mode=mode, groups=2))
    assert_folded(settled(net), torch.randn(1, 4, 6, 6), ["0"])


@pytest.mark.parametrize(
    ("layers", "shape", "path"),
    [
        ([nn.Linear(3, 5), nn.BatchNorm1d(5)], (4, 3), "1"),
        ([nn.Conv1d(4, 6, 3, groups=2, dilation=2), nn.BatchNorm1d(6)], (2, 4, 9), "1"),
        (
            [nn.Conv2d(4, 6, 3, stride=2, padding=1, padding_mode="circular"), nn.BatchNorm2d(6)],
            (2, 4, 9, 9),
            "1",
        ),
        ([nn.Conv3d(2, 4, 2), nn.SyncBatchNorm(4)], (2, 2, 3, 3, 3), "1"),
        ([nn.Conv2d(3, 4, 1), ms.nn.FrozenBatchNorm2d(4)], (2, 3, 4, 4), "1"),
        ([nn.Conv2d(3, 4, 1), ms.nn.BatchNorm2d(4)], (2, 3, 4, 4), "1"),
        (
            [nn.Conv2d(3, 4, 1), nn.InstanceNorm2d(4, affine=True, track_running_stats=True)],
            (2, 3, 4, 4),
            "1",
        ),
        ([nn.Conv2d(3, 4, 1), ms.nn.InstanceNorm2d(4, track_running_stats=True)], (2, 3, 4, 4), "1"),
        ([nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, affine=False)], (2, 3, 4, 4), "1"),
        ([nn.Conv2d(3, 4, 1), nn.Dropout2d(0.5), nn.BatchNorm2d(4)], (2, 3, 4, 4), "2"),
        ([nn.Conv2d(3, 4, 1), nn.AvgPool2d(2), nn.BatchNorm2d(4)], (2, 3, 4, 4), "2"),
        ([nn.Linear(3, 8), nn.Unflatten(1, (4, 2)), nn.BatchNorm1d(4)], (2, 3), "2"),
        ([nn.Conv2d(3, 8, 3), nn.PixelShuffle(2), nn.BatchNorm2d(2)], (2, 3, 5, 5), "2"),
        ([nn.BatchNorm1d(3), nn.Linear(3, 4)], (5, 3), "0"),
        ([nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(48, 4)], (2, 3, 4, 4), "0"),
        ([nn.BatchNorm2d(3), nn.AvgPool2d(2), nn.Conv2d(3, 4, 1)], (2, 3, 4, 4), "0"),
        ([nn.BatchNorm2d(3), nn.ZeroPad2d(1), nn.Conv2d(3, 4, 3)], (2, 3, 4, 4), "0"),
        ([nn.BatchNorm2d(3), nn.ConstantPad2d(2, 1.5), nn.Conv2d(3, 4, 3)], (2, 3, 4, 4), "0"),
        ([nn.BatchNorm2d(3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 4)], (2, 3, 4, 4), "0"),
        (
            [nn.BatchNorm2d(3), nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(3, 4, 3)],
            (2, 3, 4, 4),
            "0",
        ),
        ([ms.nn.Standardize([1.0, 2.0, 3.0], [0.5, 2.0, 4.0]), nn.Linear(3, 4)], (2, 3), "0"),
        ([nn.Linear(3, 2), ms.nn.Unstandardize([1.0, 2.0], [0.5, 2.0])], (2, 3), "1"),
    ],
    ids=lambda v: "-".join(type(m).__name__ for m in v) if isinstance(v, list) else "",
)
def test_every_layer_and_what_may_lie_between(
    layers: list[nn.Module], shape: tuple[int, ...], path: str
) -> None:
    net = nn.Sequential(*layers)
    for layer in layers:
        if not isinstance(layer, ms.nn.Standardize | ms.nn.Unstandardize):
            settled(layer)
    assert_folded(net.eval(), torch.randn(*shape), [path])


def assert_refused(model: nn.Module, x: Tensor, path: str, reason: str) -> None:
    folded, certificate = fold(settled(model), x)
    assert not certificate.changed, str(certificate)
    (line,) = (line for line in certificate.refused if line.startswith(f"{path}: "))
    assert reason in line, line
    assert type(folded.get_submodule(path)) is type(model.get_submodule(path))
    torch.testing.assert_close(folded(x), model(x), rtol=0, atol=0)


CONV, NORM = (lambda: nn.Conv2d(3, 3, 1)), (lambda: nn.BatchNorm2d(3))


def hooked(layer: nn.Module) -> nn.Module:
    layer.register_forward_hook(lambda *_: None)
    return layer


class WithActivation(nn.BatchNorm2d):
    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(super().forward(x))


def branching(m: nn.Module, x: Tensor) -> Tensor:
    y = m.conv(x)
    return m.norm(y) if bool(y.sum() > -1e9) else y


BATCH = nn.BatchNorm2d(3, track_running_stats=False)
REFUSED: list[tuple[str, Callable[[nn.Module, Tensor], Any], dict[str, nn.Module]]] = [
    ("conv can't take it: it is called 2 times", lambda m, x: m.norm(m.conv(m.conv(x))), {}),
    ("it is called 2 times", lambda m, x: m.norm(m.norm(m.conv(x))), {}),
    ("a forward hook on conv", lambda m, x: m.norm(m.conv(x)), {"conv": hooked(CONV())}),
    ("a forward hook on norm", lambda m, x: m.norm(m.conv(x)), {"norm": hooked(NORM())}),
    ("a forward hook on conv", lambda m, x: m.norm(m.conv(x)), {"conv": hooked(nn.Sequential(CONV()))}),
    ("also goes to add", lambda m, x: (lambda y: m.norm(y) + y)(m.conv(x)), {}),
    ("also goes to cat", lambda m, x: (lambda y: torch.cat([m.norm(y), y]))(m.conv(x)), {}),
    ("the model returns the output", lambda m, x: (lambda y: (m.norm(y), y))(m.conv(x)), {}),
    ("branches on data (bool)", branching, {}),
    ("comes from relu in the model", lambda m, x: m.norm(m.conv(x).relu()), {}),
    ("is parametrized", lambda m, x: m.norm(m.conv(x)), {"conv": parametrizations.weight_norm(CONV())}),
    ("it is given", lambda m, x: m.norm(m.conv(x)), {"conv": nn.Conv2d(3, 3, 1, bias=False), "norm": BATCH}),
    ("its weight is also read by sum", lambda m, x: m.norm(m.conv(x)) * m.norm.weight.sum(), {}),
    ("its weight is also read by sum", lambda m, x: m.norm(m.conv(x)) + m.conv.weight.sum(), {}),
    ("the model returns its output", lambda m, x: m.norm(x), {}),
    ("the scale is negative", lambda m, x: m.norm(F.max_pool2d(m.conv(x), 2)), {}),
    ("averages zeros in", lambda m, x: m.norm(F.avg_pool2d(m.conv(x), 2, padding=1)), {}),
    ("pads with 0", lambda m, x: m.conv(F.pad(m.norm(x), (1, 1))), {}),
    ("transposed", lambda m, x: m.conv(m.norm(x)), {"conv": nn.ConvTranspose2d(3, 3, 2)}),
    ("more than scale and shift: relu", lambda m, x: m.norm(m.conv(x)), {"norm": WithActivation(3)}),
]  # fmt: skip


@pytest.mark.parametrize(("reason", "forward", "layers"), REFUSED)
def test_what_would_not_be_exact_is_left_alone_with_the_reason(
    reason: str, forward: Callable[[nn.Module, Tensor], Any], layers: dict[str, nn.Module]
) -> None:
    net = Net(forward, **{"conv": CONV(), "norm": NORM(), **layers})
    assert_refused(net, torch.randn(2, 3, 4, 4), "norm", reason)


def test_a_tied_weight_is_left_alone() -> None:
    net = Net(lambda m, x: m.norm(m.conv(x)) + m.other(x), conv=CONV(), norm=NORM(), other=CONV())
    net.other.weight = net.conv.weight
    assert_refused(net, torch.randn(2, 3, 4, 4), "norm", "its weight is tied: conv.weight, other.weight")


def test_a_model_in_training_mode_is_folded_as_in_eval_mode_and_keeps_its_flags() -> None:
    net = settled(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.ReLU())).train()
    net[3].eval()
    folded, certificate = fold(net, torch.randn(2, 3, 5, 5))
    assert [m.training for m in folded] == [True, True, True, False]
    assert folded.training
    assert any("eval mode" in note for note in certificate.notes)
    x = torch.randn(2, 3, 5, 5)
    torch.testing.assert_close(folded.eval()(x), net.eval()(x), rtol=1e-5, atol=1e-5)


def test_the_certificate_measures_outputs_gradients_and_every_place(tmp_path: Path) -> None:
    net = settled(
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1), nn.BatchNorm2d(2))
    )
    _, certificate = fold(net, torch.randn(2, 3, 5, 5))
    assert [m.place for m in certificate.places] == ["1", "4"]
    assert all(m.difference <= m.bound and m.rounded <= m.rounded_bound for m in certificate.places)
    assert 0 <= certificate.gradient <= certificate.gradient_bound < 1e-9
    certificate.save(tmp_path / "fold.json")
    assert json.loads((tmp_path / "fold.json").read_text())["places"][1]["place"] == "4"


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="kinds must be of backward"):
        fold(nn.ReLU(), torch.ones(1), kinds=["sideways"])
