"""Standardize and Unstandardize: exact for large means, unbent by casts, saved and traced with the model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from musigma.inputs import Standardizer
from musigma.nn import Standardize, Unstandardize

CASTS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def ulps(y: Tensor, exact: Tensor) -> float:
    """The largest error in units in the last place of the exact result."""
    mantissa_bits = {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8, torch.float64: 53}[y.dtype]
    unit = torch.exp2((torch.frexp(exact.double()).exponent - mantissa_bits).double())
    return ((y.double() - exact.double()).abs() / unit).max().item()


def statistics(ratio: float, n: int = 4096) -> tuple[Tensor, Tensor, Tensor]:
    """float32 data with this mean/std, and the statistics of it in float64."""
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(n, 3, generator=generator, dtype=torch.float64) + ratio).float()
    return x, x.double().mean(0), x.double().std(0, correction=0)


@pytest.mark.parametrize("ratio", [0.0, 1e2, 1e4, 1e6])
@pytest.mark.parametrize("factor", [1e-30, 1.0, 1e30])
def test_large_mean_costs_no_precision(ratio: float, factor: float) -> None:
    """One float32 mean would be off by 4e4 ulp of the largest value at a ratio of 1e6."""
    x, mean, scale = statistics(ratio)
    x = (x.double() * factor).float()
    mean, scale = x.double().mean(0), x.double().std(0, correction=0)
    y = Standardize(mean, scale)(x)
    # x − high and − low, then the scale's own rounding and the division: ½ ulp each, 1 across a binade
    assert ulps(y, (x.double() - mean) / scale) <= 3


def test_float64_input_keeps_the_second_part_of_the_mean() -> None:
    """A float64 mean is off by ½ ulp, 1e-10 standard deviations at a ratio of 1e6: 5e5 ulp of the result."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(999, 1, generator=generator, dtype=torch.float64) + 1e6
    layer = Standardizer().fit(x).layer()
    long = x.numpy().astype(np.longdouble)
    exact = (long - long.mean()) / long.std()
    error = np.abs(layer(x).numpy() - exact).max()
    if np.finfo(np.longdouble).eps < np.finfo(np.float64).eps:
        # scale_ and the division are good to a few ε relative to a largest value below 4
        assert error <= 8 * torch.finfo(torch.float64).eps * 4
    assert layer.mean_tail.abs().item() > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_input_is_rounded_once(dtype: torch.dtype) -> None:
    x = (torch.randn(500, 3, generator=torch.Generator().manual_seed(0)) * 20 + 200).to(dtype)
    layer = Standardize([200.0, 199.0, 201.0], [20.0, 19.9, 20.1])
    y = layer(x)
    assert y.dtype == dtype
    exact = (x.double() - layer.mean) / layer.scale
    # correctly rounded but for the 3 float32 ulp it is rounded from
    assert ulps(y, exact) <= 0.51


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16]
)
def test_integer_input_comes_out_in_floating_point(dtype: torch.dtype) -> None:
    x = torch.tensor([[0, 1, 100], [120, 3, 7]]).to(dtype)
    y = Standardize([60.0, 2.0, 50.0], [60.0, 1.0, 50.0])(x)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, torch.tensor([[-1.0, -1.0, 1.0], [1.0, 1.0, -0.86]]))


def test_boolean_input() -> None:
    assert Standardize(0.5, [0.5])(torch.tensor([[True], [False]])).tolist() == [[1.0], [-1.0]]


@pytest.mark.parametrize("base", [2**62, -(2**62)])
def test_integers_beyond_float64(base: int) -> None:
    """Nanosecond time stamps and the like: float64 steps by 512 there."""
    x = torch.tensor([[base], [base + 2], [base + 4]])
    assert Standardizer().fit(x).layer()(x)[:, 0].tolist() == pytest.approx([-(1.5**0.5), 0, 1.5**0.5])


@pytest.mark.parametrize("dtype", CASTS)
@pytest.mark.parametrize("inside", [False, True])
def test_casting_the_model_does_not_bend_the_statistics(dtype: torch.dtype, inside: bool) -> None:
    """A mean of 1e6 is infinite in half, a scale of 1e-8 zero."""
    layer = Standardize([1e6, 1e-3], [1.0, 1e-8])
    model = torch.nn.Sequential(layer, torch.nn.Linear(2, 2)) if inside else layer
    model.to(dtype)
    assert layer.mean.dtype == layer.scale.dtype == torch.float64
    assert layer.mean.tolist() == [1e6, 1e-3]
    assert layer.scale.tolist() == [1.0, 1e-8]
    x = torch.tensor([[1e6 + 1, 1e-3 + 1e-8]], dtype=torch.float64)
    torch.testing.assert_close(layer(x), torch.ones(1, 2, dtype=torch.float64), rtol=1e-8, atol=0)


