"""What was measured after an initialization."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class Verification:
    """Stand-in."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {}

    def fragment(self) -> str:
        """HTML."""
        return ""
