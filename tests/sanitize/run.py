"""Builds the kernels with the address and undefined-behaviour sanitizers and runs the driver on them.

python tests/sanitize/run.py [build folder]
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g1"]
# Unoptimized vectors take minutes; -O1 keeps every load and store.
OPTIMIZE = ["-std=c++20", "-O1"]


def _march(march: str | None) -> list[str]:
    return [f"-march={march}"] if march else []


def main(folder: Path) -> int:
    os.chdir(ROOT)
    spec = importlib.util.spec_from_file_location("setup", "setup.py")
    assert spec is not None
    assert spec.loader is not None
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    x86 = ["-DMUSIGMA_X86"] if build.X86 else []
    units = [
        (Path("tests/sanitize/driver.cpp"), "driver", []),
        (build.OPS / "_native/select.cpp", "select", x86),
        *(
            (source, level, [*build.ARITHMETIC, *build.QUIET, f"-DMUSIGMA_LEVEL={level}", *_march(march)])
            for source in build.KERNELS
            for level, march in build.LEVELS.items()
        ),
    ]
    folder.mkdir(parents=True, exist_ok=True)
    compiler = os.environ.get("CXX", "g++")

    def compiled(unit: tuple[Path, str, list[str]]) -> str:
        source, level, flags = unit
        target = folder / f"{level}_{source.parent.name}_{source.stem}.o"
        command = [compiler, *OPTIMIZE, *SANITIZE, *flags, "-c", str(source), "-o", str(target)]
        subprocess.run(command, check=True)
        return str(target)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compiled, units))
    program = folder / "driver"
    subprocess.run([compiler, *SANITIZE, *objects, "-o", str(program)], check=True)
    return subprocess.run([str(program)], check=False).returncode


if __name__ == "__main__":
    sys.exit(main((Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build/sanitize").resolve()))
