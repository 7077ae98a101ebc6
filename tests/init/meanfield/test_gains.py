"""Gains by quadrature: right at kinks and jumps, for anything callable, and independent of the table."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from musigma.init import gain, lecun_normal_, moments_of
from musigma.init.meanfield._activations import ACTIVATIONS, resolve
from musigma.init.meanfield._gains import GAINS
from musigma.statistics import moments

integrate = pytest.importorskip("scipy.integrate")

SQRT_PI, SQRT_2PI = math.sqrt(math.pi), math.sqrt(2 * math.pi)


def upper(z: float) -> float:
    """P(Z > z)."""
    return math.erfc(z / math.sqrt(2)) / 2


def bell(z: float) -> float:
    return math.exp(-z * z / 2) / SQRT_2PI


def exp_above(k: float, z: float) -> float:
    """E[e^(kZ); Z < −z] = e^(k²/2)·P(Z > z + k)."""
    return math.exp(k * k / 2) * upper(z + k)


# E[φ(z)²] in closed form.
ELU_SQUARE = 0.5 + exp_above(2, 0) - 2 * exp_above(1, 0) + 0.5
SELU_SCALE, SELU_ALPHA = 1.0507009873554804934193349852946, 1.6732632423543772848170429916717
CLOSED = {
    "identity": 1.0,
    "relu": 0.5,
    "relu_squared": 1.5,
    "leaky_relu": (1 + 0.01**2) / 2,
    "elu": ELU_SQUARE,
    "celu": ELU_SQUARE,
    "selu": SELU_SCALE**2 * (0.5 + SELU_ALPHA**2 * (ELU_SQUARE - 0.5)),
    "sin": (1 - math.exp(-2)) / 2,
    "hardtanh": 1 - 2 * bell(1),
    "hardshrink": 2 * (0.5 * bell(0.5) + upper(0.5)),
    "softshrink": 2 * ((1 + 0.25) * upper(0.5) - 0.5 * bell(0.5)),
}
CALLABLES: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "step": (lambda z: (z > 0).float(), 0.5),
    "step off the panels": (lambda z: (z > 0.3217).double(), upper(0.3217)),
    "sign": (torch.sign, 1.0),
    "leaky 0.2": (lambda z: F.leaky_relu(z, 0.2), 0.52),
    "leaky -1 (absolute value)": (lambda z: F.leaky_relu(z, -1.0), 1.0),
    "shifted kink": (lambda z: F.relu(z - 1.2345), (1 + 1.2345**2) * upper(1.2345) - 1.2345 * bell(1.2345)),
    "cube": (lambda z: z**3, 15.0),
    "exponential": (torch.exp, math.exp(2)),
    "steep exponential": (lambda z: torch.exp(4 * z), math.exp(32)),
    "fast sine": (lambda z: torch.sin(40 * z), 0.5),
    "constant": (lambda z: torch.full_like(z, 3.0), 9.0),
    "tiny": (lambda z: 1e-30 * z, 1e-60),
    "huge": (lambda z: 1e30 * z, 1e60),
    "root of |z|": (lambda z: z.abs().sqrt(), math.sqrt(2 / math.pi)),
}


@pytest.mark.parametrize("name", CLOSED)
def test_gain_of_a_name_equals_its_closed_form(name: str) -> None:
    # A hundred panels of relative error 1e-13 at most, and the cancellation in the closed form itself.
    assert gain(name) == pytest.approx(1 / math.sqrt(CLOSED[name]), rel=1e-10)


@pytest.mark.parametrize("name", CALLABLES)
def test_gain_of_a_callable_equals_its_closed_form(name: str) -> None:
    function, mean_square = CALLABLES[name]
    assert gain(function) == pytest.approx(1 / math.sqrt(mean_square), rel=1e-10)


@pytest.mark.parametrize("name", sorted(set(ACTIVATIONS) - {"threshold"}))
@pytest.mark.parametrize(("mean", "std"), [(0.0, 1.0), (-0.7, 0.3), (0.4, 3.0)])
def test_moments_agree_with_another_integrator(name: str, mean: float, std: float) -> None:
    function = ACTIVATIONS[name]

    def term(t: float, power: int) -> float:
        return function(torch.tensor(mean + std * t, dtype=torch.float64)).item() ** power * bell(t)

    kinks = [(k - mean) / std for k in (-3.0, -1.0, -0.5, 0.0, 0.5, 1.0, 3.0, 6.0)]
    kinks = [k for k in kinks if abs(k) < 12]
    got = moments_of(name, mean, std)
    for power, value in ((1, got.mean), (2, got.mean_square)):
        # QUADPACK's default adaptive rule with the kinks as break points, to its own 1e-10.
        reference, error = integrate.quad(
            term, -12, 12, args=(power,), points=kinks, limit=400, epsabs=1e-11, epsrel=1e-11
        )
        assert error < 1e-9
        assert value == pytest.approx(reference, rel=1e-9, abs=1e-10)


@pytest.mark.parametrize("name", GAINS)
def test_the_table_is_a_cache_of_the_quadrature(name: str) -> None:
    # 4 ulp: the table was written by another run of the same arithmetic, sqrt and division included.
    assert GAINS[name] == pytest.approx(1 / math.sqrt(moments_of(name).mean_square), rel=4 * 2.0**-52)


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("relu", 1.4142),
        ("gelu", 1.5335),
        ("silu", 1.6765),
        ("tanh", 1.5925),
        ("elu", 1.2452),
        ("mish", 1.4868),
        ("selu", 1.0000),
        ("relu_squared", 0.8165),
    ],
)
def test_gains_published_to_four_digits(name: str, published: float) -> None:
    assert gain(name) == pytest.approx(published, abs=0.5e-4)


@pytest.mark.parametrize("activation", ["tanh", "gelu", "mish"])
def test_monte_carlo_agrees(activation: str) -> None:
    z = torch.randn(400_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    squares = moments(ACTIVATIONS[activation](z).square(), None)
    error = 5 * squares.std().item() / math.sqrt(400_000)
    assert squares.mean.item() == pytest.approx(1 / gain(activation) ** 2, abs=error)


def named(value: object) -> str:
    """An id without the address that `str` shows of a function, so that parallel workers agree on it."""
    return getattr(value, "__name__", None) or str(value)


@pytest.mark.parametrize(
    ("activation", "same"),
    [
        (nn.ReLU(), "relu"),
        (nn.ReLU(inplace=True), "relu"),
        (F.relu_, "relu"),
        (nn.SiLU(inplace=True), "silu"),
        (F.elu_, "elu"),
        (torch.sin_, "sin"),
        (nn.GELU(), "gelu"),
        (nn.GELU("tanh"), "gelu_tanh"),
        (("gelu", {"approximate": "tanh"}), "gelu_tanh"),
        (nn.SiLU(), "swish"),
        ("SiLU", "silu"),
        (nn.LeakyReLU(0.01), "leaky_relu"),
        (("leaky_relu", {"negative_slope": 0.01}), "leaky_relu"),
        (nn.Identity(), "linear"),
        ("conv2d", "identity"),
        (nn.Sequential(nn.ReLU(), nn.Identity()), "relu"),
        (nn.Softplus(), "softplus"),
        (lambda z: F.relu(z) ** 2, "relu2"),
        (lambda z: z.float().relu(), "relu"),
    ],
    ids=named,
)
def test_every_way_to_name_an_activation(activation: object, same: str) -> None:
    # float32 inside costs its own rounding.
    assert gain(activation) == pytest.approx(gain(same), rel=1e-7)  # type: ignore[arg-type]


def test_in_place_activations_do_not_write_to_the_points() -> None:
    function, _ = resolve(nn.SiLU(inplace=True))
    z = torch.linspace(-2, 2, 5, dtype=torch.float64)
    assert torch.equal(function(z), F.silu(torch.linspace(-2, 2, 5, dtype=torch.float64)))
    assert torch.equal(z, torch.linspace(-2, 2, 5, dtype=torch.float64))


def test_learned_slopes_are_taken_as_they_are_and_left_alone() -> None:
    module = nn.PReLU(init=0.3)
    assert gain(module) == pytest.approx(math.sqrt(2 / 1.09), rel=1e-7)
    assert module.weight.dtype is torch.float32
    assert module.training
    with pytest.raises(TypeError, match="PReLU has 4 slopes"):
        gain(nn.PReLU(4))


def test_random_activations_need_eval_mode_and_leave_the_random_state() -> None:
    state = torch.get_rng_state()
    with pytest.raises(TypeError, match="eval mode"):
        gain(nn.RReLU())
    assert torch.equal(torch.get_rng_state(), state)
    slope = (1 / 8 + 1 / 3) / 2
    assert gain(nn.RReLU().eval()) == pytest.approx(math.sqrt(2 / (1 + slope**2)), rel=1e-10)
    assert gain(nn.Dropout().eval()) == pytest.approx(1.0, rel=1e-10)


@pytest.mark.parametrize(
    ("activation", "error", "words"),
    [
        ("gleu", ValueError, "did you mean 'gelu'"),
        (("gleu", {}), ValueError, "did you mean 'gelu'"),
        (lambda z: 0 * z, ValueError, "is 0 for"),
        (torch.log, ValueError, "not at z = -0"),
        (lambda z: 1 / z, ValueError, "pole"),
        (lambda z: torch.exp(z * z), ValueError, "finite"),
        (lambda z: torch.softmax(z, -1), TypeError, "different values in different company"),
        (lambda z: F.layer_norm(z, z.shape), TypeError, "different values in different company"),
        (torch.sum, TypeError, "each entry to one real number"),
        (torch.fft.fft, TypeError, "each entry to one real number"),
        (lambda z: None, TypeError, "NoneType"),
    ],
    ids=lambda v: getattr(v, "__name__", str(v)),
)
def test_what_has_no_gain_says_why(activation: object, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        gain(activation)  # type: ignore[arg-type]


def test_degenerate_pre_activations() -> None:
    still = moments_of("tanh", 0.5, 0.0)
    assert still.mean == pytest.approx(math.tanh(0.5), rel=1e-15)
    assert still.mean_square == pytest.approx(math.tanh(0.5) ** 2, rel=1e-15)
    assert still.var == pytest.approx(0.0, abs=1e-16)
    assert moments_of(lambda z: 0 * z) == (0.0, 0.0)
    for mean, std in ((0.0, -1.0), (math.nan, 1.0), (0.0, math.inf)):
        with pytest.raises(ValueError, match="std at least 0"):
            moments_of("relu", mean, std)


@pytest.mark.parametrize("std", [1e-6, 0.01, 1.0, 50.0, 1e6])
def test_kinks_are_found_at_any_scale(std: float) -> None:
    """A ReLU's moments scale exactly; hardtanh's kinks sit at ±1/std of the density's own scale."""
    got = moments_of("relu", 0.0, std)
    assert got.mean == pytest.approx(std / SQRT_2PI, rel=1e-10)
    assert got.mean_square == pytest.approx(std**2 / 2, rel=1e-10)
    edge = 1 / std
    inside = 1 - 2 * upper(edge) - 2 * edge * bell(edge)
    expected = std**2 * inside + 2 * upper(edge) if edge > 1e-3 else 1 - 4 * bell(0) * edge / 3
    # For small edges the closed form cancels: its series to first order, which leaves edge³.
    assert moments_of("hardtanh", 0.0, std).mean_square == pytest.approx(expected, rel=1e-9)


def test_selu_keeps_unit_variance_through_fifty_layers() -> None:
    """C89: torch's 3/4 lets the signal fade to 0.18; 1 keeps it."""
    g = torch.Generator().manual_seed(0)
    h = torch.randn(256, 512, generator=g)
    for _ in range(50):
        h = F.selu(h @ lecun_normal_(torch.empty(512, 512), gain=gain("selu"), generator=g).T)
    assert moments(h, None).std().item() == pytest.approx(1.0, abs=0.05)
    assert moments(h, None).mean.item() == pytest.approx(0.0, abs=0.05)
