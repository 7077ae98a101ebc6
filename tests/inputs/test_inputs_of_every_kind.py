"""Arrays of every layout and type, loaders and iterables, and what is refused with which words."""

from __future__ import annotations

import copy
import datetime
import math
import pickle
import sys
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from musigma.inputs import NotFittedError, Standardizer

X = np.arange(24.0).reshape(8, 3) ** 2


class Frame:
    """As much of a data frame as NumPy and we look at."""

    def __init__(self, columns: dict[str, list[Any]]) -> None:
        self.columns = list(columns)
        self._values = np.array(list(columns.values()), dtype=object).T

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self._values, dtype=dtype)


def _readonly(x: np.ndarray) -> np.ndarray:
    x = x.copy()
    x.setflags(write=False)
    return x


LAYOUTS: dict[str, Callable[[np.ndarray], Any]] = {
    "contiguous": np.ascontiguousarray,
    "fortran": np.asfortranarray,
    "reversed": lambda x: x[::-1, ::-1][::-1, ::-1],
    "strided": lambda x: np.repeat(np.repeat(x, 2, 0), 3, 1)[::2, ::3],
    "big-endian": lambda x: x.astype(x.dtype.newbyteorder(">")),
    "little-endian": lambda x: x.astype(x.dtype.newbyteorder("<")),
    "read-only": _readonly,
    "broadcast": lambda x: np.broadcast_to(x, x.shape),
    "long double": lambda x: x.astype(np.longdouble),
    "objects": lambda x: x.astype(object),
    "list": lambda x: x.tolist(),
    "tuples": lambda x: tuple(map(tuple, x.tolist())),
    "frame": lambda x: Frame({f"c{j}": x[:, j].tolist() for j in range(x.shape[1])}),
    "tensor": torch.from_numpy,
    "tensor transposed": lambda x: torch.from_numpy(x.T.copy()).T,
    "tensor strided": lambda x: torch.from_numpy(np.repeat(x, 2, 0))[::2],
    "tensor that needs grad": lambda x: torch.from_numpy(x).requires_grad_(),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.int32, np.uint8])
def test_every_layout_gives_the_same(layout: str, dtype: type) -> None:
    if "grad" in layout and dtype in (np.int32, np.uint8):
        return
    x = (X % 251).astype(dtype)
    given = LAYOUTS[layout](x)
    before = copy.deepcopy(given)
    s = Standardizer()
    z = s.fit_transform(given)
    assert isinstance(z, torch.Tensor) == isinstance(given, torch.Tensor)
    exact = (x - x.astype(np.float64).mean(0)) / x.astype(np.float64).std(0)
    np.testing.assert_allclose(_values(z), exact, rtol=2e-6, atol=1e-6)
    back = s.inverse_transform(z)
    np.testing.assert_allclose(_values(back), x, rtol=2e-6, atol=1e-5)
    np.testing.assert_array_equal(_values(given), _values(before))


def _values(x: Any) -> np.ndarray:
    return x.detach().numpy() if isinstance(x, torch.Tensor) else np.asarray(x)


@pytest.mark.parametrize(
    ("dtype", "result"),
    [
        ("float16", "float16"), ("float32", "float32"), ("float64", "float64"), ("longdouble", "float64"),
        ("int8", "float32"), ("uint8", "float32"), ("int16", "float32"), ("uint16", "float32"),
        ("int32", "float32"), ("uint32", "float32"), ("int64", "float32"), ("uint64", "float32"),
        ("bool", "float32"), ("object", "float64"),
    ],
)  # fmt: skip
def test_result_type_of_numpy(dtype: str, result: str) -> None:
    x = np.array([[0, 1], [1, 0], [1, 1]]).astype(dtype)
    s = Standardizer().fit(x)
    assert s.transform(x).dtype == result
    assert s.mean_.dtype == s.var_.dtype == s.scale_.dtype == np.float64
    np.testing.assert_allclose(s.mean_, 2 / 3)
    np.testing.assert_allclose(s.transform(x)[:, 0].astype(float), [-(2**0.5), 0.5**0.5, 0.5**0.5], rtol=1e-3)


