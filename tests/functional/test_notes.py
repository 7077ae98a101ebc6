"""What the source notes state about normalization, with their numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

import musigma as ms

f = ms.functional
PATHS = ("auto", "reference")
D = torch.float64


@pytest.mark.parametrize("path", PATHS)
def test_the_small_numerical_example(path: Any) -> None:
    """[1, 2, 3] → [−1.225, 0, 1.225]; with weight 0.5 and bias 1 → [0.388, 1, 1.612]."""
    z = torch.tensor([[1.0], [2.0], [3.0]])
    with ms.ops.use_kernels(path):
        plain = f.batch_norm(z, None, None, training=True)
        learned = f.batch_norm(z, None, None, torch.tensor([0.5]), torch.tensor([1.0]), training=True)
    assert_close(plain.flatten(), torch.tensor([-1.225, 0.0, 1.225]), rtol=0, atol=5e-4)
    assert_close(learned.flatten(), torch.tensor([0.388, 1.0, 1.612]), rtol=0, atol=5e-4)


@pytest.mark.parametrize("path", PATHS)
def test_gradients_of_weight_and_bias_are_the_two_sums(path: Any) -> None:
    """∂L/∂β = Σ g and ∂L/∂γ = Σ g·ẑ, over the batch and every position."""
    z, g = torch.randn(6, 4, 5, dtype=D) + 2, torch.randn(6, 4, 5, dtype=D)
    weight, bias = torch.randn(4, dtype=D, requires_grad=True), torch.randn(4, dtype=D, requires_grad=True)
    with ms.ops.use_kernels(path):
        u = f.batch_norm(z, None, None, weight, bias, training=True)
        dweight, dbias = torch.autograd.grad(u, (weight, bias), g)
    m = ms.moments(z, (0, 2), keepdim=True)
    normalized = (z - m.mean) * m.rstd(1e-5)
    assert_close(dbias, g.sum((0, 2)))
    assert_close(dweight, (g * normalized).sum((0, 2)))


@pytest.mark.parametrize("path", PATHS)
def test_the_input_gradient_has_its_three_paths(path: Any) -> None:
    """Directly through ẑ, through μ (∂μ/∂z = 1/n) and through σ² (∂σ²/∂z = 2(z − μ)/n)."""
    n, eps = 7, 1e-5
    z, g = torch.randn(n, 3, dtype=D, requires_grad=True), torch.randn(n, 3, dtype=D)
    weight = torch.randn(3, dtype=D)
    with ms.ops.use_kernels(path):
        (dz,) = torch.autograd.grad(f.batch_norm(z, None, None, weight, training=True), z, g)
    m = ms.moments(z.detach(), 0)
    centered, rstd = z.detach() - m.mean, m.rstd(eps)
    d_normalized = g * weight
    d_mean = -(d_normalized * rstd).sum(0)
    d_var = -0.5 * (d_normalized * centered * rstd**3).sum(0)
    assert_close(dz, d_normalized * rstd + d_mean / n + d_var * 2 * centered / n)


@pytest.mark.parametrize("path", PATHS)
def test_one_group_is_layer_norm_and_one_channel_a_group_is_instance_norm(path: Any) -> None:
    x = torch.randn(3, 6, 4, 5) * 2 + 1
    weight, bias = torch.randn(6), torch.randn(6)
    spread = [v[:, None, None].expand(6, 4, 5) for v in (weight, bias)]
    with ms.ops.use_kernels(path):
        assert_close(f.group_norm(x, 1, weight, bias), f.layer_norm(x, (6, 4, 5), *spread))
        assert_close(f.group_norm(x, 6, weight, bias), f.instance_norm(x, weight=weight, bias=bias))


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t,
    "every second": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "transposed": lambda t: t.mT.contiguous().mT,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("width", [2, 63, 100, 1024])
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
# (The reference is there to be read: it sums a transposed row in the order that torch likes.)
@pytest.mark.parametrize(
    ("path", "layout"), [*((p, k) for p in PATHS for k in LAYOUTS if (p, k) != ("reference", "transposed"))]
)
def test_a_batch_of_one_is_the_row_of_a_large_batch_bit_for_bit(
    path: Any, norm: str, width: int, layout: str, dtype: torch.dtype
) -> None:
    x = LAYOUTS[layout]((torch.randn(67, width) * 3 + 1).to(dtype))
    weight = torch.randn(width).to(dtype)
    with ms.ops.use_kernels(path):
        whole = getattr(f, norm)(x, (width,), weight)
        for i in (0, 31, 66):
            assert torch.equal(getattr(f, norm)(x[i : i + 1], (width,), weight)[0], whole[i])


@pytest.mark.parametrize("layer", [ms.nn.LayerNorm(8), ms.nn.RMSNorm(8), ms.nn.GroupNorm(1, 5)], ids=str)
def test_training_equals_evaluation(layer: nn.Module) -> None:
    x = torch.randn(4, 5, 8)
    assert torch.equal(layer.train()(x), layer.eval()(x))


@pytest.mark.parametrize("path", PATHS)
def test_batch_norm_couples_the_examples_and_layer_norm_does_not(path: Any) -> None:
    """Changing one example changes the others' outputs, and their gradients."""
    x = torch.randn(6, 4)
    changed = x.clone()
    changed[0] += 1
    g = torch.randn(6, 4)

    def others(norm: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.clone().requires_grad_()
        y = norm(x)
        return y[1:].detach(), torch.autograd.grad(y, x, g)[0][1:]

    def batch(t: Tensor) -> Tensor:
        return f.batch_norm(t, None, None, training=True)

    with ms.ops.use_kernels(path):
        for before, after in zip(others(batch, x), others(batch, changed), strict=True):
            assert (before - after).abs().min() > 1e-6
        for before, after in zip(
            others(lambda t: f.layer_norm(t, (4,)), x),
            others(lambda t: f.layer_norm(t, (4,)), changed),
            strict=True,
        ):
            assert torch.equal(before, after)


@pytest.mark.parametrize("path", PATHS)
def test_a_bias_before_batch_norm_changes_nothing_and_gets_no_gradient(path: Any) -> None:
    linear, norm = nn.Linear(5, 4).double(), ms.nn.BatchNorm1d(4).double()
    x, g = torch.randn(9, 5, dtype=D), torch.randn(9, 4, dtype=D)
    with ms.ops.use_kernels(path):
        y = norm(linear(x))
        (dbias,) = torch.autograd.grad(y, linear.bias, g)
        assert_close(y, norm(F.linear(x, linear.weight)))
    # a sum of terms that cancel: a few units of float64 times their size
    assert dbias.abs().max() < 1e-14 * g.abs().sum()


def test_zero_gradients_of_uniform_losses() -> None:
    """C96: Σ y and Σ y² of a centered norm are constants; RMSNorm is not centered."""
    x = torch.rand(10, 512, requires_grad=True)
    probe = torch.linspace(-1, 1, 512)

    def gradient(loss: Tensor) -> float:
        return torch.autograd.grad(loss, x)[0].abs().max().item()

    layer = f.layer_norm(x, (512,))
    assert gradient(layer.sum()) < 1e-5
    assert gradient((f.layer_norm(x, (512,)) * probe).sum()) > 1
    assert gradient(f.rms_norm(x, (512,)).sum()) > 1
