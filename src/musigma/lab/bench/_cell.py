"""One cell of the grid: an op on one tensor, forward alone or with its backward."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

ROWS = ("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm")
"""Ops that normalize the last dim of (rows, width)."""

CHANNELS = ("batch_norm", "batch_norm_eval", "group_norm", "instance_norm")
"""Ops that normalize (n, c, *spatial)."""

TITLES = {
    "layer_norm": "LayerNorm",
    "rms_norm": "RMSNorm",
    "add_layer_norm": "add + LayerNorm",
    "add_rms_norm": "add + RMSNorm",
    "batch_norm": "BatchNorm",
    "batch_norm_eval": "BatchNorm eval",
    "group_norm": "GroupNorm",
    "instance_norm": "InstanceNorm",
    "relu": "ReLU",
    "silu": "SiLU",
    "gelu": "GELU",
}

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# On the machine this was written on a copy of 8 MB still comes from the last cache, at 75 GB/s, and one of
# 12 MB from memory, at 24.
LARGE = 12_000_000


@dataclass(frozen=True)
class Cell:
    """An op at one size.

    Args:
        op: one of `ROWS` and `CHANNELS`.
        shape: of the input.
        dtype: ``"float32"`` or ``"bfloat16"``.
        channels_last: whether the input's channels lie side by side in memory.
        add: whether batch_norm adds a tensor before its activation.
        activation: as in `musigma.functional`.
        backward: whether the gradients are computed too.
        threads: how many of torch's threads it runs on.
    """

    op: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    channels_last: bool = False
    add: bool = False
    activation: str | None = None
    backward: bool = False
    threads: int = 1

    @property
    def title(self) -> str:
        """`variant` for people, ``BatchNorm + add + ReLU``."""
        return " + ".join(TITLES.get(part, part) for part in self.variant.split("+"))

    @property
    def variant(self) -> str:
        """The op with what it applies to its result, ``batch_norm+add+relu``."""
        return "+".join(
            [self.op, *(["add"] if self.add else []), *([self.activation] if self.activation else [])]
        )

    @property
    def what(self) -> str:
        """Everything but the op: ``4096×1024 float32 forward+backward, 2 threads``."""
        layout = " channels_last" if self.channels_last else ""
        direction = "forward+backward" if self.backward else "forward"
        threads = f"{self.threads} thread{'' if self.threads == 1 else 's'}"
        return f"{'×'.join(map(str, self.shape))} {self.dtype}{layout} {direction}, {threads}"

    @property
    def name(self) -> str:
        """What the tables call it and `select` matches."""
        return f"{self.variant} {self.what}"

    @property
    def torch_dtype(self) -> torch.dtype:
        """The input's type."""
        return DTYPES[self.dtype]

    @property
    def nbytes(self) -> int:
        """The input's size in memory."""
        return math.prod(self.shape) * self.torch_dtype.itemsize

    @property
    def large(self) -> bool:
        """Whether memory sets the time."""
        return self.nbytes >= LARGE

    @property
    def residual(self) -> bool:
        """Whether a second tensor of the input's size comes in."""
        return self.add or self.op.startswith("add_")

    @property
    def statistics(self) -> int:
        """How many rows, groups or channels get a mean and a spread of their own."""
        if self.op in ROWS:
            return math.prod(self.shape[:-1])
        if self.op == "group_norm":
            return self.shape[0] * self.groups
        return self.shape[1] * (self.shape[0] if self.op == "instance_norm" else 1)

    @property
    def groups(self) -> int:
        """group_norm's groups: 32, as everywhere, or 8 where the channels are that few."""
        return 32 if self.shape[1] > 32 else 8

    def traffic(self, direction: str) -> float:
        """The least bytes that must be read and written, over those of the op without a second tensor.

        A copy of the input reads and writes it once, as a norm's forward does. Backward reads x and dy and
        writes dx. A residual sum reads and writes one tensor more, and its backward reads one more gradient;
        batch_norm's added tensor is read in forward; where an activation follows, backward reads it too and
        writes its gradient.
        """
        if self.op.startswith("add_"):
            return 4 / 2 if direction == "forward" else 4 / 3
        if self.add:
            return 3 / 2 if direction == "forward" else (5 / 3 if self.activation else 1.0)
        return 1.0

    def to_dict(self) -> dict[str, Any]:
        """Its fields, for JSON."""
        return vars(self) | {"shape": list(self.shape)}

    @classmethod
    def from_dict(cls, told: dict[str, Any]) -> Cell:
        """The cell `to_dict` wrote."""
        return cls(**(told | {"shape": tuple(told["shape"])}))
