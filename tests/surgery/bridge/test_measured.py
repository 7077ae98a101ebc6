"""What the real Keras and Flax computed (measured.json names their versions) is what our layers compute."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import musigma as ms
from musigma.surgery.bridge import FlaxLayer, KerasLayer, from_flax, from_keras, to_flax, to_keras

sys.path.insert(0, str(Path(__file__).parent))
from layers import values

MEASURED = json.loads(Path(__file__).with_name("measured.json").read_text())
CLOSE = {"rtol": 2e-5, "atol": 5e-5}
FEATURES_LAST = ("LayerNormalization", "RMSNormalization", "LayerNorm", "RMSNorm")


def array(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: array(held) for key, held in value.items()}
    numbers, shape = value
    return np.array(numbers, np.float32).reshape(shape)


def first(x: np.ndarray) -> Tensor:
    """Channels last to channels first."""
    return torch.from_numpy(x).movedim(-1, 1)


def named(case: dict[str, Any]) -> str:
    return f"{case['kind']}-{len(case['x'][1])}d"


def here(case: dict[str, Any], state: str) -> nn.Module:
    dims, values_a_channel = len(case["x"][1]), math.prod(case["x"][1][:-1])
    n = values_a_channel if state == "trained" else None
    if "variables" in case:
        held = array(case["trained" if n else "variables"])
        return from_flax(FlaxLayer(case["kind"], case["config"], held), dims=dims, values=n)
    held = array(case["trained" if n else "weights"])
    return from_keras(KerasLayer(case["kind"], case["config"], held), dims=dims, values=n)


@pytest.mark.parametrize("case", [*MEASURED["keras"], *MEASURED["flax"]], ids=named)
def test_outputs(case: dict[str, Any]) -> None:
    layer, x, y = here(case, "weights").eval(), first(array(case["x"])), first(array(case["y"]))
    torch.testing.assert_close(layer(x).detach(), y, **CLOSE)


@pytest.mark.parametrize(
    "case", [c for c in MEASURED["keras"] + MEASURED["flax"] if "trained" in c], ids=named
)
def test_running_statistics_over_training_steps(case: dict[str, Any]) -> None:
    """1 − momentum, and the unbiased variance, or the running ones drift apart."""
    shape = case["x"][1]
    n = math.prod(shape[:-1])
    start = dict(case)
    start["trained"] = case["variables"] if "variables" in case else case["weights"]
    layer = here(start, "trained").train()
    for step in range(MEASURED["steps"]):
        layer(first(values(*shape, seed=step).numpy()))
    expected = here(case, "trained")
    torch.testing.assert_close(layer.running_mean, expected.running_mean, **CLOSE)
    torch.testing.assert_close(layer.running_var, expected.running_var, **CLOSE)
    copied = here(case, "weights")
    assert n / (n - 1) > 1.02  # what a forgotten conversion would be off by
    there = to_keras(layer, values=n).weights["moving_variance"]
    np.testing.assert_allclose(there, layer.running_var.numpy() * (n - 1) / n, rtol=1e-6)
    assert copied.momentum == pytest.approx(1 - case["config"]["momentum"])


@pytest.mark.parametrize("case", [*MEASURED["keras"], *MEASURED["flax"]], ids=named)
def test_back_again_nothing_is_lost(case: dict[str, Any]) -> None:
    layer = here(case, "weights")
    if "variables" in case:
        again = to_flax(layer)
        assert again.kind == case["kind"]
        for collection, held in array(case["variables"]).items():
            for name, value in held.items():
                np.testing.assert_array_equal(again.variables[collection][name], value)
        config = {"axis": -1, "feature_axes": -1} | case["config"]
    else:
        there = to_keras(layer)
        for name, value in array(case["weights"]).items():
            np.testing.assert_array_equal(there.weights[name], value)
        assert there.kind == case["kind"]
        again, config = there, case["config"]
    for name in ("epsilon", "momentum"):
        if name in config:
            assert again.config[name] == pytest.approx(config[name], rel=1e-12)


def test_our_defaults_are_written_out_for_they_differ() -> None:
    """Keras's own eps is 1e-3, Flax's for LayerNorm 1e-6, and momentum there is the old value's weight."""
    norm = nn.BatchNorm2d(3)
    assert (to_keras(norm).config["epsilon"], to_keras(norm).config["momentum"]) == (1e-5, 0.9)
    assert (to_flax(norm).config["epsilon"], to_flax(norm).config["momentum"]) == (1e-5, 0.9)
    assert to_flax(nn.LayerNorm(3)).config["epsilon"] == 1e-5
    # torch's own eps=None is float32's for float32
    assert to_keras(nn.RMSNorm(3)).config["epsilon"] == torch.finfo(torch.float32).eps
    assert to_keras(norm, channels_last=False).config["axis"] == 1


