"""What a factory hands to the doctor: a model and the data it is meant for."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

__all__ = ["Case", "Inputs", "Intent", "Loss", "OptimizerLike", "SchedulerLike"]

Inputs = Tensor | tuple[Any, ...] | Mapping[str, Any]
Intent = Literal["train", "inference", "finetune"]
Loss = Callable[..., Any]
# A scheduler is duck-typed by torch itself (anything with `step`), so it stays `Any`.
OptimizerLike = torch.optim.Optimizer | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
SchedulerLike = Any


@dataclass(frozen=True)
class Case:
    """A model with everything the doctor may ask about it; only `model` and `inputs` are required.

    What only the caller knows is asked for and never guessed: a rule that needs a field that is `None`
    stays silent.

    Args:
        model: the module to examine. It is never changed.
        inputs: one batch, as the model takes it: a tensor, a tuple of positional arguments or a mapping of
            keyword arguments. The first axis of the first tensor is the batch.
        targets: what `loss` takes as its second argument.
        loss: `loss(output, targets)`, or `loss(output)` where there are no targets; one number. Without it
            the model's own loss (`output.loss`, `output["loss"]`) is taken where there is one, and otherwise
            a fixed random projection of the outputs (see `musigma.doctor.examine`).
        optimizer: an optimizer over `model.parameters()`, or a factory `parameters -> optimizer`.
        scheduler: a learning-rate scheduler over that optimizer, or a factory `optimizer -> scheduler`.
        mask: the real positions of `inputs`, True takes part, broadcastable to (batch, positions).
        independent: True says that examples must not influence each other's outputs (contrastive losses,
            DP-SGD, reinforcement learning, inference services).
        intent: what the model is about to do: "train", "inference" or "finetune".
        loader: yields `(inputs, targets)` batches to train on; it is what `compare` needs.
        test: `(inputs, targets)` held out, or a loader of such pairs; `compare` measures accuracy on it.
        name: how reports call the case; the factory's name by default.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from musigma.doctor import Case
        >>> case = Case(nn.Linear(4, 2), torch.zeros(8, 4), name="a small one")
        >>> case.name, case.intent
        ('a small one', None)
    """

    model: nn.Module
    inputs: Inputs
    targets: Any = None
    loss: Loss | None = None
    optimizer: OptimizerLike | None = None
    scheduler: SchedulerLike | None = None
    mask: Tensor | None = None
    independent: bool = False
    intent: Intent | None = None
    loader: Iterable[Any] | None = None
    test: Any = None
    name: str | None = None