def test_a_half_model_takes_integer_images() -> None:
    model = torch.nn.Sequential(Standardize([100.0] * 3, [50.0] * 3), torch.nn.Conv2d(3, 2, 1)).bfloat16()
    y = model(torch.full((2, 3, 4, 4), 150, dtype=torch.uint8))
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, model[1](torch.ones(2, 3, 4, 4).bfloat16()))


def test_autocast_leaves_the_arithmetic_alone() -> None:
    x, mean, scale = statistics(1e4)
    layer = Standardize(mean, scale)
    plain = layer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(layer(x), plain)


@pytest.mark.parametrize(
    ("dim", "shape"),
    [
        (1, (5, 3)),
        (1, (5, 3, 4)),
        (1, (5, 3, 4, 2)),
        (1, (0, 3, 4)),
        (1, (5, 3, 4, 2, 1)),
        (-1, (5, 4, 3)),
        (2, (5, 4, 3, 2)),
    ],
)
def test_any_rank_and_channel_dim(dim: int, shape: tuple[int, ...]) -> None:
    mean, scale = torch.tensor([1.0, -2.0, 3.0]), torch.tensor([0.5, 2.0, 4.0])
    x = torch.randn(shape)
    layer = Standardize(mean, scale, dim=dim)
    moved = (x.movedim(dim, -1) - mean) / scale
    torch.testing.assert_close(layer(x), moved.movedim(-1, dim))
    torch.testing.assert_close(layer.inverse()(layer(x)), x)
    assert isinstance(layer.inverse(), Unstandardize)
    assert isinstance(layer.inverse().inverse(), Standardize)


def test_one_statistic_and_one_per_position() -> None:
    x = torch.randn(4, 2, 3)
    torch.testing.assert_close(Standardize(1.0, 2.0, dim=None)(x), (x - 1) / 2)
    mean = torch.randn(2, 3)
    torch.testing.assert_close(Standardize(mean, 2.0, dim=(1, 2))(x), (x - mean) / 2)
    torch.testing.assert_close(Standardize(mean.T, 2.0, dim=(2, 1))(x), (x - mean) / 2)


@pytest.mark.parametrize("layout", ["channels_last", "transposed", "expanded", "strided"])
def test_layouts(layout: str) -> None:
    x = torch.randn(4, 3, 5, 6)
    view = {
        "channels_last": x.to(memory_format=torch.channels_last),
        "transposed": x.transpose(0, 2).transpose(1, 1),
        "expanded": x[:, :1].expand(4, 3, 5, 6),
        "strided": x[::2, :, ::2],
    }[layout]
    if layout == "transposed":
        view = view.transpose(0, 2)
    layer = Standardize([1.0, 2.0, 3.0], [2.0, 3.0, 4.0])
    y = layer(view)
    assert torch.equal(y, layer(view.contiguous()))
    if layout == "channels_last":
        assert y.is_contiguous(memory_format=torch.channels_last)


def test_nan_and_infinity_pass_through() -> None:
    x = torch.tensor([[float("nan"), float("inf")]])
    y = Standardize([0.0, 0.0], [1.0, 1.0], clip=3.0)(x)
    assert y[0, 0].isnan()
    assert y[0, 1] == 3.0


def test_clip_cuts_both_sides() -> None:
    layer = Standardize([0.0], [1.0], clip=2.0)
    assert layer(torch.tensor([[-5.0], [1.0], [9.0]])).flatten().tolist() == [-2.0, 1.0, 2.0]
    assert "clip=2.0" in repr(layer)


def test_gradient_flows_to_the_input() -> None:
    x = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    layer = Standardize([1.0, 2.0], [2.0, 0.5])
    assert torch.autograd.gradcheck(layer, (x,))
    assert torch.autograd.gradcheck(layer.inverse(), (x,))
    assert not list(layer.parameters())


@pytest.mark.parametrize(
    ("mean", "scale", "message"),
    [
        ([0.0, 0.0], [1.0, 0.0], r"scale must be positive and finite, got 0.0 at index 1"),
        ([0.0, 0.0], [-1.0, 1.0], r"scale must be positive and finite, got -1.0 at index 0"),
        ([0.0], [float("nan")], "scale must be positive"),
        ([0.0], [float("inf")], "scale must be positive"),
        ([float("nan"), 1.0], [1.0, 1.0], "mean must be finite, got nan at index 0"),
        ([[0.0]], [[1.0]], "one axis for each of dim=1"),
        (0.0, 1.0, "one axis for each of dim=1"),
    ],
)
def test_statistics_that_standardize_nothing_are_refused(mean: object, scale: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Standardize(mean, scale)  # type: ignore[arg-type]


def test_statistics_of_two_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"same features; got mean \(2,\) and scale \(3,\)"):
        Standardize([0.0, 1.0], [1.0, 1.0, 1.0])


