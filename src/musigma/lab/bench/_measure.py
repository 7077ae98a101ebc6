"""Measures one cell in this process: times side by side, and what autograd keeps."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor

from musigma._errors import MusigmaWarning
from musigma.lab.bench._calls import Inputs, Outputs, function, inputs, runner
from musigma.lab.bench._cell import Cell
from musigma.lab.bench._row import Saved, Times
from musigma.lab.bench._timing import How, interleave, threads


def times(cell: Cell, how: How, *, compiled: bool = False) -> Times:
    """Time a copy of the input, torch and musigma side by side.

    Args:
        cell: what to run.
        how: for how long and by which clock.
        compiled: whether torch.compile is timed too.

    Returns:
        spreads named as in `Measured`.
    """
    given = inputs(cell, how.seed)
    x = given.x.detach()
    # Filled: a page that was never written is not there yet
    out = torch.zeros_like(x)
    ours = function(cell, "ours").call
    runs: dict[str, Callable[[], object]] = {"copy": lambda: out.copy_(x)}
    # Around all of it: switching costs as much as a third of the smallest call
    with threads(cell.threads), torch.set_grad_enabled(cell.backward):
        runs["eager"] = runner(function(cell, "torch").call, given, backward=cell.backward)
        if compiled and (run := _compiled(cell, given)) is not None:
            runs["compiled"] = run
        runs["ours"] = runner(ours, given, backward=cell.backward)
        if cell.backward and cell.large:
            runs["backward"] = _backward_alone(ours, given)
        return interleave(runs, how)


def _compiled(cell: Cell, given: Inputs) -> Callable[[], Outputs] | None:
    """torch's function, compiled; None, and a warning, where it can't be: without a C++ compiler, say."""
    # Otherwise the ninth cell of an op would run uncompiled: all of them share a code object
    torch._dynamo.reset()
    try:
        call = torch.compile(function(cell, "torch").call, fullgraph=True, dynamic=False)
        run = runner(call, given, backward=cell.backward)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run()
    except Exception as error:
        said, _, _ = str(error).partition("\n")
        warnings.warn(f"torch.compile fails on {cell.name}: {said}", MusigmaWarning, stacklevel=2)
        return None
    return run


def _backward_alone(call: Callable[..., Outputs], given: Inputs) -> Callable[[], object]:
    outputs = call(*given.leaves)
    return lambda: torch.autograd.grad(outputs, given.leaves, given.gradients, retain_graph=True)


def saved(cell: Cell, *, seed: int = 0) -> Saved:
    """Count what autograd keeps between forward and backward."""
    given = inputs(cell, seed)
    inputs_alone = 2 if cell.residual else 1
    ours, torchs = (
        kept(partial(f.call, *given.leaves), given.leaves[inputs_alone:])
        for f in (function(cell, "ours"), function(cell, "torch"))
    )
    return Saved(ours, torchs, cell.nbytes * inputs_alone)


def kept(call: Callable[[], object], parameters: Iterable[Tensor]) -> int:
    """Bytes of every storage that the graph of a call holds, each once, except the parameters'."""
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = call()
    for parameter in parameters:
        storages.pop(parameter.untyped_storage().data_ptr(), None)
    del outputs
    return sum(storages.values())