@pytest.mark.parametrize(
    "dtype", ["float8_e4m3fn", "float8_e5m2", "bfloat16", "float16", "uint16", "uint32", "uint64", "bool"]
)
def test_result_type_of_torch(dtype: str) -> None:
    kind = getattr(torch, dtype)
    x = torch.tensor([[0.0, 1.0], [1.0, 0.0], [1.0, 1.0]]).to(kind)
    s = Standardizer().fit(x)
    z = s.transform(x)
    assert z.dtype == (kind if kind in (torch.bfloat16, torch.float16) else torch.float32)
    assert s.mean_.tolist() == pytest.approx([2 / 3] * 2, rel=1e-15)
    assert z[:, 0].tolist() == pytest.approx([-(2**0.5), 0.5**0.5, 0.5**0.5], rel=4e-3)


def test_fitted_attributes_follow_the_data() -> None:
    assert isinstance(Standardizer().fit(X).mean_, np.ndarray)
    assert isinstance(Standardizer().fit(torch.from_numpy(X)).mean_, torch.Tensor)
    loader = DataLoader(TensorDataset(torch.from_numpy(X)), batch_size=3)
    assert isinstance(Standardizer().fit(loader).mean_, torch.Tensor)


def test_attributes_are_copies() -> None:
    s = Standardizer().fit(X)
    for name in ("mean_", "var_", "scale_"):
        getattr(s, name)[:] = 99
    s.moments_.count.fill_(0)
    assert s.mean_[0] == X[:, 0].mean()
    assert s.n_samples_seen_ == 8
    uneven = Standardizer().fit(np.array([[1.0, np.nan], [2.0, 3.0]]), sample_weight=0.25)
    uneven.n_samples_seen_[:] = 99
    assert uneven.n_samples_seen_.tolist() == [0.5, 0.25]


@pytest.mark.parametrize("axis", [1, -3, (1, 2, 3), (3, 1), (-1, -3), None])
def test_axes_of_images(axis: Any) -> None:
    x = torch.randn(5, 3, 4, 2, dtype=torch.float64) * 3 + 1
    s = Standardizer(axis=axis).fit(x)
    kept = () if axis is None else (axis,) if isinstance(axis, int) else axis
    kept = tuple(a % 4 for a in kept)
    over = [d for d in range(4) if d not in kept]
    assert s.mean_.shape == tuple(x.shape[d] for d in kept)
    assert s.n_features_in_ == math.prod(s.mean_.shape)
    assert s.n_samples_seen_ == x.numel() // s.n_features_in_
    expected = (x - x.mean(over, keepdim=True)) / x.std(over, correction=0, keepdim=True)
    torch.testing.assert_close(s.transform(x), expected)
    torch.testing.assert_close(s.layer()(x), expected)
    torch.testing.assert_close(s.inverse_transform(expected), x)
    np.testing.assert_allclose(
        Standardizer(axis=axis).fit_transform(x.numpy()), expected.numpy(), rtol=1e-10, atol=1e-12
    )


def test_channels_last_images() -> None:
    x = torch.randint(0, 256, (6, 5, 4, 3), dtype=torch.uint8)
    s = Standardizer(axis=-1).fit(x)
    torch.testing.assert_close(s.mean_, x.double().mean((0, 1, 2)))
    first = Standardizer().fit(x.movedim(-1, 1))
    torch.testing.assert_close(first.scale_, s.scale_)
    assert torch.equal(first.transform(x.movedim(-1, 1)).movedim(1, -1), s.transform(x))


def test_fit_on_pixels_applies_to_images() -> None:
    pixels = torch.randn(100, 3)
    s = Standardizer().fit(pixels)
    images = torch.randn(2, 3, 4, 4)
    torch.testing.assert_close(s.transform(images)[0, :, 0, 0], s.transform(images[:1, :, 0, 0])[0])


