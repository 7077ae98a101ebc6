"""Every registered scheme is held to the law it declares: a new scheme is found by itself."""

from __future__ import annotations

import inspect
import math
import warnings

import pytest
import torch
from torch import Tensor

from musigma.init import SCHEMES, Sample, Scheme, fans, torch_default_, torch_default_bias_
from musigma.statistics import moments

GOOD = [(s, k) for s in SCHEMES.values() for k in s.samples if k.error is None]
BAD = [(s, k) for s in SCHEMES.values() for k in s.samples if k.error is not None]
RANDOM = [s for s in SCHEMES.values() if "generator" in inspect.signature(s.function).parameters]
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Each entry is judged many times over: about 3000 comparisons at 5 sigma leave 1 in 600 to chance, once,
# since the seeds are fixed.
SIGMAS = 5.0


def label(value: object) -> str:
    if isinstance(value, Scheme):
        return value.name
    if isinstance(value, Sample):
        options = ",".join(f"{k}={getattr(v, '__name__', v)}" for k, v in value.options.items())
        return f"{'x'.join(map(str, value.shape))}[{options}]"
    return str(value)


def draw(scheme: Scheme, sample: Sample, w: Tensor, seed: int = 0) -> Tensor:
    options = dict(sample.options)
    if scheme in RANDOM:
        options["generator"] = torch.Generator().manual_seed(seed)
    return scheme.function(w, **options)


def contiguous(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def transposed(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape[::-1], dtype=dtype).permute(tuple(reversed(range(len(shape)))))


def strided(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty([2 * n for n in shape], dtype=dtype)[tuple(slice(None, None, 2) for _ in shape)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("scheme", "sample"), GOOD, ids=label)
def test_samples_follow_the_declared_law(scheme: Scheme, sample: Sample, dtype: torch.dtype) -> None:
    law = scheme.law(sample.shape, fans=sample.options.get("fans"), options=sample.options)
    entries = math.prod(sample.shape)
    repeats = min(40, math.ceil(12_000 / entries)) if scheme in RANDOM else 1
    fills = [draw(scheme, sample, contiguous(sample.shape, dtype), seed) for seed in range(repeats)]
    w = torch.stack(fills).double()
    m, n = moments(w, None), w.numel()

    # Rounding moves an entry by at most eps/2 of itself, below the smallest normal number by its spacing.
    info = torch.finfo(dtype)
    size = math.sqrt(law.mean**2 + law.var)
    rounding = info.eps * size + info.smallest_normal * info.eps
    # Var of a sample mean is var/n; of a sample variance var²·(kurtosis − 1)/n, plus 2·var²/n² for the mean.
    mean_error = SIGMAS * math.sqrt(law.var / n) + rounding
    var_error = SIGMAS * law.var * math.sqrt((law.kurtosis - 1) / n + 2 / n**2) + 2 * rounding * size
    if scheme not in RANDOM:
        mean_error, var_error = rounding, 2 * rounding * size
    assert abs(m.mean.item() - law.mean) <= mean_error
    assert abs(m.var().item() - law.var) <= var_error

    low, high = torch.tensor([law.low, law.high], dtype=torch.float64)
    # A bound itself is rounded to the dtype.
    assert w.min() >= torch.minimum(low, low.to(dtype).double())
    assert w.max() <= torch.maximum(high, high.to(dtype).double())


@pytest.mark.parametrize(("scheme", "sample"), BAD, ids=label)
def test_bad_input_is_refused_and_changes_nothing(scheme: Scheme, sample: Sample) -> None:
    w = torch.full(sample.shape, 7.0)
    state = torch.get_rng_state()
    with pytest.raises(sample.error) as caught:  # type: ignore[arg-type]
        scheme.function(w, **sample.options)
    assert len(str(caught.value)) > 30
    assert bool((w == 7.0).all())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("scheme", "sample"), GOOD, ids=label)
def test_values_depend_on_neither_layout_nor_dtype(
    scheme: Scheme, sample: Sample, dtype: torch.dtype
) -> None:
    plain = draw(scheme, sample, contiguous(sample.shape, dtype))
    for layout in (transposed, strided):
        assert torch.equal(draw(scheme, sample, layout(sample.shape, dtype)), plain)
    single = draw(scheme, sample, contiguous(sample.shape, torch.float32))
    if dtype is torch.float64:
        # Whatever is computed in float64 keeps its digits.
        assert torch.equal(plain.float(), single)
    elif scheme.name in ("truncated_normal", "variance_scaling"):
        # What would round on or past a bound is rounded inwards, one step off.
        off = plain != single.to(dtype)
        assert off.double().mean() < 0.01
        assert torch.equal(torch.nextafter(plain, single.to(dtype))[off], single.to(dtype)[off])
    else:
        assert torch.equal(plain, single.to(dtype))


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0), (0,), (0, 3, 3), (3, 0, 1, 1)], ids=str)
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=label)
def test_weights_without_elements_are_left_alone(scheme: Scheme, shape: tuple[int, ...]) -> None:
    """C84: ZeroDivisionError or a warning at construction."""
    sample = next(k for s, k in GOOD if s is scheme)
    w = torch.empty(shape)
    state = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert scheme.function(w, **sample.options) is w
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=label)
def test_parameters_stay_leaves_that_want_gradients(scheme: Scheme) -> None:
    sample = next(k for s, k in GOOD if s is scheme)
    p = torch.nn.Parameter(torch.empty(sample.shape))
    version = p._version
    assert scheme.function(p, **sample.options) is p
    assert p.requires_grad
    assert p.is_leaf
    assert p._version > version
    assert not p.isnan().any()
    p.sum().backward()
    assert bool((p.grad == 1).all())


