"""torch's own sample inputs and error inputs for its norm modules, run on ours."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.testing import assert_close
from torch.testing._internal.common_modules import ModuleErrorEnum, module_db

import musigma as ms

NORMS = (
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "GroupNorm",
    "InstanceNorm1d",
    "InstanceNorm2d",
    "InstanceNorm3d",
    "LayerNorm",
    "RMSNorm",
)
INFOS = {info.module_cls.__name__: info for info in module_db if info.module_cls.__name__ in NORMS}


def samples() -> Iterator[Any]:
    for name, info in INFOS.items():
        for dtype in (torch.float32, torch.float64):
            for training in (True, False):
                inputs = info.module_inputs_func(
                    info, device="cpu", dtype=dtype, requires_grad=True, training=training
                )
                for i, sample in enumerate(inputs):
                    mode = "train" if training else "eval"
                    yield pytest.param(
                        name, sample, dtype, training, id=f"{name}-{sample.desc or i}-{str(dtype)[6:]}-{mode}"
                    )


def errors() -> Iterator[Any]:
    for name, info in INFOS.items():
        if info.module_error_inputs_func is None:
            continue
        inputs = info.module_error_inputs_func(
            info, device="cpu", dtype=torch.float32, requires_grad=False, training=True
        )
        for i, sample in enumerate(inputs):
            yield pytest.param(name, sample, id=f"{name}-{i}")


def build(module: Any, sample: Any, dtype: torch.dtype) -> torch.nn.Module:
    arguments = sample.constructor_input
    return module(*arguments.args, **arguments.kwargs, dtype=dtype)


def test_every_norm_of_torch_is_here() -> None:
    assert set(INFOS) == set(NORMS)


@pytest.mark.parametrize(("name", "sample", "dtype", "training"), list(samples()))
def test_samples_give_torchs_outputs_gradients_and_state(
    name: str, sample: Any, dtype: torch.dtype, training: bool
) -> None:
    theirs = build(getattr(torch.nn, name), sample, dtype).train(training)
    ours = build(getattr(ms.nn, name), sample, dtype).train(training)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.uniform_(0.5, 1.5)
        for key in ("running_mean", "running_var"):
            if getattr(theirs, key, None) is not None:
                getattr(theirs, key).uniform_(0.5, 1.5)
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    assert isinstance(ours, getattr(torch.nn, name))
    assert repr(ours) == repr(theirs)

    x = sample.forward_input.args[0]
    inputs = [x.detach().clone().requires_grad_() for _ in range(2)]
    outputs = [m(i, **sample.forward_input.kwargs) for m, i in zip((theirs, ours), inputs, strict=True)]
    upstream = torch.randn_like(outputs[0])
    # The same kernels on the same values; what is left is the order of sums, where we take another path.
    assert_close(outputs[1], outputs[0])
    gradients = [
        torch.autograd.grad(y, [i, *m.parameters()], upstream)
        for m, i, y in zip((theirs, ours), inputs, outputs, strict=True)
    ]
    # A weight's gradient sums as many terms as there are rows, in torch's order or in ours.
    rows = max(1, x.shape[0]) ** 0.5
    rtol, atol = (1e-5, 1e-5) if dtype is torch.float32 else (1e-7, 1e-7)
    assert_close(gradients[1], gradients[0], rtol=rtol, atol=atol * rows)

    # State both ways. torch counts an empty batch and we do not: there is nothing in it to take in.
    state, expected = ours.state_dict(), theirs.state_dict()
    if x.numel() == 0 and "num_batches_tracked" in expected:
        assert state["num_batches_tracked"] == 0
        del state["num_batches_tracked"], expected["num_batches_tracked"]
    assert_close(state, expected)
    theirs.load_state_dict(ours.state_dict())


@pytest.mark.parametrize(("name", "sample"), list(errors()))
def test_error_inputs_raise_torchs_class_and_words(name: str, sample: Any) -> None:
    given = sample.module_error_input
    if sample.error_on is ModuleErrorEnum.CONSTRUCTION_ERROR:
        with pytest.raises(sample.error_type, match=sample.error_regex):
            build(getattr(ms.nn, name), given, torch.float32)
        return
    module = build(getattr(ms.nn, name), given, torch.float32)
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(sample.error_type, match=sample.error_regex):
        module(*given.forward_input.args, **given.forward_input.kwargs)
    assert_close(module.state_dict(), before, rtol=0, atol=0)
