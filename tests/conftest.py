"""What every test can rely on: checked types, poisoned memory, one thread, fixed seeds, a narrow terminal."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch

# Tests of `torch.compile` run in a pass of their own (`make test-compile`): dynamo can't trace the checker.
TYPECHECK = os.environ.get("MUSIGMA_TYPECHECK", "on") != "off"

if TYPECHECK:
    # Before anything imports musigma: a module that is already there is no longer decorated.
    from jaxtyping import install_import_hook

    install_import_hook("musigma", "typecheck.checker")

# rich, click and typer read these when a console is made; terminal output is compared at this width.
os.environ.update({"COLUMNS": "80", "LINES": "40", "NO_COLOR": "1", "TERM": "dumb"})
os.environ["_TYPER_FORCE_DISABLE_TERMINAL"] = "1"
for name in ("FORCE_COLOR", "PY_COLORS", "CLICOLOR_FORCE", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
    os.environ.pop(name, None)
# cuBLAS refuses deterministic mode without it, and reads it once.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

SHARED = Path(__file__).resolve().parents[1] / "../shared"


class TorchRandom:
    """torch's global generator, in the shape hypothesis asks for so that it can replay an example."""

    seed = staticmethod(torch.manual_seed)
    getstate = staticmethod(torch.get_rng_state)
    setstate = staticmethod(torch.set_rng_state)


# hypothesis keeps a weak reference only
torch_random = TorchRandom()
hypothesis.register_random(torch_random)
hypothesis.settings.register_profile("default", deadline=None, max_examples=20)
hypothesis.settings.register_profile("ci", deadline=None, max_examples=50, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Put torch's global state where every test expects it, whatever the one before did."""
    if TYPECHECK and item.get_closest_marker("compile"):
        pytest.skip("dynamo can't trace the type checker: run with MUSIGMA_TYPECHECK=off (make test-compile)")
    # Deterministic mode is what makes torch fill `empty`, `empty_like`, `new_empty` and `resize_`: NaN for
    # floats, the largest value for integers. The few ops without a deterministic kernel raise.
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture
def shared() -> Callable[[str], Path]:
    """`shared("data/x.txt")`: the path of a file kept beside the checkout; skips where it is absent."""

    def find(name: str) -> Path:
        path = SHARED / name
        if not path.exists():
            pytest.skip(f"needs ../shared/{name}")
        return path

    return find
