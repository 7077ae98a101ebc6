"""Large means, huge and tiny scales, constant and half-precision rows: against float64 on the same input.

Each test runs on what users get (``auto``: our kernels, or torch's where ours are not built) and on the
reference of our ops. Where torch's kernel is at fault and runs, the user's half is a strict expected failure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import musigma as ms
from native import NEEDS_NATIVE

f = ms.functional
BOTH = ("auto", "reference")
ONLY_OURS = (pytest.param("auto", marks=NEEDS_NATIVE), "reference")
EPS32 = torch.finfo(torch.float32).eps

Norm = Callable[[Tensor], Tensor]
NORMS: dict[str, tuple[Norm, Norm]] = {
    # ours, and torch's, which is given float64 as the reference of each test
    "layer": (lambda x: f.layer_norm(x, x.shape[1:]), lambda x: F.layer_norm(x, x.shape[1:])),
    "group": (lambda x: f.group_norm(x, 2), lambda x: F.group_norm(x, 2)),
    "instance": (f.instance_norm, F.instance_norm),
    "batch": (
        lambda x: f.batch_norm(x, None, None, training=True),
        lambda x: F.batch_norm(x, None, None, training=True),
    ),
    "rms": (lambda x: f.rms_norm(x, x.shape[1:], eps=1e-6), lambda x: F.rms_norm(x, x.shape[1:], eps=1e-6)),
}
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


def images(scale: float, mean: float, layout: str) -> Tensor:
    return (torch.randn(4, 8, 5, 7) * scale + mean).to(memory_format=LAYOUTS[layout])


def assert_within_ulps(y: Tensor, expected: Tensor, ulps: float) -> None:
    """Largest error over largest value, in units in the last place of y's type."""
    limit = ulps * torch.finfo(y.dtype).eps * expected.abs().max()
    assert (y.double() - expected).abs().max() <= limit


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("path", BOTH)
def test_ordinary_values(path: Any, name: str, layout: str) -> None:
    ours, theirs = NORMS[name]
    x = images(1.0, 0.5, layout)
    with ms.ops.use_kernels(path):
        y = ours(x)
    # 8: torch's own kernels reach 6 on such input (sums in float32 over up to 140 values)
    assert_within_ulps(y, theirs(x.double()), 8)


@pytest.mark.parametrize("mean", [1e4, 1e6])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", [n for n in NORMS if n != "rms"])
@pytest.mark.parametrize("path", ONLY_OURS)
def test_large_mean_small_variance(path: Any, name: str, layout: str, mean: float) -> None:
    ours, theirs = NORMS[name]
    x = images(1.0, mean, layout)
    with ms.ops.use_kernels(path):
        y = ours(x)
    # 1: computed in float64 and rounded once; 4: what the kernels promise. float64's own error at 1e6 is
    # far below that, except for torch's channels_last GroupNorm, which is off in float64 too.
    assert_within_ulps(y, theirs(x.double().contiguous()), 1 if path == "reference" else 4)


@pytest.mark.parametrize("path", BOTH)
def test_rows_of_mean_2000(path: Any) -> None:
    """C01: one-pass E[x²] − E[x]² gives variances of 30822 and below 0 here."""
    x = torch.randn(4096, 4) + 2000.0
    with ms.ops.use_kernels(path):
        y = f.layer_norm(x, (4,))
    assert (y.double() - F.layer_norm(x.double(), (4,))).abs().max() <= 2e-3


@pytest.mark.parametrize("path", ONLY_OURS)
def test_rows_of_mean_2000_with_the_mean_kept_exactly(path: Any) -> None:
    """C01, the bound for a mean that is not rounded to float32."""
    x = torch.randn(4096, 4) + 2000.0
    with ms.ops.use_kernels(path):
        y = f.layer_norm(x, (4,))
    assert (y.double() - F.layer_norm(x.double(), (4,))).abs().max() <= 2e-5


