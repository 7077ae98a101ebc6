"""Norms become norms of another kind, calibrated on data; what is exact is proven, the rest is measured."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn

import musigma as ms
from musigma.surgery import convert, freeze
from weights import imagenet_images, mobilenet_v2


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2 + 1


def trained(channels: int = 8, norm: type[nn.Module] = nn.BatchNorm2d) -> nn.Sequential:
    """A small network whose statistics, weights and biases are those of data."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, channels, 3), norm(channels), nn.ReLU(), nn.Conv2d(channels, 4, 3), norm(4), nn.ReLU()
    )
    for _ in range(50):
        net(values(16, 3, 10, 10, seed=torch.randint(99, ()).item()))
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.weight.uniform_(-1, 2)
                module.bias.normal_()
    return net.eval()


def left_over(before: nn.Module, after: nn.Module, x: Tensor) -> float:
    with torch.no_grad():
        y, z = before(x), after(x)
    return float((y - z).square().mean().sqrt() / y.std())


@pytest.mark.parametrize(
    ("target", "kind"),
    [("groupnorm", nn.GroupNorm), ("layernorm", ms.nn.LayerNorm2d), ("instancenorm", nn.InstanceNorm2d)],
)
def test_calibrated_weights_beat_the_old_ones_and_the_error_is_told(
    target: str, kind: type[nn.Module]
) -> None:
    net, x = trained(), values(32, 3, 10, 10)
    new, certificate = convert(net, x, target=target)
    assert [type(new[1]), type(new[4])] == [kind, kind]
    assert not any(m.training for m in new.modules())
    naive = copy.deepcopy(new)
    with torch.no_grad():
        for i in (1, 4):
            naive[i].weight.copy_(net[i].weight)
            naive[i].bias.copy_(net[i].bias)
    assert left_over(net, new, x) < 0.9 * left_over(net, naive, x)
    assert certificate.difference == pytest.approx((net(x) - new(x)).abs().max().item(), rel=1e-4)
    assert math.isnan(certificate.bound)
    assert "calibrated on 32 examples" in certificate.changed[0]
    assert isinstance(net[1], nn.BatchNorm2d)


def test_the_fit_is_the_least_squares_of_numpy() -> None:
    net, x = nn.Sequential(trained()[:2]).eval(), values(8, 3, 6, 6)
    new, certificate = convert(net, x, groups=4)
    z = nn.functional.group_norm(net[0][0](x), 4).detach().double()
    y = net(x).detach().double()
    left = 0.0
    for c in range(8):
        a = torch.stack([z[:, c].flatten(), torch.ones_like(z[:, c].flatten())], 1)
        best = torch.linalg.lstsq(a, y[:, c].reshape(-1, 1)).solution.flatten()
        torch.testing.assert_close(new[0][1].weight[c].double(), best[0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(new[0][1].bias[c].double(), best[1], rtol=1e-5, atol=1e-6)
        left += float((y[:, c].flatten() - a @ best).square().mean())
    spread = y.transpose(0, 1).flatten(1).var(1, correction=0).sum()
    assert f"{math.sqrt(left / spread):.2g} sd" in certificate.changed[0]


def test_loaders_leave_targets_out_and_stop_where_told() -> None:
    net = trained()
    loader = [(values(8, 3, 10, 10, seed=i), torch.zeros(8)) for i in range(3)]
    _, certificate = convert(net, loader[0][0], loader=loader, max_batches=2)
    assert "on 16 examples" in certificate.changed[0]
    with pytest.raises(ValueError, match="at least one batch"):
        convert(net, loader[0][0], loader=[])


def test_no_group_has_one_value() -> None:
    flat = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1), nn.BatchNorm1d(1)).eval()
    new, certificate = convert(flat, values(8, 4))
    assert (new[0].num_groups, type(new[2])) == (1, nn.BatchNorm1d)
    assert "2: GroupNorm of 1 would normalize single values" in certificate.refused[0]
    assert "would normalize single values" in convert(flat, values(8, 4), groups=4)[1].refused[0]
    new, certificate = convert(flat, values(8, 4), target="instancenorm")
    assert len(certificate.refused) == 2
    new, certificate = convert(flat, values(8, 4), target="layernorm")
    assert isinstance(new[0], nn.LayerNorm)
    assert "it has one channel" in certificate.refused[0]


