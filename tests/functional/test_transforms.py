"""torch.func, forward AD, checkpoints and fake tensors, through the functions and through the layers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacrev, jvp, stack_module_state, vjp, vmap
from torch.testing import assert_close

import musigma as ms

f = ms.functional
D = torch.float64
NORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "layer": lambda t: f.layer_norm(t, (4,), activation="silu"),
    "rms": lambda t: f.rms_norm(t, (4,)),
    "group": lambda t: f.group_norm(t, 3),
    "instance": lambda t: f.instance_norm(t),
    "batch": lambda t: f.batch_norm(t, None, None, training=True),
    "batch eval": lambda t: f.batch_norm(t, torch.zeros(6, dtype=D), torch.ones(6, dtype=D)),
    "layer norm 2d": lambda t: ms.nn.LayerNorm2d(6, elementwise_affine=False)(t[..., None]),
}
LOSS = torch.linspace(-1, 2, 72, dtype=D)


def loss(norm: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda t: (norm(t).reshape(-1) * LOSS).pow(3).sum()


@pytest.mark.parametrize("name", NORMS)
def test_grad_vjp_and_jvp_agree_with_autograd(name: str) -> None:
    x, v = torch.randn(3, 6, 4, dtype=D), torch.randn(3, 6, 4, dtype=D)
    wanted = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(NORMS[name])(wanted), wanted)
    assert_close(grad(loss(NORMS[name]))(x), expected)
    assert_close(vjp(loss(NORMS[name]), x)[1](torch.ones((), dtype=D))[0], expected)
    directional = (expected * v).sum()
    assert_close(jvp(loss(NORMS[name]), (x,), (v,))[1], directional)
    with forward_ad.dual_level():
        y = loss(NORMS[name])(forward_ad.make_dual(x, v))
        assert_close(forward_ad.unpack_dual(y).tangent, directional)


@pytest.mark.parametrize("name", NORMS)
def test_hessians_agree_with_autograd(name: str) -> None:
    x = torch.randn(3, 6, 4, dtype=D)
    expected = torch.autograd.functional.hessian(loss(NORMS[name]), x)
    assert_close(hessian(loss(NORMS[name]))(x), expected)
    assert_close(jacrev(grad(loss(NORMS[name])))(x), expected)


@pytest.mark.parametrize("name", NORMS)
def test_vmap_is_the_loop(name: str) -> None:
    """Where the batch is mapped, BatchNorm's statistics are per sample."""
    x = torch.randn(5, 3, 6, 4, dtype=D)
    assert_close(vmap(NORMS[name])(x), torch.stack([NORMS[name](t) for t in x]))
    assert_close(vmap(grad(loss(NORMS[name])))(x), torch.stack([grad(loss(NORMS[name]))(t) for t in x]))
    assert_close(
        vmap(NORMS[name], in_dims=-1, out_dims=1)(x.movedim(0, -1)),
        torch.stack([NORMS[name](t) for t in x], 1),
    )


def test_an_ensemble_trains_its_own_statistics_under_vmap() -> None:
    nets = [nn.Sequential(nn.Linear(2, 3), ms.nn.BatchNorm1d(3)) for _ in range(3)]
    x = torch.randn(16, 2)
    parameters, buffers = stack_module_state(nets)
    y = vmap(lambda p, b: functional_call(nets[0], (p, b), (x,)))(parameters, buffers)
    for i, net in enumerate(nets):
        assert_close(y[i], net(x))
        assert_close(buffers["1.running_var"][i], net[1].running_var)
    assert buffers["1.num_batches_tracked"].tolist() == [1, 1, 1]


def test_statistics_that_are_not_mapped_name_the_way_out() -> None:
    with pytest.raises(RuntimeError, match="track_running_stats=False"):
        vmap(ms.nn.BatchNorm1d(3))(torch.randn(5, 16, 3))
    layer = ms.nn.BatchNorm1d(3, track_running_stats=False)
    x = torch.randn(5, 16, 3)
    assert_close(vmap(layer)(x), torch.stack([layer(t) for t in x]))


def test_functional_call_updates_the_buffers_it_is_given() -> None:
    layer = ms.nn.BatchNorm1d(3)
    given = {k: v.clone() for k, v in layer.state_dict().items()}
    x = torch.randn(8, 3) + 4
    functional_call(layer, given, (x,))
    assert layer.num_batches_tracked.item() == 0
    assert given["num_batches_tracked"].item() == 1
    assert_close(given["running_mean"].double(), 0.1 * ms.moments(x, 0).mean, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", NORMS)
def test_fake_tensors_take_the_same_shape_and_strides(name: str) -> None:
    x = torch.randn(3, 6, 4, dtype=D)
    real = NORMS[name](x)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = NORMS[name](mode.from_tensor(x))
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)
