"""What reaches the first layers that have weights: the data after the model's own preparation."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from musigma.doctor.probes import _calls
from musigma.graph import Input, Node
from musigma.statistics import Moments, moments

__all__ = ["NORM_OPS", "WEIGHT_OPS", "EntryMeasure", "EntryProbe"]

# Ops that multiply what comes in by a weight, with the axis their input features lie on.
WEIGHT_OPS = {
    "linear": -1,
    "bilinear": -1,
    "conv1d": 1,
    "conv2d": 1,
    "conv3d": 1,
    "conv_transpose1d": 1,
    "conv_transpose2d": 1,
    "conv_transpose3d": 1,
    "lstm": -1,
    "gru": -1,
    "rnn_tanh": -1,
    "rnn_relu": -1,
    "multi_head_attention_forward": -1,
}
NORM_OPS = ("batch_norm", "instance_norm", "layer_norm", "group_norm", "rms_norm")
# Beyond this the eigenvalues cost more than the forward they explain.
_GRAM_LIMIT = 1024


@dataclass(frozen=True)
class EntryMeasure:
    """The tensor that a first weight layer received.

    Args:
        node: the weight layer's node.
        inputs: names of the model's inputs it comes from.
        features: (features,) moments over examples and positions.
        axis: the axis of `shape` that the features lie on.
        low: smallest value.
        high: largest value.
        integral: whether every value is a whole number.
        shape: of the tensor.
        examples: length of the model's batch axis.
        normalized: whether a normalization layer stands between the input and here.
        condition: condition number of E[(1, x)(1, x)ᵀ], the Hessian of least squares with a bias on these
            features; None where there are too few examples or too many features to know it.
        condition_standardized: the same after every feature got mean 0 and std 1.
    """

    node: Node
    inputs: tuple[str, ...]
    features: Moments
    axis: int
    low: float
    high: float
    integral: bool
    shape: tuple[int, ...]
    examples: int
    normalized: bool
    condition: float | None
    condition_standardized: float | None


@dataclass(frozen=True)
class _Ancestry:
    inputs: tuple[str, ...]
    weighted: bool
    normalized: bool


class EntryProbe:
    """Collects what reaches the weight layers that no other weight layer precedes."""

    def __init__(self, batch: int | None) -> None:
        self._batch = batch or 1
        self._ancestry: dict[int, _Ancestry] = {}
        self._found: list[EntryMeasure] = []

    def see(self, node: Node, args: Any, kwargs: Any) -> None:
        """Note one call; called with the live tensors."""
        above = self._above(node)
        received = _first_floating(args, kwargs)
        axis = WEIGHT_OPS.get(node.op)
        if axis is not None and received is not None and above.inputs and not above.weighted:
            with torch.no_grad(), torch._C.DisableTorchFunction():
                self._found.append(_measure(node, received.detach(), axis, above, self._batch))
        norm = node.op in NORM_OPS
        weighted = above.weighted or (bool(node.parameters) and not norm)
        self._ancestry[node.index] = _Ancestry(above.inputs, weighted, above.normalized or norm)

    def done(self) -> tuple[EntryMeasure, ...]:
        """Every entry, in execution order."""
        return tuple(self._found)

    def _above(self, node: Node) -> _Ancestry:
        names: dict[str, None] = {}
        weighted = normalized = False
        for source in node.inputs:
            if isinstance(source, Input):
                names[source.name] = None
            elif isinstance(source, int) and source in self._ancestry:
                above = self._ancestry[source]
                names.update(dict.fromkeys(above.inputs))
                weighted, normalized = weighted or above.weighted, normalized or above.normalized
        return _Ancestry(tuple(names), weighted, normalized)


def _first_floating(args: Any, kwargs: Any) -> Tensor | None:
    return next((t for t in _calls.tensors_in((args, kwargs)) if t.is_floating_point() and t.numel()), None)


def _measure(node: Node, x: Tensor, axis: int, above: _Ancestry, examples: int) -> EntryMeasure:
    # A conv also takes one example without a batch axis; then its channels come first.
    at = axis % x.ndim if axis < 0 or node.op == "linear" else x.ndim - int(node.op[-2]) - 1
    features = moments(x, [d for d in range(x.ndim) if d != at])
    rows = x.movedim(at, -1).reshape(-1, x.shape[at]).double()
    finite = bool(torch.isfinite(x).all())
    return EntryMeasure(
        node=node,
        inputs=above.inputs,
        features=features,
        axis=at,
        low=float(x.min()),
        high=float(x.max()),
        integral=finite and bool((x == x.round()).all()),
        shape=tuple(x.shape),
        examples=examples,
        normalized=above.normalized,
        condition=_condition(rows, features, standardize=False) if finite else None,
        condition_standardized=_condition(rows, features, standardize=True) if finite else None,
    )


def _condition(rows: Tensor, features: Moments, *, standardize: bool) -> float | None:
    """Condition number of the second-moment matrix of (1, x) over the features that vary."""
    varies = features.m2 > 0
    count = int(varies.sum())
    # Fewer examples than twice the unknowns say more about the sample than about the data.
    if not count or count > _GRAM_LIMIT or rows.shape[0] < 2 * (count + 1):
        return None
    x = rows[:, varies]
    if standardize:
        x = (x - features.mean[varies]) / features.std()[varies]
    x = torch.cat([torch.ones_like(x[:, :1]), x], dim=1)
    values = torch.linalg.eigvalsh(x.T @ x / rows.shape[0])
    # Eigenvalues below the rounding of the matrix itself are not known.
    floor = float(values[-1]) * torch.finfo(torch.float64).eps * len(values)
    return float(values[-1] / values[0].clamp_min(floor))
