"""scikit-learn's manners: parameters, cloning, pipelines, the error of an unfitted estimator."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch

from musigma.inputs import NotFittedError, Standardizer

X = np.random.default_rng(0).normal(3, 2, (30, 4))


def test_unfitted_is_an_error_of_every_kind_expected() -> None:
    s = Standardizer()
    for ask in (
        lambda: s.transform(X),
        lambda: s.inverse_transform(X),
        s.layer,
        lambda: s.mean_,
        lambda: s.n_features_in_,
    ):
        with pytest.raises(NotFittedError, match="not fitted yet") as caught:
            ask()
        assert isinstance(caught.value, ValueError)
        assert isinstance(caught.value, AttributeError)
    assert not hasattr(s, "mean_")
    assert repr(s) == "Standardizer()"


def test_rows_alone_do_not_fit() -> None:
    s = Standardizer().partial_fit(X[:0])
    assert s.n_features_in_ == 4
    with pytest.raises(NotFittedError):
        s.transform(X)
    with pytest.raises(ValueError, match="X has 3 features, but Standardizer is expecting 4"):
        s.partial_fit(X[:, :3])


def test_unfitted_is_scikit_learn_s_error_once_it_is_imported() -> None:
    exceptions = pytest.importorskip("sklearn.exceptions")
    with pytest.raises(exceptions.NotFittedError):
        Standardizer().transform(X)
    with pytest.raises(NotFittedError):
        Standardizer().transform(X)


def test_scikit_learn_is_not_imported_by_us() -> None:
    code = (
        "import sys, numpy, musigma as ms\n"
        "s = ms.inputs.Standardizer().fit(numpy.eye(3)); repr(s); s.get_params()\n"
        "try: ms.inputs.Standardizer().transform(numpy.eye(3))\n"
        "except ms.inputs.NotFittedError: pass\n"
        "assert not any(m.split('.')[0] in ('sklearn', 'scipy', 'pandas') for m in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_parameters() -> None:
    s = Standardizer(axis=-1, clip=3.0)
    assert s.get_params() == {"axis": -1, "with_mean": True, "with_std": True, "missing": "keep", "clip": 3.0}
    assert s.set_params(clip=None, missing="raise") is s
    assert repr(s) == "Standardizer(axis=-1, missing='raise')"
    with pytest.raises(ValueError, match=r"Invalid parameter 'copy_'.*Valid parameters are"):
        s.set_params(axis=2, copy_=True)
    assert s.axis == -1


def test_clone_and_copies() -> None:
    base = pytest.importorskip("sklearn.base")
    s = Standardizer(axis=(1, 2)).fit(np.ones((3, 2, 2)))
    twin = base.clone(s)
    assert twin.get_params() == s.get_params()
    assert not hasattr(twin, "mean_")
    for again in (copy.deepcopy(s), pickle.loads(pickle.dumps(s))):
        np.testing.assert_array_equal(again.mean_, s.mean_)
        again.partial_fit(np.zeros((5, 2, 2)))
        assert s.n_samples_seen_ == 3


def test_check_is_fitted() -> None:
    validation = pytest.importorskip("sklearn.utils.validation")
    with pytest.raises(ValueError, match="not fitted yet"):
        validation.check_is_fitted(Standardizer())
    validation.check_is_fitted(Standardizer().fit(X))


def test_in_a_pipeline() -> None:
    pipeline = pytest.importorskip("sklearn.pipeline")
    linear = pytest.importorskip("sklearn.linear_model")
    preprocessing = pytest.importorskip("sklearn.preprocessing")
    y = X @ np.array([1.0, -2.0, 0.5, 0.0])
    ours = pipeline.make_pipeline(Standardizer(), linear.Ridge()).fit(X, y).predict(X)
    theirs = pipeline.make_pipeline(preprocessing.StandardScaler(), linear.Ridge()).fit(X, y).predict(X)
    np.testing.assert_allclose(ours, theirs, rtol=1e-10)


@pytest.mark.parametrize("with_mean", [True, False])
@pytest.mark.parametrize("with_std", [True, False])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_attributes_and_results_are_scikit_learn_s(with_mean: bool, with_std: bool, dtype: type) -> None:
    preprocessing = pytest.importorskip("sklearn.preprocessing")
    x = X.astype(dtype)
    x[::5, 1] = np.nan
    ours = Standardizer(with_mean=with_mean, with_std=with_std).fit(x)
    theirs = preprocessing.StandardScaler(with_mean=with_mean, with_std=with_std).fit(x)
    for name in ("mean_", "var_", "scale_"):
        a, b = getattr(ours, name), getattr(theirs, name)
        assert (a is None) == (b is None), name
        if b is not None:
            np.testing.assert_allclose(a, b, rtol=1e-13)
    np.testing.assert_array_equal(
        ours.n_samples_seen_, theirs.n_samples_seen_ if with_mean or with_std else [30, 24, 30, 30]
    )
    rtol = 4 * np.finfo(dtype).eps
    np.testing.assert_allclose(ours.transform(x), theirs.transform(x), rtol=rtol * 10, atol=rtol)
    z = theirs.transform(x)
    np.testing.assert_allclose(
        ours.inverse_transform(z), theirs.inverse_transform(z), rtol=rtol * 10, atol=rtol * 10
    )
    layer = ours.layer()
    torch.testing.assert_close(
        layer(torch.from_numpy(x)), torch.from_numpy(ours.transform(x)), equal_nan=True
    )


def test_refit_forgets() -> None:
    s = Standardizer().fit(X)
    s.fit(X[:, :2] * 3)
    assert s.n_features_in_ == 2
    np.testing.assert_allclose(s.mean_, 3 * X[:, :2].mean(0), rtol=1e-14)


def test_fit_transform_and_y() -> None:
    z = Standardizer().fit_transform(X, np.arange(30))
    np.testing.assert_allclose(z.mean(0), 0, atol=1e-14)
    np.testing.assert_allclose(z.std(0), 1, rtol=1e-13)
    with pytest.raises(TypeError, match="fit_transform takes one array"):
        Standardizer().fit_transform(iter([X]))