@pytest.mark.parametrize(
    ("path", "mean", "first"),
    [
        ("auto", 0.0, -1.3416),
        pytest.param("auto", 1e2, -1.3415, marks=NEEDS_NATIVE),
        pytest.param("auto", 1e3, -1.3415, marks=NEEDS_NATIVE),
        pytest.param("auto", 1e4, -1.3313, marks=NEEDS_NATIVE),
        ("reference", 0.0, -1.3416),
        ("reference", 1e2, -1.3415),
        ("reference", 1e3, -1.3415),
        ("reference", 1e4, -1.3313),
    ],
)
def test_a_spread_of_a_thousandth_on_a_large_mean(path: Any, mean: float, first: float) -> None:
    """C02: 16 values a thousandth apart, on means up to 1e4."""
    x = (mean + torch.arange(16) * 1e-3).float()[None]
    with ms.ops.use_kernels(path):
        y = f.layer_norm(x, (16,), eps=1e-5)
    expected = F.layer_norm(x.double(), (16,), eps=1e-5)
    assert abs(expected[0, 0].item() - first) < 5e-5
    assert (y.double() - expected).abs().max() <= 1e-4


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [7, 100])
@pytest.mark.parametrize("path", ONLY_OURS)
def test_constant_channels_normalize_to_exactly_the_bias(path: Any, size: int, layout: str) -> None:
    """C04: equal values are 0 after centering, however large: ±1 and ±94733 come of a rounded mean."""
    values = torch.tensor([-7.3e9, 1.1e9, 3.3333333e7, 0.1, 14.62])
    x = values[None, :, None, None].expand(1, 5, size, size).contiguous(memory_format=LAYOUTS[layout])
    bias = torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0])
    with ms.ops.use_kernels(path):
        y = f.batch_norm(x, None, None, None, bias, training=True)
    assert torch.equal(y, bias[None, :, None, None].expand_as(y))


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("auto", "layer"),
        ("auto", "group"),
        pytest.param("auto", "instance", marks=NEEDS_NATIVE),
        ("reference", "layer"),
        ("reference", "group"),
        ("reference", "instance"),
    ],
)
def test_constant_examples_normalize_to_exactly_zero(path: Any, name: str) -> None:
    """C04's relatives: any value, the sums of which no float32 holds."""
    x = torch.tensor([0.1, 14.62, 3.3333333e7, -7.3e9])[:, None, None, None].expand(4, 8, 5, 7).contiguous()
    with ms.ops.use_kernels(path):
        y = NORMS[name][0](x)
    assert torch.equal(y, torch.zeros_like(y))


@pytest.mark.parametrize("scale", [1e-30, 1e20, 1e30])
@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("path", ONLY_OURS)
def test_finite_in_finite_out_at_every_scale(path: Any, name: str, scale: float) -> None:
    """C05: the squares of 1e20 overflow float32, those of 1e-30 vanish; the result is ordinary.

    (At 1e-30 with an eps to match, where so small a spread is something else than none.)
    """
    x = images(scale, 0.0, "contiguous")
    eps = 1e-75 if scale == 1e-30 else 1e-5
    arguments: dict[str, Callable[[Any, Tensor], Tensor]] = {
        "layer": lambda m, t: m.layer_norm(t, t.shape[1:], eps=eps),
        "group": lambda m, t: m.group_norm(t, 2, eps=eps),
        "instance": lambda m, t: m.instance_norm(t, eps=eps),
        "batch": lambda m, t: m.batch_norm(t, None, None, training=True, eps=eps),
        "rms": lambda m, t: m.rms_norm(t, t.shape[1:], eps=eps),
    }
    with ms.ops.use_kernels(path):
        y = arguments[name](f, x)
    assert_within_ulps(y, arguments[name](F, x.double()), 4)


@pytest.mark.parametrize("path", BOTH)
def test_a_spike_does_not_inflate_eps(path: Any) -> None:
    """C13: an overflow guard that divides by max|x| before eps is added makes eps max|x|² times larger."""
    x = torch.full((2, 4096), 0.01)
    x[0, 0] = 30.0
    x[1] = 0.0
    with ms.ops.use_kernels(path):
        y = f.rms_norm(x, (4096,), eps=1e-5)
    expected = F.rms_norm(x.double(), (4096,), eps=1e-5)
    assert (y - expected).norm() <= 1e-6 * expected.norm()
    assert torch.equal(y[1], torch.zeros(4096))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["layer", "group", "instance", "batch"])
