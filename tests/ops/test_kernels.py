"""Who runs an op, and who says so."""

import os
import subprocess
import sys

import pytest

from musigma import ops


def test_every_op_is_accounted_for() -> None:
    assert {k.op for k in ops.kernels()} == set(ops.OPS)
    assert all(k.reason for k in ops.kernels())


def test_reference_mode_reaches_every_op_and_ends_with_the_block() -> None:
    before = ops.kernels()
    with ops.use_kernels("reference"):
        assert {k.runs for k in ops.kernels()} == {"reference"}
    assert ops.kernels() == before


def test_unknown_mode_is_refused() -> None:
    # in a process of its own: here the type checker would be faster
    code = "import musigma as ms\nwith ms.ops.use_kernels('fast'): pass"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "mode must be one of auto, off, reference; got 'fast'" in run.stderr


@pytest.mark.parametrize(("value", "says"), [("reference", "reference"), ("nonsense", "must be one of")])
def test_environment_variable(value: str, says: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", "import musigma as ms; print(ms.ops.kernels()[0].runs)"],
        env={**os.environ, "MUSIGMA_KERNELS": value},
        capture_output=True,
        text=True,
    )
    assert says in run.stdout + run.stderr
