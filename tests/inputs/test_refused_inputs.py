"""What a Standardizer refuses, with which words, and that nothing has changed then."""

from __future__ import annotations

import datetime
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from tests.inputs.frame import Frame
from torch.utils.data import DataLoader, TensorDataset

from musigma.inputs import NotFittedError, Standardizer

X = np.arange(24.0).reshape(8, 3) ** 2


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