def test_kinds_that_come_over_as_themselves() -> None:
    frozen = to_keras(ms.nn.FrozenBatchNorm2d(3))
    assert frozen.config["trainable"] is False
    assert isinstance(from_keras(frozen, dims=4), ms.nn.FrozenBatchNorm2d)
    shared = to_keras(nn.SyncBatchNorm(3))
    assert shared.config["synchronized"] is True
    assert isinstance(from_keras(shared), ms.nn.SyncBatchNorm)
    doubled = from_keras(to_keras(nn.BatchNorm1d(3).double()), dims=2)
    assert doubled.running_mean.dtype == torch.float64
    half = to_keras(nn.LayerNorm(3).bfloat16())
    assert half.weights["gamma"].dtype == np.float32


class BNRelu(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


@pytest.mark.parametrize("convert", [to_keras, to_flax])
def test_what_has_no_counterpart_is_refused_with_the_reason(convert: Any) -> None:
    for layer, error, words in (
        (nn.BatchNorm2d(3, momentum=None), ValueError, "momentum=None averages over all batches"),
        (nn.BatchNorm2d(3, track_running_stats=False), ValueError, "no running statistics"),
        (nn.InstanceNorm2d(3, track_running_stats=True), ValueError, "freeze it first"),
        (nn.Linear(3, 3), TypeError, "Linear is no BatchNorm"),
        (BNRelu(3), TypeError, "forward of its own"),
        (ms.nn.Standardize([0.0], [1.0], clip=3.0), ValueError, "does at 3.0"),
    ):
        with pytest.raises(error, match=words):
            convert(layer)
    with pytest.raises(ValueError, match="values must be at least 2"):
        convert(nn.BatchNorm2d(3), values=1)


def test_number_of_dims_and_axes_are_asked_for() -> None:
    with pytest.raises(ValueError, match="dims must be the number of dims of the layer's inputs"):
        from_keras(to_keras(nn.BatchNorm2d(3)))
    odd = to_keras(nn.LayerNorm(3))
    with pytest.raises(ValueError, match="over the last axes"):
        from_keras(KerasLayer(odd.kind, {**odd.config, "axis": [1, 3]}, odd.weights), dims=4)
    with pytest.raises(ValueError, match="needs its scale, bias"):
        from_flax(FlaxLayer("LayerNorm", {"epsilon": 1e-6, "use_bias": True}, {}))
    with pytest.raises(TypeError, match="Dense is no normalization"):
        from_flax(FlaxLayer("Dense", {}, {}))


def test_standardizations_come_over() -> None:
    x = values(20, 3) * torch.tensor([1.0, 30.0, 0.1])
    fitted = ms.inputs.Standardizer().fit(x)
    for back in (
        from_keras(to_keras(fitted)),
        from_keras(to_keras(fitted.layer())),
        from_flax(to_flax(fitted), dims=2).eval(),
    ):
        torch.testing.assert_close(back(x), fitted.transform(x), **CLOSE)