@pytest.mark.parametrize("path", BOTH)
def test_statistics_of_a_zero_row_are_not_kept_in_half_precision(
    path: Any, name: str, dtype: torch.dtype, weighted: bool
) -> None:
    """C08: eps 1e-12 is 0 in float16, and rstd 1e6 is inf; dx = (g − mean g)·1e6 = −4500 fits."""
    x = torch.zeros(1, 1, 10, dtype=dtype, requires_grad=True)
    weight = torch.ones(10 if name == "layer" else 1, dtype=dtype) if weighted else None
    calls: dict[str, Callable[[], Tensor]] = {
        "layer": lambda: f.layer_norm(x, (10,), weight, eps=1e-12),
        "group": lambda: f.group_norm(x, 1, weight, eps=1e-12),
        "instance": lambda: f.instance_norm(x, weight=weight, eps=1e-12),
        "batch": lambda: f.batch_norm(x, None, None, weight, training=True, eps=1e-12),
    }
    with ms.ops.use_kernels(path):
        y = calls[name]()
        (y.float() * torch.arange(10.0) * 1e-3).sum().backward()
    assert torch.equal(y, torch.zeros_like(y))
    g = (torch.arange(10.0) * 1e-3).to(dtype).double()
    expected = (g - g.mean()) * 1e6
    assert x.grad is not None
    # the upstream gradient is in dtype; so is the result: half a unit of each
    assert (x.grad.double() - expected).abs().max() <= max(
        1e-3, torch.finfo(dtype).eps
    ) * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("path", BOTH)
def test_the_backward_of_half_precision_is_as_accurate_as_the_forward(
    path: Any, name: str, dtype: torch.dtype
) -> None:
    """C08's relative: a mean kept in bfloat16 for the backward is off by a hundredth of the spread."""
    x = (torch.randn(4, 8, 5, 7) + 3).to(dtype).requires_grad_()
    g = torch.randn(4, 8, 5, 7).to(dtype)
    ours, theirs = NORMS[name]
    with ms.ops.use_kernels(path):
        (dx,) = torch.autograd.grad(ours(x), x, g)
    wide = x.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(theirs(wide), wide, g.double())
    # Rounded once: half a unit; a quarter more for float32 on the way, or for BatchNorm's two parts.
    assert_within_ulps(dx, expected, 0.75)


@pytest.mark.parametrize("name", ["layer", "group", "instance", "batch"])
@pytest.mark.parametrize("path", BOTH)
def test_a_constant_row_has_a_finite_gradient(path: Any, name: str) -> None:
    """C25: eps stands inside the root; outside of it the gradient of √var at 0 is 0/0."""
    x = torch.ones(1, 2, 2, 2, requires_grad=True)
    g = torch.arange(8.0).reshape(1, 2, 2, 2)
    with ms.ops.use_kernels(path):
        (dx,) = torch.autograd.grad(NORMS[name][0](x), x, g)
    dims = {"layer": (1, 2, 3), "group": (2, 3), "instance": (2, 3), "batch": (0, 2, 3)}[name]
    expected = (g - g.mean(dims, keepdim=True)) / 1e-5**0.5
    torch.testing.assert_close(dx, expected)


def test_a_constant_row_by_hand() -> None:
    """C25's numbers."""
    x = torch.ones(2, 4, requires_grad=True)
    (f.layer_norm(x, (4,)) * torch.arange(8.0).reshape(2, 4)).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad[0], torch.tensor([-474.34, -158.11, 158.11, 474.34]), rtol=0, atol=0.01)


@pytest.mark.parametrize("name", ["layer", "rms", "group", "instance", "batch", "batch_eval"])
@pytest.mark.parametrize("path", BOTH)
def test_a_zero_weight_does_no_harm_in_backward(path: Any, name: str) -> None:
    """C26: x̂ recovered as (y − bias)/weight is NaN at weight 0, and noise at 1e-30."""
    x = torch.randn(3, 4, 5, requires_grad=True)
    weight = torch.tensor([1.0, 0.0, -2.0, 1e-30], requires_grad=True)
    bias = torch.zeros(4, requires_grad=True)

    def run(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        kept = torch.zeros(4, dtype=x.dtype), torch.ones(4, dtype=x.dtype)
        calls: dict[str, Callable[[], Tensor]] = {
            "layer": lambda: f.layer_norm(x.mT, (4,), weight, bias).mT,
            "rms": lambda: f.rms_norm(x.mT, (4,), weight).mT + bias[:, None],
            "group": lambda: f.group_norm(x, 2, weight, bias),
            "instance": lambda: f.instance_norm(x, weight=weight, bias=bias),
            "batch": lambda: f.batch_norm(x, None, None, weight, bias, training=True),
            "batch_eval": lambda: f.batch_norm(x, *kept, weight, bias),
        }
        return calls[name]()

    g = torch.randn(3, 4, 5)
    with ms.ops.use_kernels(path):
        got = torch.autograd.grad(run(x, weight, bias), (x, weight, bias), g)
    wide = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    expected = torch.autograd.grad(run(*wide), wide, g.double())
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)
    assert got[1][1] != 0


