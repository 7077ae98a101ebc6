"""What a call keeps for its backward: its input once, and two accumulator values a set of statistics."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import musigma as ms
from native import RUN

pytestmark = pytest.mark.skipif(not RUN, reason="the promise is that of the native kernels")

f = ms.functional


def kept(call: Callable[[], Tensor], parameters: list[Tensor]) -> int:
    """Bytes of the storages that autograd keeps for `call`, those of the parameters apart."""
    storages: dict[int, int] = {}
    held = []  # an address may be used again once its storage is gone

    def pack(t: Tensor) -> Tensor:
        held.append(t)
        storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = call()
    y.sum().backward()
    for p in parameters:
        storages.pop(p.untyped_storage().data_ptr(), None)
    return sum(storages.values())


SHAPE = (8, 12, 16, 17)
SETS: dict[str, int] = {
    "layer": 8 * 12 * 16,
    "rms": 8 * 12 * 16,
    "add_layer": 8 * 12 * 16,
    "add_rms": 8 * 12 * 16,
    "group": 8 * 3,
    "instance": 8 * 12,
    "batch": 12,
    "batch_eval": 12,
    "batch_add": 12,
}


def run(name: str, x: Tensor, more: Tensor, p: dict[str, Tensor], activation: str | None) -> Tensor:
    a = activation
    calls: dict[str, Callable[[], Tensor]] = {
        "layer": lambda: f.layer_norm(x, (17,), p["row"], p["row"], activation=a),
        "rms": lambda: f.rms_norm(x, (17,), p["row"], activation=a),
        "add_layer": lambda: f.add_layer_norm(x, more, (17,), p["row"], p["row"], activation=a)[0],
        "add_rms": lambda: f.add_rms_norm(x, more, (17,), p["row"], activation=a)[0],
        "group": lambda: f.group_norm(x, 3, p["c"], p["c"], activation=a),
        "instance": lambda: f.instance_norm(x, weight=p["c"], bias=p["c"], activation=a),
        "batch": lambda: f.batch_norm(x, p["mean"], p["var"], p["c"], p["c"], True, activation=a),
        "batch_eval": lambda: f.batch_norm(x, p["mean"], p["var"], p["c"], p["c"], activation=a),
        "batch_add": lambda: f.batch_norm(x, None, None, p["c"], p["c"], True, add=more, activation=a),
    }
    return calls[name]()


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", [None, "relu", "silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("name", SETS)
def test_the_input_and_two_values_a_set(
    name: str, activation: str | None, dtype: torch.dtype, memory_format: torch.memory_format
) -> None:
    x = torch.randn(SHAPE).to(dtype).to(memory_format=memory_format).requires_grad_()
    more = torch.randn(SHAPE).to(dtype).to(memory_format=memory_format).requires_grad_()
    parameters = {
        "row": torch.ones(17, dtype=dtype, requires_grad=True),
        "c": torch.ones(12, dtype=dtype, requires_grad=True),
        "mean": torch.zeros(12),
        "var": torch.ones(12),
    }
    bytes_kept = kept(lambda: run(name, x, more, parameters, activation), list(parameters.values()))
    inputs = x.nbytes
    if name == "batch_add" and activation is not None:
        inputs += more.nbytes  # which decides where the activation bends
    # one row of 17 values keeps two doubles, more than the 5 % that are left for anything else
    assert bytes_kept <= 1.05 * inputs + 2 * 8 * SETS[name]
