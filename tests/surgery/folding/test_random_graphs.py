"""Hundreds of random models: what is folded computes the same, and what would not is left alone."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from tests.surgery.folding.graphs import Case, image_case, token_case
from torch import nn

from musigma.graph import tensors
from musigma.surgery import fold

BLOCKS = range(10)
PER_BLOCK = 30


@pytest.mark.filterwarnings("ignore:Using padding=.same. with even kernel")
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("make", [image_case, token_case], ids=["images", "tokens"])
def test_never_wrong(make: Callable[[int], Case], block: int) -> None:
    folded = norms = 0
    for seed in range(block * PER_BLOCK, (block + 1) * PER_BLOCK):
        case = make(seed)
        count = check(case, seed)
        folded, norms = folded + count, norms + case.norms
    # The generator has to give the fold work: over all blocks it finds a place for 0.37 to 0.56 of the norms.
    assert folded >= 0.15 * norms, (folded, norms)


def check(case: Case, seed: int) -> int:
    """The number of folds; fails if the folded model computes anything else."""
    state = {k: v.clone() for k, v in case.model.state_dict().items()}
    modes = [m.training for m in case.model.modules()]
    folded, certificate = fold(case.model, case.example)
    context = f"seed {seed}: {case.words}\n{certificate}"
    assert all(torch.equal(v, state[k]) for k, v in case.model.state_dict().items()), context
    assert [m.training for m in case.model.modules()] == modes, context
    assert all(p.dtype == case.dtype for p in folded.parameters()), context
    # Apart from the certificate: other inputs, of another batch size and scale, and both in float64 where the
    # folded numbers are off by one rounding of their own type.
    shape = (case.example.shape[0] + 1, *case.example.shape[1:])
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64) * 2
    before, after = (copy.deepcopy(m).double().eval() for m in (case.model, folded))
    with torch.no_grad():
        old, new = tensors(before(x)), tensors(after(x))
        moved = tensors(shaken(before, torch.finfo(case.dtype).eps)(x))
    for a, b, c in zip(old, new, moved, strict=True):
        scale = max(1e-30, float(a.abs().max()))
        limit = 64 * max(float((a - c).abs().max()), torch.finfo(torch.float64).eps * scale * 16)
        assert float((a - b).abs().max()) <= limit, context
    if certificate.changed and not math.isnan(certificate.difference):
        assert certificate.difference <= certificate.bound, context
    if seed % 5 == 0:
        fold(case.model, case.example)[0].load_state_dict(folded.state_dict())
    return len(certificate.changed)


def shaken(model: nn.Module, eps: float) -> nn.Module:
    """The model with every number off by one rounding."""
    twin = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    for t in (*twin.parameters(), *twin.buffers()):
        if t.is_floating_point():
            sign = torch.randint(0, 2, t.shape, generator=generator) * 2.0 - 1
            t.data.mul_(1 + eps * sign)
    return twin
