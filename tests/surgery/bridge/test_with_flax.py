"""The real Flax, linen and nnx, and our layers give the same numbers, in evaluation and over training."""

import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

import musigma as ms
from musigma.surgery.bridge import from_flax, to_flax

sys.path.insert(0, str(Path(__file__).parent))
from layers import CASES, from_last, to_last, values

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("flax")
    from flax import nnx
    from jax import random

pytestmark = pytest.mark.filterwarnings("ignore")
# Flax takes the variance as E[x²] − E[x]² in float32, where the mean is of the spread's size here.
CLOSE = {"rtol": 2e-5, "atol": 5e-5}


@pytest.mark.parametrize("name", CASES)
def test_there_and_back(name: str) -> None:
    layer, shape = CASES[name]
    x = values(*shape)
    expected = layer(x).detach()
    there = to_flax(layer)
    module = there.make()
    options = {"use_running_average": True} if there.kind == "BatchNorm" else {}
    y = np.asarray(module.apply(there.variables, to_last(name, x), **options))
    torch.testing.assert_close(from_last(name, y), expected, **CLOSE)
    back = from_flax(module, there.variables, dims=x.dim()).eval()
    torch.testing.assert_close(back(x).detach(), expected, **CLOSE)
    assert list(back.state_dict()) == list(layer.state_dict()) or name == "standardize"


def test_batch_norm_trains_on_the_same_with_the_variance_converted() -> None:
    layer = torch.nn.BatchNorm2d(3, momentum=0.1)
    n = 4 * 5 * 2
    there = to_flax(layer, values=n)
    module, variables = there.make(), dict(there.variables)
    for step in range(20):
        x = values(4, 3, 5, 2, seed=step)
        y, new = module.apply(variables, to_last("", x), use_running_average=False, mutable=["batch_stats"])
        torch.testing.assert_close(from_last("", np.asarray(y)), layer(x).detach(), **CLOSE)
        variables |= new
    back = from_flax(module, variables, dims=4, values=n)
    torch.testing.assert_close(back.running_mean, layer.running_mean, **CLOSE)
    torch.testing.assert_close(back.running_var, layer.running_var, **CLOSE)
    assert back.momentum == pytest.approx(0.1)


def test_nnx_modules_hold_their_own_state() -> None:
    x = values(6, 4, 3, 3)
    there = to_last("", x)
    rngs = nnx.Rngs(random.key(0))
    for real, dims in (
        (nnx.BatchNorm(4, momentum=0.9, rngs=rngs), 4),
        (nnx.GroupNorm(4, num_groups=2, rngs=rngs), None),
        (nnx.GroupNorm(4, num_groups=None, group_size=2, rngs=rngs), None),
        (nnx.LayerNorm(4, rngs=rngs), 4),
        (nnx.InstanceNorm(4, rngs=rngs), 4),
    ):
        real(there)
        if isinstance(real, nnx.BatchNorm):
            real.use_running_average = True
        expected = from_last("", np.asarray(real(there)))
        torch.testing.assert_close(from_flax(real, dims=dims).eval()(x).detach(), expected, **CLOSE)
    rms = nnx.RMSNorm(3, rngs=rngs)
    torch.testing.assert_close(
        from_flax(rms)(x).detach(), torch.from_numpy(np.array(rms(x.numpy()))), **CLOSE
    )
    assert isinstance(from_flax(nnx.BatchNorm(4, rngs=rngs), dims=3), ms.nn.BatchNorm1d)
