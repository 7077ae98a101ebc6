"""Random cases of everything that normalizes, against extended precision, to the accuracy that is promised.

Forward: the largest error of a set is at most 4 units in the last place of its largest value. Input gradient:
the same against rstd · max|dy · weight|. Weight and bias gradients: against max(√rows · rms of their terms,
|result|).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

import musigma as ms
from exact import ACTIVATIONS, EXTENDED, Norm, Sets, units_off
from native import RUN

pytestmark = pytest.mark.skipif(not RUN, reason="the promise is that of the native kernels")

f = ms.functional
DTYPES = (torch.float32, torch.bfloat16, torch.float16, *([torch.float64] if EXTENDED else []))
OPS = ("layer", "rms", "add_layer", "add_rms", "group", "instance", "batch", "batch_eval")


def shifted(x: Tensor, by: int) -> Tensor:
    return torch.empty(x.numel() + by, dtype=x.dtype)[by:].view(x.shape).copy_(x)


def gapped(x: Tensor, dim: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] += 3
    return torch.empty(shape, dtype=x.dtype).narrow(dim, 1, x.shape[dim]).copy_(x)


def last(x: Tensor) -> Tensor:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.contiguous(memory_format=formats[x.dim()]) if x.dim() in formats else x


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "channels_last": last,
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "inner_transposed": lambda x: x.mT.contiguous().mT,
    "rows_apart": lambda x: gapped(x, 0) if x.dim() < 2 else gapped(x, 1),
    "columns_apart": lambda x: gapped(x, -1),
    "every_other": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "misaligned": lambda x: shifted(x, 1),
    "misaligned_channels_last": lambda x: last(x) if x.dim() < 4 else misaligned_last(x),
}


def misaligned_last(x: Tensor) -> Tensor:
    order = [0, *range(2, x.dim()), 1]
    back = [0, x.dim() - 1, *range(1, x.dim() - 1)]
    return shifted(x.permute(order), 3).permute(back)


@dataclass(frozen=True)
class Case:
    """A call of one op, and how its input is made."""

    op: str
    shape: tuple[int, ...]
    groups: int
    dtype: torch.dtype
    layout: str
    ratio: float
    exponent: int
    parameters: str  # "none", "weight", "bias", "both"
    wide: bool  # float32 parameters for half-precision input
    eps: float  # in units of the spread's square, or as it is where it is 1e-5
    activation: str | None
    seed: int

    @property
    def center(self) -> bool:
        return "rms" not in self.op

    @property
    def sets(self) -> Sets:
        if self.op.startswith("batch"):
            return Sets.channels(self.shape)
        if self.op in ("group", "instance"):
            return Sets.groups(self.shape, self.groups if self.op == "group" else self.shape[1])
        return Sets.rows(self.shape, 1)

    @property
    def scale(self) -> float:
        return 10.0**self.exponent

    @property
    def units(self) -> float:
        """What is promised: 4, and as much as a smooth activation's own value and slope may be off."""
        own = 0.0 if self.activation in (None, "relu") else 4.0 if self.dtype == torch.float64 else 2.0
        return 4.0 + own

    def running(self) -> tuple[Tensor, Tensor]:
        """A mean and a variance that fit x, in float32 as buffers are."""
        mean, spread = (self.draw(self.shape[1], of=torch.float64, more=k) for k in (5, 6))
        return ((mean + self.ratio) * self.scale).float(), ((0.5 + spread.abs()) * self.scale**2).float()

    def draw(self, *shape: int, of: torch.dtype | None = None, more: int = 0) -> Tensor:
        g = torch.Generator().manual_seed(self.seed + more)
        return torch.randn(shape, generator=g, dtype=torch.float64).to(of or self.dtype)

    def weights(self) -> tuple[Tensor | None, Tensor | None]:
        dtype = torch.float32 if self.wide and self.dtype != torch.float64 else self.dtype
        size = math.prod(self.sets.parameter)
        weight, bias = self.draw(size, of=dtype, more=1), self.draw(size, of=dtype, more=2)
        return (
            weight if self.parameters in ("weight", "both") else None,
            bias if self.parameters in ("bias", "both") and self.center else None,
        )


@st.composite
def cases(draw: st.DrawFn, op: str) -> Case:
    dtype = draw(st.sampled_from(DTYPES))
    # As far as the input itself still has a spread.
    reach = min(6, int(-np.log10(torch.finfo(dtype).eps * 2)))
    ratio = draw(st.sampled_from([0.0, *(10.0**k for k in range(reach + 1))]))
    low, high = (-2, 3 - int(np.log10(max(ratio, 1)))) if dtype == torch.float16 else (-30, 30)
    if op == "batch_eval":
        low, high = max(low, -18), min(high, 18)  # what a float32 variance can hold
    sizes = st.sampled_from([1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 100, 129, 257])
    dims = draw(st.integers(2, 5))
    if dims == 2:
        shape = [draw(sizes), draw(sizes)]
    else:
        shape = [draw(st.integers(1, 5)), draw(st.sampled_from([1, 2, 3, 4, 6, 8, 17, 32, 33])), draw(sizes)]
        shape += [draw(st.integers(1, 7)) for _ in range(dims - 3)]
    divisors = [g for g in range(1, shape[1] + 1) if shape[1] % g == 0]
    return Case(
        op=op,
        shape=tuple(shape),
        groups=draw(st.sampled_from(divisors)),
        dtype=dtype,
        layout=draw(st.sampled_from(list(LAYOUTS))),
        ratio=ratio,
        exponent=draw(st.integers(low, max(low, high))),
        parameters=draw(st.sampled_from(["none", "weight", "bias", "both"])),
        wide=draw(st.booleans()),
        eps=draw(st.sampled_from([1e-5, 1e-3, 1e-12])),
        activation=draw(st.sampled_from(list(ACTIVATIONS))),
        seed=draw(st.integers(0, 2**20)),
    )