@pytest.mark.parametrize("batch", [tuple, list, lambda b: {"image": b[0], "label": b[1]}, lambda b: b[0]])
@pytest.mark.parametrize("stream", [list, iter, lambda b: (v for v in b)])
def test_iterables_of_batches(batch: Callable[[Any], Any], stream: Callable[[Any], Any]) -> None:
    x, y = torch.randn(20, 3, dtype=torch.float64), torch.arange(20)
    parts = [batch((a, b)) for a, b in zip(x.split(6), y.split(6), strict=True)]
    key = "image" if isinstance(parts[0], dict) else None
    s = Standardizer().fit(stream(parts), key=key)
    torch.testing.assert_close(s.mean_, x.mean(0))
    assert s.n_samples_seen_ == 20
    p = Standardizer()
    for part in parts:
        p.partial_fit(part, key=key)
    assert torch.equal(p.var_, s.var_)


def test_named_tuples_and_a_later_place() -> None:
    Batch = namedtuple("Batch", "label image")
    parts = [Batch(torch.zeros(4), torch.randn(4, 2)) for _ in range(3)]
    s = Standardizer().fit(parts, key=1)
    torch.testing.assert_close(s.mean_, torch.cat([b.image for b in parts]).double().mean(0))


def test_numpy_batches() -> None:
    s = Standardizer().fit([X[:3], X[3:4], X[4:4], X[4:]])
    np.testing.assert_allclose(s.mean_, X.mean(0), rtol=1e-15)
    np.testing.assert_allclose(s.var_, X.var(0), rtol=1e-14)


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter(torch.arange(10.0)[:, None])


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_loader_is_read_without_moving_the_global_generator(shuffle: bool) -> None:
    x = torch.randn(50, 3)
    loader = DataLoader(TensorDataset(x, torch.arange(50)), batch_size=7, shuffle=shuffle)
    before = torch.get_rng_state()
    s = Standardizer().fit(loader)
    assert torch.equal(torch.get_rng_state(), before)
    torch.testing.assert_close(s.mean_, x.double().mean(0))
    assert Standardizer().fit(DataLoader(Stream(), batch_size=4)).mean_.item() == 4.5


def test_a_failing_loader_restores_the_generator_at_once() -> None:
    loader = DataLoader(TensorDataset(torch.full((9, 2), math.inf)), batch_size=4, shuffle=True)
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="infinity") as caught:
        Standardizer().fit(loader)
    assert torch.equal(torch.get_rng_state(), before)
    assert caught.value.__notes__ == ["in batch 0"]


def test_one_batch_in_memory_at_a_time() -> None:
    alive = [0]

    def batches() -> Any:
        for _ in range(5):
            yield torch.randn(4, 2)
            # what is still held is at most the batch just given
            alive.append(sum(1 for o in (sys._getframe().f_locals.values()) if isinstance(o, torch.Tensor)))

    assert Standardizer().fit(batches()).n_samples_seen_ == 20
    assert max(alive) == 0


