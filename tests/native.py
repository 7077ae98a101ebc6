"""Which kernels this run has: musigma's own, or torch's for want of them."""

from __future__ import annotations

import pytest

from musigma import ops


def runs(mode: ops.Mode) -> set[str]:
    """Who runs the ops in this mode: ``"native"``, ``"torch"``, ``"reference"``."""
    with ops.use_kernels(mode):
        return {kernel.runs for kernel in ops.kernels()}


BUILT = runs("auto") == {"native"}
# And run unless a test asks for something else, as MUSIGMA_KERNELS=off would have it.
RUN = {kernel.runs for kernel in ops.kernels()} == {"native"}
# What torch's kernels get wrong and ours don't.
NEEDS_NATIVE = pytest.mark.xfail(
    not BUILT, strict=True, raises=AssertionError, reason="needs the native kernels"
)
