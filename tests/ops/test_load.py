"""Whether the compiled kernels are taken, and what is said where they are not."""

import json
import os
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest
import torch

from musigma.ops._native import load


def recorded(path: Path, monkeypatch: pytest.MonkeyPatch, **record: object) -> load.Native:
    path.write_text(json.dumps(record))
    monkeypatch.setattr(load, "RECORD", path)
    return load.load()


def test_never_built_is_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "RECORD", tmp_path / "absent.json")
    native = load.load()
    assert (native.module, native.broken) == (None, False)


def test_a_failed_build_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    native = recorded(
        tmp_path / "r.json",
        monkeypatch,
        torch=torch.__version__,
        built=False,
        reason="no C++ compiler",
        size=0,
    )
    assert native.module is None
    assert native.broken
    assert "no C++ compiler" in native.reason


def test_another_torch_is_never_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    native = recorded(tmp_path / "r.json", monkeypatch, torch="2.0.0", built=True, reason="", size=0)
    assert native.module is None
    assert native.broken
    assert "built for torch 2.0.0" in native.reason
    assert "--force-reinstall --no-deps --no-cache-dir" in native.reason


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"built": true}'])
def test_a_record_that_cannot_be_read_is_no_reason_to_fail(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "r.json"
    path.write_text(text)
    monkeypatch.setattr(load, "RECORD", path)
    native = load.load()
    assert native.module is None
    assert native.broken
    assert "can't be read" in native.reason


def test_half_a_file_is_never_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"_C{EXTENSION_SUFFIXES[0]}").write_bytes(b"half")
    native = recorded(
        tmp_path / "r.json",
        monkeypatch,
        torch=torch.__version__,
        built=True,
        reason="",
        size=8,
        sources=load.digest(),
    )
    assert native.module is None
    assert native.broken
    assert "not the file that was built" in native.reason


def test_new_code_never_meets_an_old_extension(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    native = recorded(
        tmp_path / "r.json",
        monkeypatch,
        torch=torch.__version__,
        built=True,
        reason="",
        size=8,
        sources="of yesterday",
    )
    assert native.module is None
    assert native.broken
    assert "have changed since" in native.reason


@pytest.mark.parametrize(("mode", "warned"), [("auto", 1), ("off", 0)])
def test_the_first_call_says_once_that_torch_runs_instead(mode: str, warned: int, tmp_path: Path) -> None:
    record = tmp_path / "r.json"
    record.write_text(json.dumps({"torch": "2.0.0", "built": True, "reason": "", "size": 0}))
    # the record is read when musigma.ops is imported, so the path is put in place before
    code = f"""
import importlib.util, pathlib, sys, warnings, torch
spec = importlib.util.find_spec("musigma")
name = "musigma.ops._native.load"
path = pathlib.Path(spec.origin).parent / "ops/_native/load.py"
module = importlib.util.module_from_spec(importlib.util.spec_from_file_location(name, path))
sys.modules[name] = module
module.__spec__.loader.exec_module(module)
module.RECORD = pathlib.Path({str(record)!r})
import musigma as ms
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(3):
        ms.nn.LayerNorm(3)(torch.ones(2, 3))
# at the line of whoever uses the layer, not at one of ours
print(len([w for w in caught if "built for torch 2.0.0" in str(w.message) and w.filename == "<string>"]))
print({{k.runs for k in ms.ops.kernels()}} <= {{"torch", "reference"}})
"""
    env = {**os.environ, "MUSIGMA_KERNELS": mode}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert done.stdout.split() == [str(warned), "True"]