def test_a_memory_map_is_read_in_blocks(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.npy"
    np.save(path, np.random.default_rng(0).normal(5, 2, (1000, 4)).astype(np.float32))
    monkeypatch.setattr("musigma.inputs._arrays.BLOCK_VALUES", 400)
    x = np.load(path, mmap_mode="r")
    s = Standardizer().fit(x)
    np.testing.assert_allclose(s.mean_, np.asarray(x, np.float64).mean(0), rtol=1e-14)
    assert s.transform(x).std() == pytest.approx(1.0, rel=1e-5)


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "0-d": (torch.tensor(3.0), ValueError, r"Expected 2D array, got 0D array.*Reshape your data"),
    "1-d": (np.arange(3.0), ValueError, r"Expected 2D array, got 1D array.*x\.reshape\(-1, 1\)"),
    "number": (3.0, ValueError, "Expected 2D array, got 0D"),
    "no rows": (np.zeros((0, 3)), ValueError, r"0 sample\(s\) \(shape=\(0, 3\)\)"),
    "no features": (np.zeros((3, 0)), ValueError, r"0 feature\(s\) \(shape=\(3, 0\)\)"),
    "no pixels": (torch.zeros(3, 2, 0), ValueError, r"no values \(shape=\(3, 2, 0\)\)"),
    "empty list": ([], ValueError, "Reshape your data"),
    "no batches": (iter([]), ValueError, "this iterable yielded none"),
    "only empty batches": ([X[:0], X[:0]], ValueError, "this iterable yielded none"),
    "complex": (X + 1j, ValueError, "Complex data not supported: got complex128"),
    "complex tensor": (torch.ones(2, 2, dtype=torch.complex64), ValueError, "Complex data not supported"),
    "strings": (np.array([["a", "b"]]), ValueError, "expected numbers, got strings"),
    "bytes": (np.array([[b"a", b"b"]]), ValueError, "expected numbers, got strings"),
    "dates": (np.array([["2020-01-01"]], dtype="datetime64[D]"), ValueError, "got dates or durations"),
    "void": (np.zeros((2, 2), dtype="V4"), TypeError, "expected numbers, got dtype"),
    "records": (np.zeros(2, dtype=[("a", "f4")]), TypeError, "expected numbers"),
    "string cell": (np.array([[1, "x"]], dtype=object), ValueError, r"feature 1 holds a str \('x'\)"),
    "string column": (Frame({"age": [1], "city": ["A"]}), ValueError, r"column 'city' holds a str \('A'\)"),
    "date column": (
        Frame({"age": [1], "day": [datetime.date(2020, 1, 1)]}), ValueError, "column 'day' holds a date",
    ),
    "dict cell": (np.array([[{}, 1]], dtype=object), TypeError, "feature 0 holds a dict"),
    "complex cell": (np.array([[1j, 1]], dtype=object), TypeError, "feature 0 holds a complex"),
    "infinity": (np.array([[1, np.inf], [2, -np.inf]]), ValueError, "infinity.*: 2 of them in feature 1"),
    "infinite column": (Frame({"a": [1.0], "b": [math.inf]}), ValueError, "1 of them in column 'b'"),
    "half infinity": (torch.tensor([[math.inf]]).half(), ValueError, "infinity"),
    "sparse": (torch.eye(3).to_sparse(), TypeError, r"a sparse tensor .*x\.to_dense\(\)"),
    "meta": (torch.empty(3, 3, device="meta"), TypeError, "meta"),
    "masked": (np.ma.masked_array(X, mask=X > 5), TypeError, r"x\.filled\(np\.nan\)"),
    "path": ("data.npy", TypeError, "got str"),
    "nothing": (None, TypeError, "got NoneType"),
    "dict": ({"x": X}, TypeError, "got dict"),
    "data set": (TensorDataset(torch.ones(3, 3)), TypeError, r"single examples.*DataLoader\(dataset"),
    "batches of strings": (["ab", "cd"], ValueError, "strings"),
    "batches of dicts without a key": ([{"a": X, "b": X}], ValueError, r"keys \['a', 'b'\]; key=None"),
    "batches that differ": ([X, X[:, :2]], ValueError, "X has 2 features, but Standardizer is expecting 3"),
    "too far apart": (np.array([[1.7e308], [-1.7e308]]), ValueError, "feature 0 lie further apart"),
    "batches too far apart": ([np.array([[1.7e308]]), np.array([[-1.7e308]])], ValueError, "further apart"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_refused_with_the_fix_and_nothing_changed(what: str) -> None:
    x, error, message = REFUSED[what]
    s = Standardizer().fit(X + 100)
    before = pickle.dumps((s.mean_, s.var_, s.n_samples_seen_))
    with pytest.raises(error, match=message):
        s.fit(x)
    if what not in ("no rows", "only empty batches", "no pixels", "no batches", "batches that differ"):
        with pytest.raises((ValueError, TypeError)):
            s.partial_fit(x)
    assert pickle.dumps((s.mean_, s.var_, s.n_samples_seen_)) == before


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation.*:UserWarning")
def test_quantized_is_refused_with_the_fix() -> None:
    x = torch.quantize_per_tensor(torch.eye(3), 0.1, 0, torch.quint8)
    with pytest.raises(TypeError, match=r"x\.dequantize\(\)"):
        Standardizer().fit(x)


def test_scipy_sparse_is_refused_with_the_fix() -> None:
    sparse = pytest.importorskip("scipy.sparse")
    with pytest.raises(TypeError, match=r"x\.toarray\(\)"):
        Standardizer().fit(sparse.csr_matrix(X))


def test_an_error_in_the_last_batch_keeps_the_old_state() -> None:
    s = Standardizer().fit(X)
    bad = X.copy()
    bad[-1, 2] = np.inf
    with pytest.raises(ValueError, match="feature 2"):
        s.fit([X + 5, bad])
    np.testing.assert_array_equal(s.mean_, X.mean(0))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"axis": 0}, ValueError, "not the first"),
        ({"axis": (1, 1)}, ValueError, "each axis once"),
        ({"axis": (1, -1)}, ValueError, "each axis once"),
        ({"axis": -2}, ValueError, "not the first"),
        ({"axis": 2}, ValueError, "Expected 3D array, got 2D"),
        ({"axis": "channel"}, TypeError, "axis must be"),
        ({"axis": True}, TypeError, "axis must be"),
        ({"axis": 1.0}, TypeError, "axis must be"),
        ({"missing": "drop"}, ValueError, 'missing must be "keep" or "raise"'),
        ({"clip": -1.0}, ValueError, "clip must be positive"),
    ],
)
def test_the_constructor_only_stores_and_fit_refuses(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    s = Standardizer().set_params(**options)
    assert s.get_params()[next(iter(options))] == next(iter(options.values()))
    with pytest.raises(error, match=message):
        s.fit(X)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sample_weight": np.ones(4)}, r"shape \(8,\), one weight per example; got \(4,\)"),
        ({"sample_weight": np.ones((8, 1))}, r"got \(8, 1\)"),
        ({"sample_weight": [-1.0] + [1.0] * 7}, "got -1.0 at example 0"),
        ({"sample_weight": np.zeros(8)}, "total weight 0"),
        ({"mask": np.ones((4, 3), dtype=bool)}, r"mask must broadcast to x: \(4, 3\) against \(8, 3\)"),
        ({"mask": np.zeros((8, 3), dtype=bool)}, "mask is False everywhere"),
    ],
)
def test_weights_and_masks_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    s = Standardizer()
    with pytest.raises(ValueError, match=message):
        s.fit(X, **options)
    with pytest.raises(NotFittedError):
        s.mean_


