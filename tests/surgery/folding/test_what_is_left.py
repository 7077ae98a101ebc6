"""Dead biases, and scales that meet only each other."""

from __future__ import annotations

import torch
from tests.surgery.folding.nets import Net, settled
from torch import nn

import musigma as ms
from musigma.surgery import fold


def test_a_bias_that_a_norm_subtracts_again_goes() -> None:
    net = settled(nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1)))
    x = torch.randn(2, 3, 6, 6)
    folded, certificate = fold(net, x)
    assert folded[0].bias is None
    assert folded[3].bias is not None
    assert certificate.changed == ("0.bias: 4 values that 1 subtracts again",)
    torch.testing.assert_close(folded(x), net(x), rtol=1e-5, atol=1e-5)


def test_a_dead_bias_behind_a_hook_stays() -> None:
    net = settled(nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4)))
    net[0].register_forward_hook(lambda *_: None)
    _, certificate = fold(net, torch.randn(2, 3, 6, 6))
    assert certificate.refused == ("0.bias: a forward hook on 0 would see other values",)


def test_consecutive_scales_become_one_where_no_layer_takes_them() -> None:
    net = settled(
        Net(
            lambda m, x: m.c(m.b(m.a(x))).relu(),
            a=nn.BatchNorm1d(3),
            b=ms.nn.FrozenBatchNorm1d(3),
            c=nn.BatchNorm1d(3),
        )
    )
    x = torch.randn(5, 3)
    folded, certificate = fold(net, x)
    assert certificate.changed == ("b: merged into c", "a: merged into c")
    assert type(folded.a) is type(folded.b) is nn.Identity
    torch.testing.assert_close(folded(x * 3), net(x * 3), rtol=1e-5, atol=1e-5)
