"""One forward and one backward, without looking inside: the loss, the gradients, the output."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from musigma.doctor.probes import _calls

__all__ = ["Pass", "differentiated", "take_pass"]


@dataclass(frozen=True)
class Pass:
    """What came out of one forward and one backward.

    Args:
        loss: the number that was differentiated; NaN where nothing could be.
        loss_source: "given", "own" (`output.loss`), "projection" or "none".
        gradients: parameter name -> gradient; None where the loss doesn't reach it or it is frozen.
        output: what the model returned, detached.
    """

    loss: float
    loss_source: str
    gradients: Mapping[str, Tensor | None] = field(repr=False)
    output: Any = field(repr=False)


def take_pass(
    model: nn.Module, inputs: Any, targets: Any, loss: Callable[..., Any] | None, *, seed: int
) -> Pass:
    """Run a model once forward and once backward; nobody's `.grad` is written.

    Args:
        model: run as it is, in its own mode; its running statistics move as in training.
        inputs: as the model takes them.
        targets: what the loss takes.
        loss: see `musigma.doctor.examine`.
        seed: what the model's own randomness (dropout) starts from; the global generators are left alone.
    """
    with torch.enable_grad(), _calls.forked_rng(model, seed):
        return differentiated(model, _calls.call(model, _calls.clone_inputs(inputs)), targets, loss)


def differentiated(model: nn.Module, output: Any, targets: Any, loss: Callable[..., Any] | None) -> Pass:
    """The loss of an output and its gradient with respect to every trainable parameter."""
    # Cloned like the inputs: what was made in inference mode can't be saved for a backward.
    value, source = _calls.loss_of(output, _calls.clone_inputs(targets), loss)
    trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
    found: dict[str, Tensor | None] = {}
    if value is not None and value.requires_grad and trainable:
        # `grad` rather than `backward`: a loss that closes over other modules must not fill their `.grad`.
        gradients = torch.autograd.grad(value, list(trainable.values()), allow_unused=True)
        # Embeddings may give theirs sparse; nobody who measures wants to know.
        dense = [g.to_dense() if g is not None and g.is_sparse else g for g in gradients]
        found = dict(zip(trainable, dense, strict=True))
    return Pass(
        loss=float("nan") if value is None else float(value.detach()),
        loss_source=source,
        gradients={n: found.get(n) for n, _ in model.named_parameters()},
        output=pytree.tree_map(lambda t: t.detach() if isinstance(t, Tensor) else t, output),
    )