def test_mask_is_boolean_and_weights_are_for_arrays() -> None:
    with pytest.raises(TypeError, match="weights go in sample_weight"):
        Standardizer().fit(X, mask=np.ones((8, 3)))
    with pytest.raises(ValueError, match="batch by batch"):
        Standardizer().fit([X, X], sample_weight=np.ones(8))


@pytest.mark.parametrize("call", ["transform", "inverse_transform"])
def test_transform_checks_its_input(call: str) -> None:
    s = Standardizer().fit(X)
    apply = getattr(s, call)
    with pytest.raises(
        ValueError, match="X has 2 features, but Standardizer is expecting 3 features as input"
    ):
        apply(X[:, :2])
    with pytest.raises(ValueError, match=r"infinity.*feature 1"):
        apply(np.array([[0, np.inf, 0]]))
    with pytest.raises(ValueError, match="Reshape your data"):
        apply(X[0])
    with pytest.raises(TypeError, match="one array"):
        apply(DataLoader(TensorDataset(torch.from_numpy(X))))
    assert apply(X[:0]).shape == (0, 3)
    assert np.isnan(apply(np.array([[np.nan, 1, 2]]))[0, 0])


def test_missing_raise() -> None:
    x = X.copy()
    x[3, 1] = np.nan
    with pytest.raises(ValueError, match=r"NaN.*1 of them in feature 1"):
        Standardizer(missing="raise").fit(x)
    s = Standardizer(missing="raise").fit(X)
    with pytest.raises(ValueError, match='feature 1; missing="keep"'):
        s.transform(x)
    hidden = Standardizer(missing="raise").fit(x, sample_weight=np.arange(8) != 3)
    assert hidden.n_samples_seen_ == 7


def test_gradients_flow_through_transform() -> None:
    s = Standardizer().fit(X)
    x = torch.from_numpy(X[:2].copy()).requires_grad_()
    s.transform(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.from_numpy(1 / s.scale_).expand(2, 3))


def test_fit_leaves_no_graph() -> None:
    x = torch.randn(5, 2, requires_grad=True)
    s = Standardizer().fit(x)
    assert not s.mean_.requires_grad
    assert not s.moments_.m2.requires_grad
