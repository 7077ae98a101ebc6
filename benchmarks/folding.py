"""Inference of MobileNetV2 as it is, folded by torch's `fuse_conv_bn_eval`, and folded by musigma, in turns.

    python benchmarks/folding.py --rounds 15

Prints a table of medians and quartiles in milliseconds; docs/guides/surgery.md has one.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import musigma as ms
from architectures import MobileNetV2


def fused_by_torch(model: nn.Module) -> nn.Module:
    """A copy in which every convolution that a BatchNorm follows in a Sequential is fused with it."""
    twin = copy.deepcopy(model).eval()
    for module in list(twin.modules()):
        children = list(module.named_children()) if isinstance(module, nn.Sequential) else []
        for (first, conv), (second, norm) in itertools.pairwise(children):
            if isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
                setattr(module, first, fuse_conv_bn_eval(conv, norm))
                setattr(module, second, nn.Identity())
    assert not any(isinstance(m, nn.BatchNorm2d) for m in twin.modules())
    return twin


def times(models: dict[str, nn.Module], x: Tensor, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of every round, the models in turns, so that what else the machine does falls on all."""
    found: dict[str, list[float]] = {name: [] for name in models}
    with torch.inference_mode():
        for model in models.values():
            model(x)
        for _ in range(rounds):
            for name, model in models.items():
                start = time.process_time()
                model(x)
                found[name].append((time.process_time() - start) * 1e3)
    return found


def main() -> None:
    """Check that all compute the same, time them, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = MobileNetV2().eval()
    folded, certificate = ms.surgery.fold(model, torch.randn(1, 3, 64, 64))
    assert len(certificate.changed) == 52
    models = {"as it is": model, "fuse_conv_bn_eval": fused_by_torch(model), "ms.surgery.fold": folded}
    print("| input | memory format | " + " | ".join(models) + " |\n|---|---|" + "---|" * len(models))
    for batch, size in ((1, 224), (8, 224), (1, 96)):
        for layout in (torch.contiguous_format, torch.channels_last):
            x = torch.randn(batch, 3, size, size).to(memory_format=layout)
            placed = {name: copy.deepcopy(m).to(memory_format=layout) for name, m in models.items()}
            want = model(x)
            for other in placed.values():
                torch.testing.assert_close(
                    other(x), want, rtol=1e-4, atol=1e-4 * float(want.detach().abs().max())
                )
            cells = []
            for found in times(placed, x, rounds).values():
                low, mid, high = statistics.quantiles(found, n=4)
                cells.append(f"{mid:.1f} ({low:.1f}–{high:.1f})")
            words = "channels last" if layout == torch.channels_last else "contiguous"
            print(f"| {batch} × 3 × {size} × {size} | {words} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