COMBINATIONS = [(w, b) for w in (False, True) for b in (False, True)]


@pytest.mark.parametrize(("weighted", "biased"), COMBINATIONS)
@pytest.mark.parametrize("name", ["layer", "rms", "group", "instance", "batch"])
@pytest.mark.parametrize("path", BOTH)
def test_second_derivatives_with_every_combination_of_weight_and_bias(
    path: Any, name: str, weighted: bool, biased: bool
) -> None:
    """C22: with a bias and no weight all of torch's own kernels fail gradgradcheck."""
    x = torch.randn(3, 4, 2, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, dtype=torch.float64, requires_grad=True) if weighted else None
    bias = torch.randn(4, dtype=torch.float64, requires_grad=True) if biased and name != "rms" else None

    def run(x: Tensor, *parameters: Tensor) -> Tensor:
        given = iter(parameters)
        w = next(given) if weight is not None else None
        b = next(given) if bias is not None else None
        calls: dict[str, Callable[[], Tensor]] = {
            "layer": lambda: f.layer_norm(x.mT, (4,), w, b),
            "rms": lambda: f.rms_norm(x.mT, (4,), w),
            "group": lambda: f.group_norm(x, 2, w, b),
            "instance": lambda: f.instance_norm(x, weight=w, bias=b),
            "batch": lambda: f.batch_norm(x, None, None, w, b, training=True),
        }
        return calls[name]()

    inputs = [x, *(p for p in (weight, bias) if p is not None)]
    with ms.ops.use_kernels(path):
        assert torch.autograd.gradcheck(run, inputs)
        assert torch.autograd.gradgradcheck(run, inputs)


def by_hand(x: Tensor, dims: tuple[int, ...], center: bool = True) -> Tensor:
    c = x - x.mean(dims, keepdim=True) if center else x
    return c * (c.square().mean(dims, keepdim=True) + 1e-5).rsqrt()


DERIVATIVES: dict[str, tuple[Norm, Norm]] = {
    "batch": (lambda t: f.batch_norm(t, None, None, training=True), lambda t: by_hand(t, (0,))),
    "layer": (lambda t: f.layer_norm(t, (3,)), lambda t: by_hand(t, (1,))),
    "group": (lambda t: f.group_norm(t[None], 1)[0], lambda t: by_hand(t, (0, 1))),
    "instance": (lambda t: f.instance_norm(t[None])[0], lambda t: by_hand(t, (1,))),
    "rms": (lambda t: f.rms_norm(t, (3,), eps=1e-5), lambda t: by_hand(t, (1,), center=False)),
}


@pytest.mark.parametrize("order", [1, 2, 3, 4])
@pytest.mark.parametrize("name", DERIVATIVES)
@pytest.mark.parametrize("path", BOTH)
def test_derivatives_of_every_order(path: Any, name: str, order: int, request: pytest.FixtureRequest) -> None:
    """C23: torch's third derivatives of BatchNorm (15.5 for 8.98) and LayerNorm (−71 for −5.2) are wrong.

    torch 2.14 refuses BatchNorm's, and with it InstanceNorm's, instead.
    """
    if path == "auto" and order >= 3 and name in ("batch", "layer", "instance"):
        request.applymarker(NEEDS_NATIVE)
    x, v, w = (torch.randn(4, 3, dtype=torch.float64) for _ in range(3))

    def derivative(norm: Norm) -> Tensor:
        t = x.clone().requires_grad_()
        s = (norm(t) * w).sum()
        for _ in range(order):
            (g,) = torch.autograd.grad(s, t, create_graph=True)
            s = (g * v).sum()
        return s

    with ms.ops.use_kernels(path):
        ours = derivative(DERIVATIVES[name][0])
    torch.testing.assert_close(ours, derivative(DERIVATIVES[name][1]), rtol=1e-6, atol=1e-9)