def test_complex_is_refused() -> None:
    with pytest.raises(TypeError, match="real"):
        Standardize([1j], [1.0])
    with pytest.raises(TypeError, match="real"):
        Standardize([1.0], [1.0])(torch.ones(2, 1, dtype=torch.complex64))


@pytest.mark.parametrize("clip", [0.0, -1.0, float("nan")])
def test_clip_must_be_positive(clip: float) -> None:
    with pytest.raises(ValueError, match="clip must be positive"):
        Standardize([0.0], [1.0], clip=clip)


def test_another_number_of_channels_names_both() -> None:
    layer = Standardize([0.0] * 3, [1.0] * 3)
    with pytest.raises(ValueError, match="x has 4 features along dim 1, but mean and scale are of 3"):
        layer(torch.randn(2, 4, 8, 8))
    with pytest.raises(ValueError, match="x must have a dim 1 of size 3"):
        layer(torch.randn(3))


def test_repr() -> None:
    assert repr(Standardize([0.0] * 3, [1.0] * 3)) == "Standardize(num_features=3, dim=1)"
    assert repr(Standardize([0.0], [1.0], dim=-1).inverse()) == "Unstandardize(num_features=1, dim=-1)"


def test_from_standardizer_takes_scikit_learn_s_scaler() -> None:
    preprocessing = pytest.importorskip("sklearn.preprocessing")
    x = np.random.default_rng(0).normal(3, 2, (50, 4))
    for options in ({}, {"with_mean": False}, {"with_std": False}):
        theirs = preprocessing.StandardScaler(**options).fit(x)
        layer = Standardize.from_standardizer(theirs)
        np.testing.assert_allclose(
            layer(torch.from_numpy(x)).numpy(), theirs.transform(x), rtol=1e-12, atol=1e-12
        )
        ours = Standardizer(**options).fit(x)
        np.testing.assert_allclose(
            Standardize.from_standardizer(ours)(torch.from_numpy(x)).numpy(),
            theirs.transform(x),
            rtol=1e-12,
            atol=1e-12,
        )
    neither = preprocessing.StandardScaler(with_mean=False, with_std=False).fit(x)
    with pytest.raises(ValueError, match="neither centers nor scales"):
        Standardize.from_standardizer(neither)
    inverse = Unstandardize.from_standardizer(preprocessing.StandardScaler().fit(x))
    np.testing.assert_allclose(inverse(layer(torch.from_numpy(x))).numpy().shape, x.shape)


class _NoFloat64:
    """What `.to("mps")` does, as far as a CPU can show it: float64 raises."""

    def __call__(self, t: Tensor) -> Tensor:
        if t.dtype == torch.float64:
            raise TypeError(
                "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64"
            )
        return t


def test_a_device_without_float64_gets_two_float32_parts() -> None:
    x, mean, scale = statistics(1e6, 500)
    layer = Standardize(mean, scale)
    layer._narrow()
    layer._apply(_NoFloat64())
    assert layer.mean.dtype == torch.float32
    assert ulps(layer(x), (x.double() - mean) / scale) <= 3


def test_export_needs_no_musigma_ops() -> None:
    layer = Standardize([1.0, 2.0, 3.0], [2.0, 3.0, 4.0], clip=4.0)
    x = torch.randn(4, 3, 5, 5)
    batch = torch.export.Dim("batch")
    program = torch.export.export(layer, (x,), dynamic_shapes=({0: batch},))
    y = torch.randn(7, 3, 5, 5)
    torch.testing.assert_close(program.module()(y), layer(y))
    assert not any("musigma" in str(node.target) for node in program.graph.nodes)


@pytest.mark.compile
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.uint8, torch.float64])
def test_compiled_fullgraph_is_as_exact(dtype: torch.dtype) -> None:
    """A compiler that folded the two subtractions into one would lose the mean's second part."""
    ratio = 1e6 if dtype in (torch.float32, torch.float64) else 100.0
    x, _, _ = statistics(ratio, 200)
    x = x.to(dtype)
    mean, scale = x.double().mean(0), x.double().std(0, correction=0)
    layer = Standardize(mean, scale)
    y = torch.compile(layer, fullgraph=True)(x)
    assert y.dtype == layer(x).dtype
    # one rounding fewer or more than eager, where kernels fuse
    torch.testing.assert_close(y, layer(x), rtol=3 * torch.finfo(y.dtype).eps, atol=0)


@pytest.mark.compile
def test_strict_export() -> None:
    layer = Standardize([1.0, 2.0, 3.0], [2.0, 3.0, 4.0])
    x = torch.randn(4, 3, 5)
    program = torch.export.export(layer, (x,), strict=True)
    torch.testing.assert_close(program.module()(x), layer(x))