@pytest.mark.parametrize("scheme", RANDOM, ids=label)
def test_global_random_state_is_touched_only_without_a_generator(scheme: Scheme) -> None:
    sample = next(k for s, k in GOOD if s is scheme)
    state = torch.get_rng_state()
    draw(scheme, sample, torch.empty(sample.shape))
    assert torch.equal(torch.get_rng_state(), state)

    torch.manual_seed(0)
    asked = scheme.function(torch.empty(sample.shape), **sample.options)
    assert torch.equal(asked, draw(scheme, sample, torch.empty(sample.shape), seed=0))


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=label)
def test_meta_tensors_are_checked_and_stay_hollow(scheme: Scheme) -> None:
    sample = next(k for s, k in GOOD if s is scheme)
    state = torch.get_rng_state()
    w = torch.empty(sample.shape, device="meta")
    assert scheme.function(w, **sample.options) is w
    assert torch.equal(torch.get_rng_state(), state)
    bad = next((k for s, k in BAD if s is scheme), None)
    if bad is not None:
        with pytest.raises(bad.error):  # type: ignore[arg-type]
            scheme.function(torch.empty(bad.shape, device="meta"), **bad.options)


@pytest.mark.parametrize("scheme", RANDOM, ids=label)
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64], ids=str)
def test_what_is_no_real_float_is_refused(scheme: Scheme, dtype: torch.dtype) -> None:
    sample = next(k for s, k in GOOD if s is scheme)
    with pytest.raises(NotImplementedError, match=f"real floating-point tensor, got {dtype}"):
        scheme.function(torch.zeros(sample.shape, dtype=dtype), **sample.options)


@pytest.mark.parametrize(
    ("ours", "torchs"),
    [
        ("he_normal", "kaiming_normal_"),
        ("xavier_normal", "xavier_normal_"),
        ("xavier_uniform", "xavier_uniform_"),
        ("normal", "normal_"),
        ("uniform", "uniform_"),
        ("zeros", "zeros_"),
        ("ones", "ones_"),
        ("dirac", "dirac_"),
    ],
)
def test_namesakes_give_torchs_numbers(ours: str, torchs: str) -> None:
    w, v = torch.empty(12, 7, 3), torch.empty(12, 7, 3)
    options = {"nonlinearity": "relu"} if ours == "he_normal" else {}
    torch.manual_seed(5)
    SCHEMES[ours].function(w, **options)
    torch.manual_seed(5)
    getattr(torch.nn.init, torchs)(v, **options)
    assert torch.equal(w, v)


@pytest.mark.parametrize("kind", ["linear", "conv", "grouped"])
def test_torch_default_is_what_torch_does(kind: str) -> None:
    make = {
        "linear": lambda: torch.nn.Linear(7, 12),
        "conv": lambda: torch.nn.Conv2d(4, 12, 3),
        "grouped": lambda: torch.nn.Conv2d(4, 12, 3, groups=2),
    }[kind]
    torch.manual_seed(3)
    layer = make()
    torch.manual_seed(3)
    w, b = torch.empty_like(layer.weight), torch.empty_like(layer.bias)
    SCHEMES["torch_default"].function(w)
    SCHEMES["torch_default_bias"].function(b, fans=fans(layer))
    assert torch.equal(w, layer.weight)
    assert torch.equal(b, layer.bias)


def test_a_layer_without_inputs_gets_its_bias() -> None:
    """C84: Linear(0, 4)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, at construction
        layer = torch.nn.Linear(0, 4)
    torch.nn.init.constant_(layer.bias, 9.0)
    assert fans(layer) == (0, 4)
    torch_default_(layer.weight, fans=fans(layer))
    torch_default_bias_(layer.bias, fans=fans(layer))
    assert layer.bias.tolist() == [0.0] * 4
    assert layer(torch.zeros(2, 0)).shape == (2, 4)
