"""`musigma env`: what a bug report needs."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

import torch
from rich.table import Table

from musigma import ops
from musigma._version import __version__
from musigma.cli import _console

# Installed by extras; their absence explains a missing report or demo.
OPTIONAL = ("plotly", "scikit-learn")
VARIABLES = ("MUSIGMA_KERNELS", "MUSIGMA_LEVEL", "MUSIGMA_CACHE_MB")


def env() -> None:
    """Show versions, the machine, and which kernels run and why."""
    console = _console.out()
    console.print(_facts())
    console.print()
    console.print(_kernels())


def _facts() -> Table:
    table = Table.grid(padding=(0, 2))
    for name, value in facts().items():
        table.add_row(name, value)
    return table


def facts() -> dict[str, str]:
    """Name and value of everything worth telling, in order."""
    named = {"musigma": __version__, "python": platform.python_version(), "torch": str(torch.__version__)}
    named |= {name: _installed(name) for name in ("numpy", *OPTIONAL)}
    named |= {
        "platform": platform.platform(terse=True),
        "cpu": _cpu(),
        "threads": f"{torch.get_num_threads()} of {os.cpu_count()} cores",
        "gpu": _gpus(),
    }
    return named | {name: os.environ.get(name, "not set") for name in VARIABLES}


def _installed(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _cpu() -> str:
    model = platform.processor() or platform.machine()
    described = Path("/proc/cpuinfo")
    if described.is_file():
        lines = described.read_text(errors="replace").splitlines()
        model = next(
            (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model
        )
    return f"{model} ({torch.backends.cpu.get_cpu_capability()})"


def _gpus() -> str:
    if not torch.cuda.is_available():
        return "none"
    return ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))


def _kernels() -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("op", "runs", "because"):
        table.add_column(heading, header_style="bold")
    for kernel in ops.kernels():
        table.add_row(kernel.op, kernel.runs, kernel.reason)
    return table
