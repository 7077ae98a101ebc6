"""Count, mean and sum of squared deviations (M2) over any dims, with or without a mask."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from musigma.ops._define import ErrorSample, Op, Sample, define
from musigma.ops._numerics import accumulator, empty_like, first, like, none


def check(x: Tensor, dims: Sequence[int], mask: Tensor | None) -> None:
    """x is real; the dims exist once each; the mask broadcasts to x."""
    if x.is_complex():
        raise TypeError(f"moments are of real numbers, got {x.dtype}; take them of x.real and x.imag")
    out_of_range = [d for d in dims if not -x.dim() <= d < x.dim()]
    if out_of_range:
        raise IndexError(f"dims {out_of_range} are out of range for x with {x.dim()} dims")
    if len({d % x.dim() for d in dims}) != len(dims):
        raise ValueError(f"each dim may stand once, got {list(dims)} for x with {x.dim()} dims")
    if mask is None:
        return
    fits = mask.dim() <= x.dim() and all(
        m in (1, s) for m, s in zip(reversed(mask.shape), reversed(x.shape), strict=False)
    )
    if not fits:
        raise ValueError(f"the mask must broadcast to x: {tuple(mask.shape)} against {tuple(x.shape)}")


def _kept(x: Tensor, dims: Sequence[int]) -> list[int]:
    gone = {d % x.dim() for d in dims}
    return [d for d in range(x.dim()) if d not in gone]


def _rows(x: Tensor, dims: Sequence[int]) -> Tensor:
    """x with the dims to reduce flattened into the last: (*kept, n)."""
    kept = _kept(x, dims)
    gone = [d for d in range(x.dim()) if d not in kept]
    shape = [x.shape[d] for d in kept]
    return x.permute([*kept, *gone]).reshape(*shape, math.prod([x.shape[d] for d in gone]))


def reference(x: Tensor, dims: Sequence[int], mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """count = Σ w,  mean = Σ w·x / count,  M2 = Σ w·(x − mean)², with w the mask (1 without one).

    Two passes around a value of the set (Chan, Golub & LeVeque 1983). What the mask drops is never read into
    a sum, so NaN there does no harm. An empty set has count, mean and M2 zero, the identity of merging.
    """
    dtype = accumulator(x)
    rows = _rows(x, dims).to(dtype)
    if mask is None:
        count = torch.full((), rows.shape[-1], dtype=dtype, device=x.device)
        if rows.shape[-1] == 0:
            zero = rows.sum(-1)
            return count, zero, zero.clone()
        pivot = first(rows)
        offset = (rows - pivot).mean(-1, keepdim=True)
        m2 = (rows - pivot - offset).square().sum(-1)
        return count, (pivot + offset).squeeze(-1), m2
    weights = _rows(mask.expand(x.shape), dims).to(dtype)
    keep = weights != 0
    # The first kept value of each row; of an empty set whatever stands first, since nothing of it is used.
    pivot = first(rows)
    if rows.shape[-1]:
        pivot = rows.gather(-1, keep.to(torch.uint8).argmax(-1, keepdim=True)).detach()
    shifted = torch.where(keep, rows - pivot, 0.0)
    count = weights.sum(-1)
    full = count != 0
    offset = (weights * shifted).sum(-1) / torch.where(full, count, 1.0)
    m2 = (weights * torch.where(keep, shifted - offset.unsqueeze(-1), 0.0).square()).sum(-1)
    mean = torch.where(full, pivot.squeeze(-1) + offset, 0.0)
    return count, mean, m2


def backward(
    dmean: Tensor | None,
    dm2: Tensor | None,
    x: Tensor,
    dims: Sequence[int],
    mask: Tensor | None,
    count: Tensor,
    mean: Tensor,
    needs: Sequence[bool],
) -> Tensor:
    """∂mean/∂xᵢ = wᵢ / count and ∂M2/∂xᵢ = 2·wᵢ·(xᵢ − mean): the notes' paths through μ and σ².

    (M2's own dependence on the mean falls away, since Σ w·(x − mean) = 0.)
    """
    if not needs[0]:
        return none(x)
    kept = _kept(x, dims)
    shape = [x.shape[d] if d in kept else 1 for d in range(x.dim())]
    values = x.to(count.dtype)
    if mask is not None:
        # what the mask drops may be NaN; its gradient is zero all the same
        values = torch.where(mask != 0, values, mean.detach().reshape(shape))
    total = torch.zeros_like(values)
    if dmean is not None:
        counts = count.reshape(shape) if mask is not None else count
        total = total + dmean.reshape(shape) / torch.where(counts != 0, counts, 1.0)
    if dm2 is not None:
        # formed from x again, so that second derivatives see it
        center = reference(values, dims, mask)[1] if torch.is_grad_enabled() else mean
        total = total + 2.0 * dm2.reshape(shape) * (values - center.reshape(shape))
    if mask is not None:
        total = total * mask
    return like(total, x)


def fake(x: Tensor, dims: Sequence[int], mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    check(x, dims, mask)
    dtype = accumulator(x)
    shape = [x.shape[d] for d in _kept(x, dims)]
    count = x.new_empty(shape if mask is not None else (), dtype=dtype)
    return count, x.new_empty(shape, dtype=dtype), x.new_empty(shape, dtype=dtype)


def backward_fake(
    dmean: Tensor | None,
    dm2: Tensor | None,
    x: Tensor,
    dims: Sequence[int],
    mask: Tensor | None,
    count: Tensor,
    mean: Tensor,
    needs: Sequence[bool],
) -> Tensor:
    return empty_like(x) if needs[0] else none(x)


def backward_args(
    grads: Sequence[Tensor | None], inputs: Sequence[Any], outputs: dict[int, Tensor], needs: list[bool]
) -> tuple[Any, ...]:
    x, dims, mask = inputs
    return grads[1], grads[2], x, dims, mask, outputs[0], outputs[1], needs


def samples(device: str = "cpu", dtype: torch.dtype = torch.float64) -> Iterator[Sample]:
    """All, some and no dims; boolean masks and weights; empty sets; NaN where the mask drops."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int, mean: float = 0.0) -> Tensor:
        return (torch.randn(shape, generator=generator, device=device) + mean).to(dtype)

    for shape, dims in (
        ((5,), [0]),
        ((4, 3), [0]),
        ((4, 3), [0, 1]),
        ((2, 3, 4, 5), [0, 2, 3]),
        ((0, 3), [0]),
    ):
        yield Sample((draw(*shape, mean=3.0), dims, None), f"{shape}-{dims}")
    x = draw(4, 3, 5, mean=3.0)
    keep = torch.rand(4, 1, 5, generator=generator, device=device) > 0.4
    yield Sample((x, [0, 2], keep), "boolean mask")
    yield Sample((x, [-1, 0], keep * 1.5), "weights")
    yield Sample((x, [0, 2], torch.zeros(1, dtype=torch.bool, device=device)), "nothing kept")
    yield Sample((x.transpose(0, 2), [0, 2], None), "transposed")


def error_samples() -> Iterator[ErrorSample]:
    x = torch.ones(2, 3)
    yield ErrorSample((x.to(torch.complex64), [0], None), TypeError, "real", "complex")
    yield ErrorSample((x, [2], None), IndexError, r"dims \[2\] are out of range", "dim out of range")
    yield ErrorSample((x, [0, -2], None), ValueError, "each dim may stand once", "dim twice")
    yield ErrorSample((x, [0], torch.ones(4, dtype=torch.bool)), ValueError, "broadcast", "mask shape")


moments = define(
    Op(
        name="moments",
        schema="(Tensor x, int[] dims, Tensor? mask) -> (Tensor count, Tensor mean, Tensor m2)",
        backward_schema="(Tensor? dmean, Tensor? dm2, Tensor x, int[] dims, Tensor? mask, Tensor count,"
        " Tensor mean, bool[] needs) -> Tensor",
        check=check,
        reference=reference,
        backward=backward,
        fake=fake,
        backward_fake=backward_fake,
        differentiable=(0,),
        differentiable_outputs=(1, 2),
        saved_outputs=(0, 1),
        backward_args=backward_args,
        samples=samples,
        error_samples=error_samples,
    )
)
"""(x, dims, mask) -> (count, mean, m2) over `dims`; count is 0-dim without a mask."""
