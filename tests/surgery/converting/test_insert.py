"""A norm goes into a trained network, or out of it, and the network computes what it did."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn

import musigma as ms
from musigma.surgery import insert, remove


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2 + 3


class Block(nn.Module):
    """Not a Sequential: its forward names its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv(x).relu().mean((2, 3)))


@pytest.mark.parametrize("dims", [0, 1, 2, 3])
def test_a_batch_norm_undoes_itself_for_any_input(dims: int) -> None:
    layer = nn.Linear(3, 5) if dims == 0 else getattr(nn, f"Conv{dims}d")(3, 5, 1)
    net = nn.Sequential(layer, nn.ReLU(), nn.Flatten())
    data = [values(7, 3, *[4] * dims), values(5, 3, *[4] * dims, seed=1) * 10]
    new, certificate = insert(net, data[0], after="0", loader=data)
    norm = new._modules["0_norm"]
    outputs = torch.cat([net[0](x) for x in data]).transpose(0, 1).flatten(1)
    torch.testing.assert_close(norm.running_mean, outputs.mean(1))
    torch.testing.assert_close(norm.running_var, outputs.var(1))
    torch.testing.assert_close(norm.bias, outputs.mean(1))
    torch.testing.assert_close(norm.weight, (outputs.var(1) + 1e-5).sqrt())
    other = values(9, 3, *[4] * dims, seed=2) - 50
    torch.testing.assert_close(new.eval()(other), net(other), rtol=1e-5, atol=1e-4)
    assert certificate.difference <= certificate.bound
    assert [k for k in new.state_dict() if "norm" not in k] == list(net.state_dict())
    assert list(net._modules) == ["0", "1", "2"]
    assert type(norm).__name__ == f"BatchNorm{max(dims, 1)}d"


def test_in_double_the_function_is_kept_to_the_last_places() -> None:
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh()).double()
    x = values(20, 3).double()
    new, _ = insert(net, x, after="0")
    torch.testing.assert_close(new.eval()(x), net(x), rtol=1e-13, atol=1e-13)


def test_a_layer_that_a_forward_names_is_wrapped() -> None:
    net = Block()
    x = values(6, 3, 5, 5)
    new, certificate = insert(net, x, after="conv")
    assert list(dict(new.conv.named_children())) == ["layer", "norm"]
    assert certificate.changed == ("conv: BatchNorm2d behind it, as conv.norm",)
    torch.testing.assert_close(new.eval()(x), net(x), rtol=1e-4, atol=1e-5)
    back, certificate = remove(new, x)
    assert repr(back) == repr(net.eval())
    assert list(back.state_dict()) == list(net.state_dict())
    torch.testing.assert_close(back(x), net(x))


def test_what_was_inserted_into_a_sequential_goes_without_a_trace() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Sequential(nn.Conv2d(4, 4, 3)))
    x = values(4, 3, 8, 8)
    new, _ = insert(net, x, after=["0", "2.0"])
    assert [k for k in new.state_dict() if k.endswith("running_var")] == [
        "0_norm.running_var",
        "2.0_norm.running_var",
    ]
    back, certificate = remove(new, x)
    assert repr(back) == repr(net)
    assert len(certificate.changed) == 2
    assert certificate.difference <= certificate.bound


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm", "groupnorm", "instancenorm"])
def test_norms_of_examples_are_undone_for_one_and_refused_for_many(kind: str) -> None:
    if kind in ("layernorm", "rmsnorm"):
        net, one, many = nn.Sequential(nn.Linear(3, 6)), values(1, 3), values(5, 3)
    else:
        net, one, many = nn.Sequential(nn.Conv2d(3, 6, 1)), values(1, 3, 4, 4), values(5, 3, 4, 4)
    new, certificate = insert(net, one, after="0", kind=kind)
    torch.testing.assert_close(new(one), net(one), rtol=1e-4, atol=1e-5)
    assert certificate.difference <= certificate.bound
    with pytest.raises(ValueError, match="restore examples of one mean and spread only"):
        insert(net, many, after="0", kind=kind)


def test_where_no_norm_can_go_is_said() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.LSTM(4, 4))
    with pytest.raises(ValueError, match="features last"):
        insert(net, values(2, 5, 3), after="0")
    with pytest.raises(ValueError, match=r"got 'conv'; it has \['0', '1'\]"):
        insert(net, values(2, 5, 3), after="conv")
    with pytest.raises(ValueError, match="gives no tensor"):
        insert(net, values(2, 5, 3), after="1")
    with pytest.raises(ValueError, match="single values"):
        insert(net[:1], values(2, 3), after="0", kind="instancenorm")


def test_a_forward_that_reads_the_weight_of_its_layer_is_not_broken() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * self.linear.weight.sum()

    net = Reads()
    with pytest.raises(ms.surgery.CertificateError, match="does not run"):
        insert(net, values(5, 3), after="linear")
    assert isinstance(net.linear, nn.Linear)


@pytest.mark.parametrize("affine", [True, False])
def test_a_batch_norm_leaves_the_scale_and_shift_that_it_is(affine: bool) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, affine=affine)).double()
    for _ in range(3):
        net(values(8, 3, 5, 5).double())
    net.eval()
    x = values(3, 3, 5, 5, seed=4).double()
    new, certificate = remove(net, x)
    assert isinstance(new[1], ms.nn.Affine)
    torch.testing.assert_close(new(x), net(x), rtol=1e-12, atol=1e-12)
    assert certificate.difference <= certificate.bound
    assert "which it is in evaluation" in certificate.changed[0]


def test_a_layer_norm_leaves_the_closest_scale_and_shift_and_what_that_costs() -> None:
    net = nn.Sequential(nn.Linear(3, 6), nn.LayerNorm(6))
    x = values(50, 2, 3)
    new, certificate = remove(net, x)
    with torch.no_grad():
        z, y = net[0](x).flatten(0, 1), net(x).flatten(0, 1)
        ones = torch.ones(100, 1)
        fits = [torch.linalg.lstsq(torch.cat([z[:, [c]], ones], 1), y[:, c]).solution for c in range(6)]
        torch.testing.assert_close(new[1].weight, torch.stack([f[0] for f in fits]), rtol=1e-3, atol=1e-4)
        assert certificate.difference == pytest.approx((new(x) - net(x)).abs().max().item(), rel=1e-3)
    assert math.isnan(certificate.bound)


def test_removal_leaves_what_it_cannot_replace() -> None:
    class Clamped(nn.BatchNorm1d):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).clamp(max=1)

    net = nn.Sequential(Clamped(3), nn.BatchNorm1d(3)).eval()
    nn.init.constant_(net[1].running_mean, 0.5)
    new, certificate = remove(net, values(5, 3))
    assert "Clamped has a forward of its own" in certificate.refused[0]
    torch.testing.assert_close(new(values(4, 3)), copy.deepcopy(net)(values(4, 3)))


def test_affine_says_which_sizes_it_takes() -> None:
    with pytest.raises(ValueError, match=r"input must have sizes \(4,\) from dim 1 on, got shape \(2, 3\)"):
        ms.nn.Affine(4)(values(2, 3))
    half = ms.nn.Affine((2, 3), dim=-2, dtype=torch.float64)
    assert half(values(5, 2, 3).half()).dtype == torch.float16