@pytest.mark.parametrize(
    ("channels", "size", "groups"), [(8, 10, 4), (64, 10, 32), (24, 10, 12), (96, 1, 6), (7, 9, 1)]
)
def test_groups_by_default(channels: int, size: int, groups: int) -> None:
    norm = nn.BatchNorm2d(channels).eval()
    new, _ = convert(nn.Sequential(norm), values(4, channels, size, size))
    assert new[0].num_groups == groups


def test_channels_that_make_no_groups_are_left_with_a_way_out() -> None:
    new, certificate = convert(trained(6), values(8, 3, 10, 10), groups=4)
    assert certificate.refused == ("1: its 6 channels do not make 4 groups; try 1, 2, 3 or 6",)
    assert isinstance(new[4], nn.GroupNorm)


def test_attributes_of_the_layer_stay() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, eps=1e-3)).double()
    net[1].weight.requires_grad_(False)
    heard: list[int] = []
    net[1].register_forward_hook(lambda *_: heard.append(1))
    new, _ = convert(net, values(4, 3, 6, 6).double())
    assert (new[1].eps, new[1].training, new[1].weight.dtype) == (1e-3, True, torch.float64)
    assert [p.requires_grad for p in new[1].parameters()] == [False, True]
    heard.clear()
    new(values(4, 3, 6, 6).double())
    assert heard == [1]
    assert type(convert(nn.Sequential(ms.nn.BatchNorm1d(8)), values(9, 8))[0][0]) is ms.nn.GroupNorm


class BNRelu(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


def test_subclasses_lazy_layers_ties_and_the_unreached_are_named() -> None:
    x = values(4, 3, 6, 6)
    new, certificate = convert(nn.Sequential(BNRelu(3), nn.BatchNorm2d(3)), x)
    assert (type(new[0]), type(new[1])) == (BNRelu, nn.GroupNorm)
    assert "0: BNRelu has a forward of its own" in certificate.refused[0]
    new, _ = convert(nn.Sequential(nn.LazyConv2d(8, 1), nn.LazyBatchNorm2d()), x)
    assert (type(new[1]), new[1].num_channels) == (nn.GroupNorm, 8)
    shared = nn.Sequential(nn.BatchNorm2d(3), nn.BatchNorm2d(3))
    shared[1].weight = shared[0].weight
    assert all("tied to" in reason for reason in convert(shared, x)[1].refused)

    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.BatchNorm2d(3), nn.BatchNorm2d(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.one(x)

    assert convert(Unused(), x)[1].refused == ("two: the data do not reach it",)


def test_a_norm_called_twice_is_converted_once() -> None:
    norm = nn.BatchNorm2d(8)
    net = nn.Sequential(nn.Conv2d(3, 8, 1), norm, nn.ReLU(), nn.Conv2d(8, 8, 1), norm)
    new, certificate = convert(net, values(4, 3, 6, 6))
    assert new[1] is new[4]
    assert len(certificate.changed) == 1
    assert "1 = 4: BatchNorm2d" in certificate.changed[0]


def test_pairs_and_groups_that_do_not_exist() -> None:
    with pytest.raises(
        ValueError, match="no conversion of 'layernorm' to 'groupnorm'; there is batchnorm to"
    ):
        convert(nn.LayerNorm(3), values(2, 3), source="layernorm", target="groupnorm")
    with pytest.raises(ValueError, match="groups is of a GroupNorm"):
        convert(nn.BatchNorm1d(3), values(2, 3), target="layernorm", groups=3)
    with pytest.raises(ValueError, match="where must name"):
        convert(nn.Sequential(nn.BatchNorm1d(3)), values(2, 3), where="1")


class Centers(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(-1, keepdim=True)) + 0.0


def transformer(bias: bool) -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8, bias=bias), nn.Linear(8, 3))
    with torch.no_grad():
        for p in net[1].parameters():
            p.normal_()
    return net


@pytest.mark.parametrize("bias", [True, False])
def test_layer_norm_of_centered_inputs_is_rms_norm_exactly(bias: bool) -> None:
    inner = transformer(bias).double()
    net = nn.Sequential(inner[0], Centers(), *inner[1:])
    x = values(5, 7, 6).double()
    new, certificate = convert(net, x, source="layernorm", target="rmsnorm")
    assert isinstance(new[2], nn.RMSNorm)
    torch.testing.assert_close(new(x), net(x), rtol=1e-12, atol=1e-12)
    assert certificate.difference <= certificate.bound
    assert "exact" in certificate.changed[0]
    assert torch.equal(new[2].weight, net[2].weight)


