"""What `examine` refuses, before anything runs: the invariant, the values received, the likely fix."""

from collections.abc import Mapping, Sequence
from typing import Any, get_args

import torch
from torch import Tensor, nn

from musigma.doctor._case import Intent
from musigma.doctor.probes import _calls

__all__ = ["validate"]


def validate(
    model: Any,
    inputs: Any,
    targets: Any = None,
    *,
    loss: Any = None,
    optimizer: Any = None,
    mask: Any = None,
    intent: Any = None,
) -> None:
    """Check the arguments of `musigma.doctor.examine`.

    Raises:
        TypeError: an argument is of a kind that can't be examined.
        ValueError: it is, but its values or its shape can't.
    """
    if not isinstance(model, nn.Module):
        hint = "; call it: Net()" if isinstance(model, type) else ""
        raise TypeError(f"model must be a torch.nn.Module; got {_kind(model)}{hint}")
    _validate_inputs(inputs)
    _validate_targets(inputs, targets)
    _validate_loss(loss)
    if optimizer is not None and not _steps(optimizer):
        raise TypeError(f"optimizer must be an optimizer or a factory of one; got {_kind(optimizer)}")
    _validate_mask(inputs, mask)
    if intent is not None and intent not in get_args(Intent):
        raise ValueError(f"intent must be one of {get_args(Intent)} or None; got {intent!r}")


def _validate_inputs(inputs: Any) -> None:
    if not isinstance(inputs, Tensor | tuple | Mapping):
        hint = "; make it a tuple of arguments" if isinstance(inputs, list) else ""
        hint = "; use torch.as_tensor" if type(inputs).__module__.startswith(("numpy", "pandas")) else hint
        raise TypeError(
            f"inputs must be a tensor, a tuple of arguments or a mapping; got {_kind(inputs)}{hint}"
        )
    tensors = _calls.tensors_in(inputs)
    if not tensors:
        raise ValueError("inputs must hold at least one tensor; got none")
    empty = [tuple(t.shape) for t in tensors if not t.numel()]
    if len(empty) == len(tensors):
        raise ValueError(f"inputs must hold at least one example; got shapes {empty}")


def _validate_targets(inputs: Any, targets: Any) -> None:
    if not (isinstance(inputs, Tensor) and isinstance(targets, Tensor)) or not (inputs.ndim and targets.ndim):
        return
    # A sequence model's targets may come flattened, batch · positions; its batch may be the second axis.
    count = len(targets)
    if not count or (count % len(inputs) and count not in inputs.shape[1:2]):
        raise ValueError(
            f"targets must hold one entry per example (or a multiple, where they are flattened); got "
            f"{count}, shape {tuple(targets.shape)}, for inputs of shape {tuple(inputs.shape)}: take "
            "both from one batch, or pass (targets,) where their first axis isn't the batch"
        )


def _validate_loss(loss: Any) -> None:
    if loss is None or (callable(loss) and not isinstance(loss, type)):
        return
    hint = "call it: torch.nn.MSELoss()" if isinstance(loss, type) else "such as torch.nn.MSELoss()"
    raise TypeError(f"loss must be callable as loss(output, targets); got {_kind(loss)}; {hint}")


def _validate_mask(inputs: Any, mask: Any) -> None:
    if mask is None:
        return
    if not isinstance(mask, Tensor):
        raise TypeError(f"mask must be a tensor, True where a position is real; got {_kind(mask)}")
    if mask.is_complex():
        raise TypeError(f"mask must be boolean or real weights; got {mask.dtype}")
    bad = ~((mask >= 0) & torch.isfinite(mask)) if mask.dtype is not torch.bool else torch.zeros_like(mask)
    if bad.any():
        raise ValueError(
            "mask must be boolean, True where a position is real, or finite weights that aren't negative; "
            f"got {mask[bad][0].item()} among {mask.dtype}: for a mask of −inf write mask == 0"
        )
    shapes = [tuple(t.shape) for t in _calls.tensors_in(inputs) if t.ndim]
    batch = _calls.batch_size(inputs)
    if not any(_fits(tuple(mask.shape), shape) for shape in shapes if shape[0] == batch):
        raise ValueError(
            f"mask must be broadcastable to (batch, positions); got shape {tuple(mask.shape)} for inputs of "
            f"shape {', '.join(map(str, shapes))}: for one entry per example write mask[:, None]"
        )
    if not mask.any():
        raise ValueError(
            f"mask must leave some position in; got {tuple(mask.shape)} all {mask.flatten()[:1].tolist()}: "
            "True stands for a real position, so turn it round: ~mask"
        )


def _fits(mask: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether a mask broadcasts to the batch and its positions, which stand before the channels or behind."""
    if len(shape) == 1:
        return tuple(mask) in ((shape[0],), (shape[0], 1), (1,))
    rows, *positions = mask if len(mask) > 1 else (1, *(mask or (1,)))
    placed = [shape[first : first + len(positions)] for first in (1, 2)]
    return rows in (1, shape[0]) and any(
        len(place) == len(positions) and all(m in (1, p) for m, p in zip(positions, place, strict=True))
        for place in placed
    )


def _steps(optimizer: Any) -> bool:
    # A bare class is refused: torch's own can't be called without a learning rate being thought of.
    return not isinstance(optimizer, type) and (callable(optimizer) or hasattr(optimizer, "step"))


def _kind(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
