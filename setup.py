"""Builds the native kernels where there is a C++ compiler; without one the install goes on without them.

Everything else about the package stands in pyproject.toml. The extension is built against the torch that it
will run with, which has to be installed first; it is read from its files, since pip hides it from import.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import site
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
OPS = Path("src/musigma/ops")
RECORD = "_build.json"
X86 = platform.machine().lower() in ("x86_64", "amd64")

# One object of every kernel source for each; _native/select.cpp chooses at run time.
LEVELS = (
    {"x86_64": "x86-64", "x86_64_v3": "x86-64-v3", "x86_64_v4": "x86-64-v4"} if X86 else {"baseline": None}
)
KERNELS = [
    *sorted(OPS.glob("*/native.cpp")),
    *(p for p in sorted(OPS.glob("_native/*.cpp")) if p.stem not in ("bind", "select")),
]

COMMON = ["-std=c++20", "-O3", "-fvisibility=hidden", "-g0", "-MMD"]
# Contraction would decide bits behind the sources' back; errno keeps square roots from being vectorized.
ARITHMETIC = ["-fno-math-errno", "-ffp-contract=off"]
# GCC warns of its own AVX-512 header, and of vectors in the ABI that never cross a boundary.
QUIET = ["-Wno-maybe-uninitialized", "-Wno-uninitialized", "-Wno-psabi"]


def installed_torch() -> Path:
    """The folder of the torch that this interpreter will import once pip has stepped aside.

    Raises:
        RuntimeError: there is none.
    """
    # Our own folder comes first: a build without isolation takes what it would import.
    places = [*sys.path, *site.getsitepackages(), site.getusersitepackages()]
    for place in places:
        torch = Path(place or ".") / "torch"
        if (torch / "version.py").is_file() and (torch / "include/ATen").is_dir():
            return torch
    raise RuntimeError("torch was not installed when musigma was")


def version_of(torch: Path) -> str:
    """What ``torch.__version__`` will say."""
    found = re.search(r"^__version__ = '([^']+)'", (torch / "version.py").read_text(), re.MULTILINE)
    if found is None:
        raise RuntimeError(f"{torch.name}/version.py does not tell torch's version")
    return found[1]


def digest() -> str:
    """Of the sources of the extension; `musigma.ops._native.load` forms it again."""
    sources = sorted(path for kind in ("cpp", "h") for path in OPS.glob(f"*/*.{kind}"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()


def _up_to_date(done: Path, source: Path) -> bool:
    """Whether an object is newer than the flags and all that the compiler read for it (its .d file)."""
    read = done.with_suffix(".d")
    if not (done.exists() and read.exists()):
        return False
    ours = [Path(p) for p in read.read_text().replace("\\\n", " ").split()[1:] if not p.startswith("/")]
    return all(
        p.exists() and p.stat().st_mtime < done.stat().st_mtime for p in (source, Path("setup.py"), *ours)
    )


class BuildKernels(build_ext):
    """Compile each kernel once per CPU level, the binding once, and never fail the install.

    What became of the build is written beside the extension, where `musigma.ops.kernels()` finds it.
    """

    def build_extension(self, ext: Extension) -> None:
        record: dict[str, object] = {"torch": None, "built": False, "reason": "", "size": 0}
        try:
            torch = installed_torch()
            record["torch"] = version_of(torch)
            self._build(ext, torch)
            record["built"] = True
            record["size"] = Path(self.get_ext_fullpath(ext.name)).stat().st_size
            record["sources"] = digest()
        except Exception as error:
            record["reason"] = " ".join(str(error).split())[-500:]
        path = Path(self.get_ext_fullpath(ext.name))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_name(RECORD).write_text(json.dumps(record) + "\n")
        if not record["built"]:
            path.unlink(missing_ok=True)  # what an earlier build left
            print(f"musigma: built without native kernels: {record['reason']}", file=sys.stderr)

    def copy_extensions_to_source(self) -> None:
        super().copy_extensions_to_source()
        (ext,) = self.extensions
        built = Path(self.build_lib) / OPS.relative_to("src")
        self.copy_file(str(built / RECORD), str(OPS / RECORD))
        name = Path(self.get_ext_filename(ext.name)).name
        if not (built / name).exists():
            (OPS / name).unlink(missing_ok=True)

    def _build(self, ext: Extension, torch: Path) -> None:
        include = [str(torch / "include"), str(torch / "include/torch/csrc/api/include")]
        jobs = [
            (source, level, [f"-march={march}"] if march else [])
            for source in KERNELS
            for level, march in LEVELS.items()
        ]
        units = [
            # The binding takes longest and goes first.
            (OPS / "_native/bind.cpp", "bind", [*COMMON, "-fopenmp", "-fno-strict-aliasing"], include),
            (OPS / "_native/select.cpp", "select", COMMON + (["-DMUSIGMA_X86"] if X86 else []), []),
            *(
                (s, level, [*COMMON, *ARITHMETIC, *QUIET, *march, f"-DMUSIGMA_LEVEL={level}"], [])
                for s, level, march in jobs
            ),
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(lambda unit: self._compile(*unit), units))
        self.compiler.link_shared_object(
            objects,
            self.get_ext_fullpath(ext.name),
            libraries=["c10", "torch", "torch_cpu", "torch_python"],
            library_dirs=[str(torch / "lib")],
            extra_postargs=["-fopenmp", "-Wl,-s"] if sys.platform == "linux" else ["-fopenmp"],
        )

    def _compile(self, source: Path, unit: str, flags: list[str], include: list[str]) -> str:
        folder = Path(self.build_temp) / unit
        done = folder / source.with_suffix(".o")
        if not self.force and _up_to_date(done, source):
            return str(done)
        try:
            (compiled,) = self.compiler.compile(
                [str(source)],
                output_dir=str(folder),
                include_dirs=[*include, *self.include_dirs],
                extra_postargs=flags,
            )
        except Exception as error:
            # distutils' own message is the whole command; what the compiler said is in the log
            if shutil.which(self.compiler.compiler_cxx[0]) is None:
                raise RuntimeError(f"no C++ compiler ({self.compiler.compiler_cxx[0]}) was found") from error
            raise RuntimeError(
                f"the C++ compiler failed on {source} for {unit}; pip install -v shows what it said"
            ) from error
        return compiled


if __name__ == "__main__":
    os.chdir(ROOT)
    setup(ext_modules=[Extension("musigma.ops._C", [], optional=True)], cmdclass={"build_ext": BuildKernels})
