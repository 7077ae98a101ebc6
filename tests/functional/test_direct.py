"""Plain calls go to the kernels in one step; whatever is not plain is left to Python, which looks closer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.native import RUN
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import musigma as ms
from musigma import ops

pytestmark = pytest.mark.skipif(not RUN, reason="the step is the native kernels'")


def layer_norm(**changed: Any) -> Tensor | None:
    given: dict[str, Any] = {
        "input": torch.randn(3, 4),
        "normalized_shape": (4,),
        "weight": torch.ones(4),
        "bias": torch.zeros(4),
        "eps": 1e-5,
        "mask": None,
        "activation": None,
    }
    return ops.direct("layer_norm")(*(given | changed).values())


def batch_norm(**changed: Any) -> Tensor | None:
    given: dict[str, Any] = {
        "input": torch.randn(3, 4),
        "running_mean": torch.zeros(4),
        "running_var": torch.ones(4),
        "weight": torch.ones(4),
        "bias": torch.zeros(4),
        "training": True,
        "momentum": 0.1,
        "eps": 1e-5,
        "num_batches_tracked": torch.tensor(0),
        "mask": None,
        "group": None,
        "add": None,
        "activation": None,
    }
    return ops.direct("batch_norm")(*(given | changed).values())


def group_norm(**changed: Any) -> Tensor | None:
    given: dict[str, Any] = {
        "input": torch.randn(3, 4, 2),
        "num_groups": 2,
        "weight": torch.ones(4),
        "bias": torch.zeros(4),
        "eps": 1e-5,
        "mask": None,
        "activation": None,
    }
    return ops.direct("group_norm")(*(given | changed).values())


class Subclass(Tensor):
    pass


ROWS: dict[str, dict[str, Any]] = {
    "mask": {"mask": torch.ones(3, 4, dtype=torch.bool)},
    "subclass": {"input": torch.randn(3, 4).as_subclass(Subclass)},
    "meta": {"input": torch.randn(3, 4, device="meta")},
    "integers": {"input": torch.ones(3, 4, dtype=torch.long)},
    "no-tensor": {"input": [[1.0, 2.0, 3.0, 4.0]]},
    "none": {"input": None},
    "empty": {"input": torch.randn(0, 4)},
    "0-dim": {"input": torch.tensor(1.0)},
    "sparse": {"input": torch.randn(3, 4).to_sparse()},
    "single-values": {"input": torch.randn(3, 1), "normalized_shape": (1,), "weight": None, "bias": None},
    "other-shape": {"normalized_shape": (3,)},
    "no-shape": {"normalized_shape": ()},
    "longer-shape": {"normalized_shape": (2, 3, 4)},
    "huge-shape": {"normalized_shape": (1 << 80,)},
    "a-number": {"normalized_shape": 4},
    "weight-shape": {"weight": torch.ones(3)},
    "weight-dtype": {"weight": torch.ones(4, dtype=torch.long)},
    "bias-device": {"bias": torch.ones(4, device="meta")},
    "negative-eps": {"eps": -1e-5},
    "nan-eps": {"eps": float("nan")},
    "eps-in-words": {"eps": "1e-5"},
    "unknown-activation": {"activation": "sin"},
    "no-name": {"activation": torch.relu},
    "channels-last": {
        "input": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "normalized_shape": (4,),
    },
}


@pytest.mark.parametrize("changed", ROWS.values(), ids=ROWS)
def test_rows_that_are_not_plain_are_left_to_python(changed: dict[str, Any]) -> None:
    assert layer_norm() is not None
    assert layer_norm(**changed) is None


BATCHES: dict[str, dict[str, Any]] = {
    "mask": {"mask": torch.ones(3, 1, dtype=torch.bool)},
    "group": {"group": object()},
    "one-value": {"input": torch.randn(1, 4)},
    "1-D": {"input": torch.randn(4)},
    "zero-eps": {"eps": 0.0},
    "uncounted-average": {"momentum": None, "num_batches_tracked": None},
    "only-a-mean": {"running_var": None},
    "other-length": {"running_mean": torch.zeros(3)},
    "half-buffers": {"running_mean": torch.zeros(4).half()},
    "no-statistics": {"training": False, "running_mean": None, "running_var": None},
    "negative-variance": {"training": False, "running_var": -torch.ones(4)},
    "nan-variance": {"training": False, "running_var": torch.full((4,), torch.nan)},
    "inf-variance": {"training": False, "running_var": torch.full((4,), torch.inf)},
    "add-shape": {"add": torch.ones(4)},
    "add-dtype": {"add": torch.ones(3, 4).double()},
}


@pytest.mark.parametrize("changed", BATCHES.values(), ids=BATCHES)
def test_batches_that_are_not_plain_are_left_to_python(changed: dict[str, Any]) -> None:
    assert batch_norm() is not None
    mean = torch.zeros(4)
    assert batch_norm(**({"running_mean": mean} | changed)) is None
    assert not mean.any()  # nothing half done


GROUPS: dict[str, dict[str, Any]] = {
    "no-divisor": {"num_groups": 3},
    "none": {"num_groups": 0},
    "single-values": {"input": torch.randn(2, 4), "num_groups": 4},
    "1-D": {"input": torch.randn(4)},
    "weight-shape": {"weight": torch.ones(2)},
}


@pytest.mark.parametrize("changed", GROUPS.values(), ids=GROUPS)
def test_groups_that_are_not_plain_are_left_to_python(changed: dict[str, Any]) -> None:
    assert group_norm() is not None
    assert group_norm(**changed) is None


def test_whoever_listens_hears_the_call() -> None:
    heard = []

    class Listen(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            heard.append(func)
            return func(*args, **(kwargs or {}))

    with Listen():
        assert layer_norm() is None
        ms.functional.rms_norm(torch.ones(2, 3), (3,))
    assert ms.functional.rms_norm in heard


def test_a_dispatch_mode_sees_the_running_update() -> None:
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Watch():
        ms.functional.batch_norm(torch.randn(3, 4), torch.zeros(4), torch.ones(4), training=True)
    assert torch.ops.musigma.running_update_.default in seen


@pytest.mark.parametrize("mode", ["off", "reference"])
def test_nothing_is_direct_where_kernels_are_off(mode: ops.Mode) -> None:
    with ops.use_kernels(mode):
        assert layer_norm() is None
        assert batch_norm() is None
        assert group_norm() is None


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("momentum", [0.1, None, 1.0])
def test_the_step_is_what_its_parts_are(training: bool, momentum: float | None) -> None:
    x = torch.randn(6, 5, 3, requires_grad=True)
    w, b, add = torch.randn(5, requires_grad=True), torch.randn(5), torch.randn(6, 5, 3)
    results = []
    for apart in (False, True):
        mean, var, n = torch.full((5,), 0.5), torch.full((5,), 2.0), torch.tensor(3)
        if apart:
            if training:
                y, m, m2 = ops.batch_norm(x, w, b, 1e-3, add, "relu")
                ops.running_update_(mean, var, n, torch.tensor(18.0).double(), m, m2, momentum)
            else:
                y = ops.affine(x, mean, var, w, b, 1e-3, add, "relu", None)
        else:
            options: Any = {"num_batches_tracked": n, "add": add, "activation": "relu"}
            y = ms.functional.batch_norm(x, mean, var, w, b, training, momentum, 1e-3, **options)
        results.append([y, mean, var, n, *torch.autograd.grad(y.sum(), (x, w))])
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)