def call(case: Case, x: Tensor, more: Tensor, w: Tensor | None, b: Tensor | None, eps: float) -> Tensor:
    """The op on x; `more` is the residual of the ops that take one."""
    a, width = case.activation, case.shape[-1:]
    calls: dict[str, Callable[[], Tensor]] = {
        "layer": lambda: f.layer_norm(x, width, w, b, eps, activation=a),
        "rms": lambda: f.rms_norm(x, width, w, eps, activation=a),
        "add_layer": lambda: f.add_layer_norm(x, more, width, w, b, eps, activation=a)[0],
        "add_rms": lambda: f.add_rms_norm(x, more, width, w, eps, activation=a)[0],
        "group": lambda: f.group_norm(x, case.groups, w, b, eps, activation=a),
        "instance": lambda: f.instance_norm(x, weight=w, bias=b, eps=eps, activation=a),
        "batch": lambda: f.batch_norm(x, None, None, w, b, True, eps=eps, activation=a),
        "batch_eval": lambda: f.batch_norm(x, *case.running(), w, b, eps=eps, activation=a),
    }
    return calls[case.op]()


def measure(case: Case) -> dict[str, float]:
    """How far y and every gradient are off, in units in the last place; {} where there is no spread."""
    x = LAYOUTS[case.layout]((case.draw(*case.shape) + case.ratio) * case.scale)
    assert x.shape == case.shape
    more = torch.zeros(1)
    if case.op.startswith("add"):
        more = LAYOUTS[case.layout](case.draw(*case.shape, more=3) * case.scale)
    statistics = case.running() if case.op == "batch_eval" else None
    weight, bias = case.weights()
    eps = case.eps if case.eps == 1e-5 else case.eps * case.scale**2
    total = x + more if case.op.startswith("add") else x
    norm = Norm.of(
        total,
        case.sets,
        weight,
        bias,
        eps,
        center=case.center,
        statistics=statistics,
        activation=case.activation,
    )
    width = norm.before.size // max(1, norm.rstd.size)
    constant = statistics is None and (width == 1 or not np.abs(norm.normalized).max(case.sets.over).all())
    if constant or not total.isfinite().all():
        return {}
    dy = case.draw(*case.shape, more=4)
    # Where relu bends, a rounding decides.
    edge = np.abs(norm.before) < 16 * torch.finfo(case.dtype).eps * norm.largest
    dy[torch.from_numpy(edge.reshape(case.shape))] = 0.0
    leaves = {"dx": x, "dweight": weight, "dbias": bias}
    leaves = {name: t.detach().requires_grad_() for name, t in leaves.items() if t is not None}
    y = call(case, leaves["dx"], more, leaves.get("dweight"), leaves.get("dbias"), eps)
    assert y.dtype == case.dtype
    wanted = norm.backward(dy, center=case.center)
    grads = torch.autograd.grad(y, list(leaves.values()), LAYOUTS[case.layout](dy))
    off = {"y": units_off(y, norm.y, norm.largest)}
    for (name, leaf), got in zip(leaves.items(), grads, strict=True):
        assert got.dtype == leaf.dtype
        assert got.shape == leaf.shape
        want, scale = wanted[name]
        if np.abs(want).max() < torch.finfo(got.dtype).max / 2:
            off[name] = units_off(got, want, scale)
    return off


@pytest.mark.parametrize("op", OPS)
@hypothesis.given(data=st.data())
# The same cases in every run: a sum of random terms has no bound but its worst case, only a likely one.
@hypothesis.settings(max_examples=60, derandomize=True)
def test_within_four_units_in_the_last_place(op: str, data: st.DataObject) -> None:
    case = data.draw(cases(op))
    off = measure(case)
    assert all(units <= case.units for units in off.values()), (off, case)


SIZES = (1, 7, 8, 63, 64, 100, 1023, 1024, 1025)
PARAMETERS = ("none", "weight", "bias", "both")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("op", OPS)
def test_every_size(op: str, size: int) -> None:
    """As the row, the batch, the channels and the positions; layouts and options take turns."""
    shapes = ((5, size), (size + 2, 3), (3, 6, size), (2, size, 2, 3))
    layouts, activations = list(LAYOUTS), list(ACTIVATIONS)
    for turn, (shape, dtype) in enumerate(itertools.product(shapes, DTYPES), size):
        for layout in ("misaligned", layouts[turn % len(layouts)]):
            case = Case(
                op=op,
                shape=shape,
                groups=1 if shape[1] % 3 else 3,
                dtype=dtype,
                layout=layout,
                ratio=2.0,
                exponent=0,
                parameters=PARAMETERS[turn % 4],
                wide=turn % 3 == 0,
                eps=1e-5,
                activation=activations[turn % 5],
                seed=turn,
            )
            off = measure(case)
            assert all(units <= case.units for units in off.values()), (off, case)