@pytest.mark.parametrize("bias", [True, False])
def test_layer_norm_to_rms_norm_moves_the_bias_into_the_linear_behind(bias: bool) -> None:
    net, x = transformer(bias), values(64, 6)
    new, certificate = convert(net, x, source="layernorm", target="rmsnorm")
    assert isinstance(new[1], nn.RMSNorm)
    assert math.isnan(certificate.bound)
    z = nn.functional.rms_norm(net[0](x), (8,), eps=1e-5)
    ones = torch.ones(64, 1)
    fits = [
        torch.linalg.lstsq(torch.cat([z[:, [c]], ones], 1), net[1](net[0](x))[:, c]).solution
        for c in range(8)
    ]
    torch.testing.assert_close(new[1].weight, torch.stack([f[0] for f in fits]), rtol=1e-4, atol=1e-4)
    shift = torch.stack([f[1] for f in fits])
    torch.testing.assert_close(new[2].bias, net[2].bias + net[2].weight @ shift, rtol=1e-4, atol=1e-4)


def test_a_bias_that_has_nowhere_to_go_keeps_its_layer() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = nn.LayerNorm(4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.norm(x)
            return h + self.linear(h)

    net = Residual()
    assert convert(net, values(5, 4), source="layernorm", target="rmsnorm")[1].changed  # its bias is 0
    nn.init.ones_(net.norm.bias)
    new, certificate = convert(net, values(5, 4), source="layernorm", target="rmsnorm")
    assert "it has a bias, RMSNorm has none" in certificate.refused[0]
    torch.testing.assert_close(new(values(3, 4)), net(values(3, 4)))
    images = nn.Sequential(ms.nn.LayerNorm2d(3))
    refused = convert(images, values(2, 3, 4, 4), source="layernorm", target="rmsnorm")[1].refused
    assert "LayerNorm2d has a forward of its own" in refused[0]


def test_what_is_an_identity_becomes_one_and_what_only_looks_so_on_the_data_does_not() -> None:
    net = nn.Sequential(
        nn.BatchNorm1d(4), nn.BatchNorm1d(4), nn.LayerNorm(4, eps=0.0), nn.LayerNorm(4, eps=0.0)
    )
    with torch.no_grad():
        net[0].running_mean.normal_()
        net[0].running_var.uniform_(0.5, 3)
        net[0].weight.copy_((net[0].running_var + net[0].eps).sqrt())
        net[0].bias.copy_(net[0].running_mean)
    x = values(16, 4)
    new, certificate = convert(net, x, source="any", target="identity")
    kinds = [type(m) for m in new]
    assert kinds == [nn.Identity, nn.BatchNorm1d, nn.LayerNorm, nn.Identity]
    assert certificate.difference <= certificate.bound
    assert certificate.refused == ("1: it is no identity", "2: it is no identity")
    row = nn.LayerNorm(4, eps=0.0)
    ms.nn.restore_identity_(row, x[:1])
    kept, certificate = convert(nn.Sequential(row), x[:1], source="layernorm", target="identity")
    assert isinstance(kept[0], nn.LayerNorm)
    frozen, _ = freeze(net, where="0")
    assert isinstance(convert(frozen, x, source="batchnorm", target="identity")[0][0], nn.Identity)


@pytest.mark.weights
def test_mobilenet_with_group_norms_calibrated_on_twenty_images_still_sees() -> None:
    net, (images, labels) = mobilenet_v2(), imagenet_images()
    batches = list(images.split(7))
    new, certificate = convert(net, batches[0], loader=batches)
    assert len(certificate.changed) == 52

    def right(model: nn.Module) -> int:
        with torch.no_grad():
            return int((torch.cat([model(x) for x in batches]).argmax(1) == labels).sum())

    naive = copy.deepcopy(new)
    with torch.no_grad():
        for name, norm in net.named_modules():
            if isinstance(norm, nn.BatchNorm2d):
                naive.get_submodule(name).weight.copy_(norm.weight)
                naive.get_submodule(name).bias.copy_(norm.bias)
    assert right(new) > right(naive)
