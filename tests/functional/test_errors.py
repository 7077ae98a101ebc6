"""Errors come in torch's class and words, and say what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import musigma as ms

f = ms.functional

ERRORS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "width": (
        lambda: f.layer_norm(torch.ones(3, 4), (5,)),
        RuntimeError,
        r"Given normalized_shape=\[5\], expected input with shape \[\*, 5\], but got input of size\[3, 4\]",
    ),
    "channels first": (
        lambda: f.layer_norm(torch.ones(2, 8, 5, 7), (8,)),
        RuntimeError,
        r"Given normalized_shape=\[8\].*LayerNorm2d",
    ),
    "rms width": (lambda: f.rms_norm(torch.ones(3, 4), (5,)), RuntimeError, r"Given normalized_shape=\[5\]"),
    "no shape": (lambda: f.layer_norm(torch.ones(3, 4), ()), RuntimeError, "at least 1-dimensional"),
    "weight": (
        lambda: f.layer_norm(torch.ones(3, 4), (4,), torch.ones(5)),
        RuntimeError,
        "Expected weight to be of same shape as normalized_shape",
    ),
    "bias": (
        lambda: f.layer_norm(torch.ones(3, 4), (4,), None, torch.ones(5)),
        RuntimeError,
        "Expected bias to be of same shape as normalized_shape",
    ),
    "negative eps": (lambda: f.layer_norm(torch.ones(3, 4), (4,), eps=-1.0), ValueError, "non-negative"),
    "activation": (
        lambda: f.layer_norm(torch.ones(3, 4), (4,), activation="tanh"),
        ValueError,
        "'relu', 'silu', 'gelu', 'gelu_tanh'; got 'tanh'",
    ),
    "residual shape": (
        lambda: f.add_layer_norm(torch.ones(3, 4), torch.ones(1, 4), (4,)),
        ValueError,
        r"same shape and dtype, got \(3, 4\).*\(1, 4\)",
    ),
    "residual dtype": (
        lambda: f.add_rms_norm(torch.ones(3, 4), torch.ones(3, 4).double(), (4,)),
        ValueError,
        "float64",
    ),
    "groups": (
        lambda: f.group_norm(torch.ones(3, 10), 3),
        RuntimeError,
        "divisible by num_groups.*num_groups=3; try 1, 2, 5 or 10",
    ),
    "no groups": (lambda: f.group_norm(torch.ones(3, 10), 0), RuntimeError, "num_groups=0"),
    "group dims": (lambda: f.group_norm(torch.ones(3), 1), RuntimeError, "at least 2 dimensions"),
    "group weight": (
        lambda: f.group_norm(torch.ones(3, 4), 2, torch.ones(5)),
        RuntimeError,
        "Expected weight to be a vector of size equal to the number of channels",
    ),
    "channel weight": (
        lambda: f.batch_norm(torch.ones(3, 4), None, None, torch.ones(5), training=True),
        RuntimeError,
        "weight should contain 4 elements not 5",
    ),
    "running": (
        lambda: f.batch_norm(torch.ones(3, 4), torch.ones(5), torch.ones(5)),
        RuntimeError,
        "running_mean should contain 4 elements not 5",
    ),
    "half of running": (
        lambda: f.batch_norm(torch.ones(3, 4), torch.ones(4), None, training=True),
        ValueError,
        "must either both be None or neither be None",
    ),
    "nothing to evaluate by": (
        lambda: f.batch_norm(torch.ones(3, 4), None, None),
        RuntimeError,
        "running_mean must be defined in evaluation mode",
    ),
    "batch dims": (
        lambda: f.batch_norm(torch.ones(3), None, None, training=True),
        IndexError,
        "at least 2-D",
    ),
    "training eps": (
        lambda: f.batch_norm(torch.ones(3, 4), None, None, training=True, eps=0.0),
        ValueError,
        "batch_norm eps must be positive during training, but got 0.0",
    ),
    "cumulative without a count": (
        lambda: f.batch_norm(torch.ones(3, 4), torch.zeros(4), torch.ones(4), training=True, momentum=None),
        ValueError,
        "momentum=None .* needs num_batches_tracked",
    ),
    "add": (
        lambda: f.batch_norm(torch.ones(3, 4), None, None, training=True, add=torch.ones(4)),
        ValueError,
        r"add must have the input's shape \(3, 4\), got \(4,\)",
    ),
    "mask": (
        lambda: f.batch_norm(torch.ones(3, 4), None, None, training=True, mask=torch.ones(5) > 0),
        ValueError,
        r"mask must broadcast to the input: \(5,\) against \(3, 4\)",
    ),
    "mask of rows": (
        lambda: f.layer_norm(torch.ones(3, 4), (4,), mask=torch.ones(3) > 0),
        ValueError,
        "mask must broadcast",
    ),
    "mask of groups": (
        lambda: f.group_norm(torch.ones(3, 4), 2, mask=torch.ones(1, 3, 4) > 0),
        ValueError,
        "mask must broadcast",
    ),
    "nothing to evaluate instances by": (
        lambda: f.instance_norm(torch.ones(2, 3, 4), use_input_stats=False),
        RuntimeError,
        "Expected running_mean and running_var to be defined when use_input_stats is false",
    ),
    "integers": (lambda: f.layer_norm(torch.ones(3, 4).long(), (4,)), NotImplementedError, "Long"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_have_torchs_class_and_words(case: str) -> None:
    run, error, words = ERRORS[case]
    with pytest.raises(error, match=words):
        run()
