"""The CPU levels the kernels are compiled for: each can be asked for, and each keeps what is promised."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from musigma.ops._native import load
from native import RUN

LEVELS: dict[str, bool] = load.load().module.levels() if RUN else {}  # type: ignore[union-attr]
RUNNING = [name for name, runs in LEVELS.items() if runs]

pytestmark = pytest.mark.skipif(not RUN, reason="the native kernels are not built")


def python(level: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "MUSIGMA_LEVEL": level}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=env, check=False)


@pytest.mark.parametrize("level", RUNNING)
def test_the_environment_chooses_a_level_and_env_tells_it(level: str) -> None:
    shown = python(level, "-m", "musigma.cli", "env").stdout
    assert re.search(rf"MUSIGMA_LEVEL +{level}\s", shown)
    assert f"runs at level {level}, as" in shown


def test_a_level_that_does_not_exist_is_refused() -> None:
    done = python("avx1024", "-c", "import musigma")
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ValueError: MUSIGMA_LEVEL must be one of {', '.join(LEVELS)}; got 'avx1024'")


def test_a_level_that_this_cpu_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUSIGMA_LEVEL", "x86_64_v4")
    old_cpu = ModuleType("_C")
    old_cpu.levels = lambda: {"x86_64": True, "x86_64_v3": True, "x86_64_v4": False}  # type: ignore[attr-defined]
    old_cpu.use_level = lambda level: False  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"instructions this CPU lacks; it runs x86_64, x86_64_v3$"):
        load._at_level(old_cpu)


@pytest.mark.parametrize("level", RUNNING[:-1])
def test_every_level_keeps_the_promised_accuracy(level: str) -> None:
    """The best one is what all other tests run on."""
    file = str(Path(__file__).parents[1] / "functional/test_promised_accuracy.py")
    arguments = ("-m", "pytest", file, "-q", "-p", "no:cacheprovider", "-k", "within and (layer or batch)")
    done = python(level, *arguments)
    assert done.returncode == 0, done.stdout
    assert "4 passed" in done.stdout
