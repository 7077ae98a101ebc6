"""What an op computes can be read where it is called from."""

from __future__ import annotations

import inspect
import pydoc

import pytest

import musigma as ms


@pytest.mark.parametrize("name", [*ms.ops.OPS, "running_update_"])
def test_help_tells_the_formula_and_the_arguments(name: str) -> None:
    op = getattr(ms.ops, name)
    doc = inspect.getdoc(op)
    assert doc is not None
    assert " = " in doc or "\u2190" in doc  # a formula
    for argument in ("mean", "m2", "momentum") if name == "running_update_" else ("Tensor x",):
        assert argument in doc
    assert doc.splitlines()[-1].strip() in pydoc.plain(pydoc.render_doc(op))
