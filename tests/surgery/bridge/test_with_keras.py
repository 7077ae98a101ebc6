"""The real Keras and our layers give the same numbers, in evaluation and over training steps."""

import os
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

import musigma as ms
from musigma.surgery.bridge import from_keras, to_keras

sys.path.insert(0, str(Path(__file__).parent))
from layers import CASES, from_last, to_last, values

os.environ.setdefault("KERAS_BACKEND", "torch")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    keras = pytest.importorskip("keras")

pytestmark = pytest.mark.filterwarnings("ignore")
# Each computes in float32 by its own formula: a few of its roundings of values of size 10.
CLOSE = {"rtol": 1e-5, "atol": 2e-5}


def run(layer, x: np.ndarray, training: bool = False) -> np.ndarray:  # type: ignore[no-untyped-def]
    y = (
        layer(keras.ops.convert_to_tensor(x), training=training)
        if training
        else layer(keras.ops.convert_to_tensor(x))
    )
    return keras.ops.convert_to_numpy(y)


@pytest.mark.parametrize("name", CASES)
def test_there_and_back(name: str) -> None:
    layer, shape = CASES[name]
    x = values(*shape)
    expected = layer(x).detach()
    there = to_keras(layer)
    x_there = to_last(name, x)
    real = there.make((None, *x_there.shape[1:]))
    torch.testing.assert_close(from_last(name, run(real, x_there)), expected, **CLOSE)
    back = from_keras(real, dims=None if name in ("instance",) else x.dim()).eval()
    torch.testing.assert_close(back(x), expected, **CLOSE)


@pytest.mark.parametrize("steps", [1, 20])
def test_batch_norm_trains_on_the_same_with_the_variance_converted(steps: int) -> None:
    layer, shape = torch.nn.BatchNorm2d(3, momentum=0.1), (4, 3, 5, 2)
    n = 4 * 5 * 2
    real = to_keras(layer, values=n).make((None, 5, 2, 3))
    layer.train()
    for step in range(steps):
        x = values(*shape, seed=step)
        y = layer(x).detach()
        torch.testing.assert_close(from_last("", run(real, to_last("", x), training=True)), y, **CLOSE)
    back = from_keras(real, values=n)
    torch.testing.assert_close(back.running_mean, layer.running_mean, **CLOSE)
    torch.testing.assert_close(back.running_var, layer.running_var, **CLOSE)
    assert isinstance(back, ms.nn.BatchNorm2d)
    assert back.momentum == pytest.approx(0.1)


def test_what_keras_built_itself_comes_over() -> None:
    x = values(6, 3, 4, 4)
    for real in (
        keras.layers.BatchNormalization(),
        keras.layers.BatchNormalization(center=False),
        keras.layers.BatchNormalization(scale=False),
        keras.layers.GroupNormalization(groups=-1),
        keras.layers.LayerNormalization(),
        keras.layers.LayerNormalization(axis=[1, 2, 3]),
    ):
        there = to_last("", x)
        for _ in range(3):
            run(real, there, training=True) if "Batch" in type(real).__name__ else run(real, there)
        here = from_keras(real).eval()
        torch.testing.assert_close(here(x).detach(), from_last("", run(real, there)), **CLOSE)
    first = keras.layers.BatchNormalization(axis=1)
    run(first, x.numpy(), training=True)
    here = from_keras(first, channels_last=False).eval()
    torch.testing.assert_close(here(x).detach(), torch.from_numpy(run(first, x.numpy())), **CLOSE)


def test_an_adapted_normalization_and_a_fitted_standardizer_agree() -> None:
    x = values(50, 3) * torch.tensor([1.0, 10.0, 0.1])
    real = keras.layers.Normalization()
    real.adapt(x.numpy())
    here = from_keras(real)
    torch.testing.assert_close(here(x), torch.from_numpy(run(real, x.numpy())), **CLOSE)
    fitted = ms.inputs.Standardizer().fit(x)
    there = to_keras(fitted).make((None, 3))
    torch.testing.assert_close(torch.from_numpy(run(there, x.numpy())), fitted.transform(x), **CLOSE)
    inverse = to_keras(fitted.layer().inverse()).make((None, 3))
    torch.testing.assert_close(torch.from_numpy(run(inverse, fitted.transform(x).numpy())), x, **CLOSE)
    torch.testing.assert_close(from_keras(inverse)(fitted.transform(x)), x, **CLOSE)


def test_what_no_layer_here_computes_is_refused() -> None:
    scaled = keras.layers.LayerNormalization(rms_scaling=True)
    run(scaled, values(4, 3).numpy())
    with pytest.raises(ValueError, match="without subtracting the mean"):
        from_keras(scaled)
    with pytest.raises(ValueError, match="holds no weights yet"):
        from_keras(keras.layers.BatchNormalization())
    with pytest.raises(ValueError, match="adapt"):
        from_keras(keras.layers.Normalization())
    with pytest.raises(TypeError, match="Dense is no normalization"):
        from_keras(keras.layers.Dense(3))
