"""Write measured.json: what the real Keras and Flax compute, for tests where they are not installed.

Run under build/bridge: PYTHONPATH=src:build/bridge python tests/surgery/bridge/measure.py
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("KERAS_BACKEND", "torch")
sys.path.insert(0, str(Path(__file__).parent))

import flax
import jax
import keras
from flax import linen
from layers import values

STEPS = 3
IMAGES, ROWS = values(4, 4, 2, 3).numpy(), values(4, 6).numpy()  # channels last


def plain(value: Any) -> Any:
    """Arrays as lists of nine digits, which is what float32 has."""
    if isinstance(value, dict):
        return {key: plain(held) for key, held in value.items()}
    array = np.asarray(value)
    return [float(f"{v:.9g}") for v in array.flatten()], list(array.shape)


def filled(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.abs(values(*shape, seed=seed).numpy()) + 0.2


def of_keras(kind: str, x: np.ndarray, **config: Any) -> dict[str, Any]:
    layer = getattr(keras.layers, kind)(**config)
    layer.build((None, *x.shape[1:]))
    names = [w.path.rpartition("/")[2] for w in layer.weights]
    layer.set_weights([filled(tuple(w.shape), seed) for seed, w in enumerate(layer.weights)])
    state = dict(zip(names, (np.copy(w) for w in layer.get_weights()), strict=True))
    said = {key: layer.get_config()[key] for key in ("axis", "epsilon", *config)}
    if kind == "BatchNormalization":
        said |= {"momentum": layer.momentum}
    found = {"kind": kind, "config": said, "weights": plain(state), "x": plain(x)}
    found["y"] = plain(keras.ops.convert_to_numpy(layer(x)))
    if kind == "BatchNormalization":
        for step in range(STEPS):
            layer(values(*x.shape, seed=step).numpy(), training=True)
        found["trained"] = plain(dict(zip(names, layer.get_weights(), strict=True)))
    return found


def of_flax(kind: str, x: np.ndarray, **config: Any) -> dict[str, Any]:
    module = getattr(linen, kind)(**config)
    options = {"use_running_average": True} if kind == "BatchNorm" else {}
    variables = module.init(jax.random.key(0), x, **options)
    seeds = iter(range(9))
    variables = jax.tree.map(lambda a: filled(a.shape, next(seeds)), variables)
    names = ("epsilon", "momentum", "axis", "num_groups", "reduction_axes", "feature_axes")
    said = {name: getattr(module, name) for name in names if hasattr(module, name)}
    found = {"kind": kind, "config": said, "variables": plain(variables), "x": plain(x)}
    found["y"] = plain(module.apply(variables, x, **options))
    if kind == "BatchNorm":
        for step in range(STEPS):
            batch = values(*x.shape, seed=step).numpy()
            _, new = module.apply(variables, batch, use_running_average=False, mutable=["batch_stats"])
            variables = {**variables, **new}
        found["trained"] = plain(variables)
    return found


def main() -> None:
    measured = {
        "versions": {"keras": keras.__version__, "flax": flax.__version__, "jax": jax.__version__},
        "steps": STEPS,
        "keras": [
            of_keras("BatchNormalization", IMAGES),
            of_keras("BatchNormalization", ROWS, momentum=0.9),
            of_keras("LayerNormalization", ROWS),
            of_keras("LayerNormalization", IMAGES, axis=[-3, -2, -1]),
            of_keras("RMSNormalization", ROWS),
            of_keras("GroupNormalization", ROWS, groups=3),
            of_keras("GroupNormalization", IMAGES, groups=-1),
        ],
        "flax": [
            of_flax("BatchNorm", IMAGES),
            of_flax("BatchNorm", ROWS, momentum=0.9),
            of_flax("LayerNorm", ROWS),
            of_flax("LayerNorm", IMAGES, reduction_axes=(-3, -2, -1), feature_axes=(-3, -2, -1)),
            of_flax("RMSNorm", ROWS),
            of_flax("GroupNorm", ROWS, num_groups=3),
            of_flax("InstanceNorm", IMAGES),
        ],
    }
    Path(__file__).with_name("measured.json").write_text(json.dumps(measured) + "\n")


if __name__ == "__main__":
    main()
