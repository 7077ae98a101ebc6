"""What can't be normalized says so itself, not through an attribute that it lacks.

The type checker of the tests stands before every function, so the messages are read where it does not run.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

SCRIPT = """
import json, warnings
import numpy as np, torch, musigma as ms
f, nn, a = ms.functional, ms.nn, np.ones((2, 3, 4), "float32")
v = torch.ones(3)
CALLS = {
    "layer_norm": lambda x: f.layer_norm(x, (4,)),
    "rms_norm": lambda x: f.rms_norm(x, (4,)),
    "add_layer_norm": lambda x: f.add_layer_norm(x, x, (4,)),
    "add_rms_norm": lambda x: f.add_rms_norm(torch.ones(2, 3, 4), x, (4,)),
    "batch_norm": lambda x: f.batch_norm(x, v, v),
    "batch_norm, training": lambda x: f.batch_norm(x, v, v, training=True),
    "group_norm": lambda x: f.group_norm(x, 3),
    "instance_norm": lambda x: f.instance_norm(x),
    "LayerNorm": lambda x: nn.LayerNorm(4)(x),
    "LayerNorm1d": lambda x: nn.LayerNorm1d(3)(x),
    "RMSNorm": lambda x: nn.RMSNorm(4)(x),
    "BatchNorm1d": lambda x: nn.BatchNorm1d(3)(x),
    "BatchNorm1d, eval": lambda x: nn.BatchNorm1d(3).eval()(x),
    "SyncBatchNorm": lambda x: nn.SyncBatchNorm(3)(x),
    "FrozenBatchNorm1d": lambda x: nn.FrozenBatchNorm1d(3)(x),
    "GroupNorm": lambda x: nn.GroupNorm(3, 3)(x),
    "InstanceNorm1d": lambda x: nn.InstanceNorm1d(3)(x),
}
INPUTS = {"array": a, "None": None, "list": a.tolist()} | {
    str(t): torch.ones(2, 3, 4).to(t) for t in (torch.int64, torch.int32, torch.uint8, torch.bool)
}
def said(call):
    try:
        call()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return ["", ""]
SIZES = {
    f"{name}({size!r})": (lambda name=name, size=size: getattr(nn, name)(size))
    for name in ("LayerNorm", "RMSNorm", "BatchNorm1d", "InstanceNorm1d", "FrozenBatchNorm2d", "LayerNorm2d")
    for size in (3.5, "3", None)
}
WHOLE = [nn.LayerNorm(np.int64(3)), nn.RMSNorm((np.int32(3), 2)), nn.BatchNorm2d(np.int64(3))]
SIZES["GroupNorm(1, 3.5)"] = lambda: nn.GroupNorm(1, 3.5)
SIZES["LayerNorm((2, 3.5))"] = lambda: nn.LayerNorm((2, 3.5))
MOMENTS = {
    "list": lambda: ms.moments([1.0, 2.0], 0),
    "array": lambda: ms.moments(a, 0),
    "mask": lambda: ms.moments(v, 0, mask=[True, False, True]),
}
print(json.dumps({
    "inputs": {f"{c}, {i}": said(lambda: CALLS[c](INPUTS[i])) for c in CALLS for i in INPUTS},
    "sizes": {name: said(make) for name, make in SIZES.items()},
    "moments": {name: said(call) for name, call in MOMENTS.items()},
}))
"""


@pytest.fixture(scope="module")
def said() -> dict[str, dict[str, list[str]]]:
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    found: dict[str, dict[str, list[str]]] = json.loads(run.stdout)
    return found


def test_no_tensor(said: dict[str, dict[str, list[str]]]) -> None:
    calls = {k: v for k, v in said["inputs"].items() if "torch." not in k}
    assert len(calls) == 17 * 3
    for call, (error, words) in calls.items():
        assert error == "TypeError", (call, error, words)
        assert "normalizes a tensor, got " in words, (call, words)
        fix = "does the layer before return its result?" if "None" in call else "torch.as_tensor"
        assert fix in words, (call, words)


def test_integers(said: dict[str, dict[str, list[str]]]) -> None:
    """torch's class for them is NotImplementedError, a RuntimeError."""
    calls = {k: v for k, v in said["inputs"].items() if "torch." in k}
    calls = {k: v for k, v in calls.items() if "add_rms" not in k}  # adds them to floats: a ValueError
    assert len(calls) == 16 * 4
    names = {"int64": "Long", "int32": "Int", "uint8": "Byte", "bool": "Bool"}
    for call, (error, words) in calls.items():
        assert error == "NotImplementedError", (call, error, words)
        assert f"not implemented for '{names[call.rpartition('.')[2]]}'" in words, (call, words)
        assert "x.float()" in words, (call, words)


def test_sizes(said: dict[str, dict[str, list[str]]]) -> None:
    for call, (error, words) in said["sizes"].items():
        assert error == "TypeError", (call, error, words)
        assert "must be a whole number, got " in words, (call, words)


def test_moments(said: dict[str, dict[str, list[str]]]) -> None:
    for call, (error, words) in said["moments"].items():
        assert error == "TypeError", (call, error, words)
        assert "torch.as_tensor" in words, (call, words)
