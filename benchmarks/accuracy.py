"""How far every norm is from float64, beside torch's kernel: one Markdown table.

    python benchmarks/accuracy.py

In units in the last place of the input's type. y: the largest error over the largest value. dx: over
rstd · max|dy · weight|. dweight and dbias: over max(√rows · rms of their terms, |result|). musigma promises 4
of each.
"""

from __future__ import annotations

import platform
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import musigma as ms

Norm = Callable[[Tensor, Tensor, Tensor], Tensor]
SHAPE, GROUPS = (16, 32, 24, 24), 8
WIDTH = SHAPE[-1]

# ours, torch's, the dims of x that statistics are over (x seen in groups), and whether they are centered
NORMS: dict[str, tuple[Norm, Norm]] = {
    "LayerNorm": (
        lambda x, w, b: ms.functional.layer_norm(x, (WIDTH,), w, b),
        lambda x, w, b: F.layer_norm(x, (WIDTH,), w, b),
    ),
    "RMSNorm": (
        lambda x, w, b: ms.functional.rms_norm(x, (WIDTH,), w, 1e-5),
        lambda x, w, b: F.rms_norm(x, (WIDTH,), w, 1e-5),
    ),
    "GroupNorm": (
        lambda x, w, b: ms.functional.group_norm(x, GROUPS, w, b),
        lambda x, w, b: F.group_norm(x, GROUPS, w, b),
    ),
    "InstanceNorm": (
        lambda x, w, b: ms.functional.instance_norm(x, weight=w, bias=b),
        lambda x, w, b: F.instance_norm(x, weight=w, bias=b),
    ),
    "BatchNorm": (
        lambda x, w, b: ms.functional.batch_norm(x, None, None, w, b, training=True),
        lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
    ),
}


def normalized(name: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """x̂ and rstd by the formula; a value of each set is subtracted first: a large mean costs nothing."""
    if name == "RMSNorm":
        rstd = (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        return x * rstd, rstd
    seen = x.unflatten(1, (GROUPS, -1)) if name == "GroupNorm" else x
    over = {"LayerNorm": [3], "GroupNorm": [2, 3, 4], "InstanceNorm": [2, 3], "BatchNorm": [0, 2, 3]}[name]
    first = seen[tuple(slice(0, 1) if d in over else slice(None) for d in range(seen.dim()))]
    d = seen - first.detach()
    d = d - d.mean(over, keepdim=True)
    rstd = (d.square().mean(over, keepdim=True) + 1e-5).rsqrt()
    return (d * rstd).reshape(x.shape), rstd.expand_as(seen).reshape(x.shape)


def measure(name: str, x: Tensor) -> list[list[float]]:
    """Units that y, dx, dweight and dbias are off, of ours and of torch's."""
    rows = name in ("LayerNorm", "RMSNorm")
    along = [0, 1, 2] if rows else [0, 2, 3]
    shape = (WIDTH,) if rows else (1, SHAPE[1], 1, 1)
    weight, bias = torch.randn(2, WIDTH if rows else SHAPE[1]).to(x.dtype)
    dy = torch.randn(SHAPE).to(x.dtype).contiguous(memory_format=torch.preserve_format)
    exact = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    hat, rstd = normalized(name, exact[0])
    want = hat * exact[1].view(shape) + (0 if name == "RMSNorm" else exact[2].view(shape))
    wanted = torch.autograd.grad(want, exact, dy.double(), allow_unused=True)
    scales = [want.abs().max(), (rstd * (dy.double() * weight.view(shape)).abs().max()).detach()]
    for terms, result in ((dy.double() * hat.detach(), wanted[1]), (dy.double(), wanted[2])):
        total = terms.square().sum(along).sqrt()
        scales.append(total if result is None else torch.maximum(total, result.abs()))
    found = []
    for norm in NORMS[name]:
        leaves = [t.detach().requires_grad_() for t in (x, weight, bias)]
        y = norm(*leaves)
        got = [y, *torch.autograd.grad(y, leaves, dy, allow_unused=True)]
        found.append(
            [
                float("nan")
                if a is None or b is None
                else ((a.double() - b).abs() / s).max().item() / torch.finfo(x.dtype).eps
                for a, b, s in zip(got, (want, *wanted), scales, strict=True)
            ]
        )
    return found


def shown(units: float) -> str:
    if units != units:
        return "NaN"
    return f"{units:.1f}" if units < 100 else f"{units:.0e}".replace("e+0", "e").replace("e+", "e")


def main() -> None:
    torch.manual_seed(0)
    cells = [(torch.float32, scale, mean) for mean in (0, 1e2, 1e4, 1e6) for scale in (1.0,)]
    cells += [(torch.float32, 1e20, 0), (torch.bfloat16, 1.0, 0), (torch.bfloat16, 1.0, 1e2)]
    print(f"torch {torch.__version__}, {platform.machine()}, {ms.ops.kernels()[0].reason}\n")
    print("| layer, layout | input | y | torch's | dx | torch's | dweight | torch's | dbias | torch's |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name in NORMS:
        formats = {"": torch.contiguous_format, ", channels last": torch.channels_last}
        for layout, memory_format in formats.items():
            if layout and name in ("LayerNorm", "RMSNorm"):
                continue
            for dtype, scale, mean in cells:
                x = ((torch.randn(SHAPE, dtype=torch.float64) + mean) * scale).to(dtype)
                ours, theirs = measure(name, x.contiguous(memory_format=memory_format))
                pairs = [shown(v) for pair in zip(ours, theirs, strict=True) for v in pair]
                if name == "RMSNorm":
                    pairs[-2:] = ["", ""]
                what = f"{str(dtype)[6:]}, mean/std {mean:g}" + (f", scale {scale:g}" if scale != 1 else "")
                print(f"| {name}{layout} | {what} | {' | '.join(pairs)} |")


if __name__ == "__main__":
    main()
