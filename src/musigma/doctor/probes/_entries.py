"""What reaches the first layers that have weights: the data after the model's own preparation."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from musigma.doctor.probes import _calls
from musigma.graph import Input, Node, kinds
from musigma.statistics import Moments, moments

__all__ = ["ChannelFeatures", "EntryMeasure", "EntryProbe"]

# Layers that multiply what comes in by a weight; all but convolutions have their features on the last axis.
_ENTRANCES = (
    kinds.CONVOLUTIONS
    | kinds.TRANSPOSED_CONVOLUTIONS
    | kinds.RECURRENT
    | frozenset(("linear", "bilinear", "multi_head_attention"))
)

# Beyond this the eigenvalues cost more than the forward they explain.
_GRAM_LIMIT = 1024


@dataclass(frozen=True)
class ChannelFeatures:
    """An image's channels, measured where the model has made a row of its pixels.

    Args:
        features: (channels,) moments over examples and positions.
        tails: (channels,) kurtosis.
        varies: (channels,) whether a channel's values differ by more than rounding.
        examples: length of the batch axis.
    """

    features: Moments
    tails: Tensor
    varies: Tensor
    examples: int


@dataclass(frozen=True)
class EntryMeasure:
    """The tensor that a first weight layer received.

    Args:
        node: the weight layer's node.
        inputs: names of the model's inputs it comes from.
        features: (features,) moments over examples and positions.
        tails: (features,) kurtosis, E[((x − μ)/σ)⁴]: 3 for a normal feature; 1 for one that doesn't vary.
        varies: (features,) whether a feature's values differ by more than rounding.
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
        channels: where the tensor is an image (n, c, *spatial) that was flattened, its channels: the pixels
            of a channel share a unit, and one that is nearly always dark says so by its std; else None.
    """

    node: Node
    inputs: tuple[str, ...]
    features: Moments
    tails: Tensor
    varies: Tensor
    axis: int
    low: float
    high: float
    integral: bool
    shape: tuple[int, ...]
    examples: int
    normalized: bool
    condition: float | None
    condition_standardized: float | None
    channels: ChannelFeatures | None = None


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
        self._shapes: dict[tuple[str, ...], tuple[int, ...]] = {}

    def see(self, node: Node, args: Any, kwargs: Any) -> None:
        """Note one call; called with the live tensors."""
        above = self._above(node)
        received = _first_floating(args, kwargs)
        if received is not None and any(isinstance(source, Input) for source in node.inputs):
            self._shapes.setdefault(above.inputs, tuple(received.shape))
        if node.op in _ENTRANCES and received is not None and above.inputs and not above.weighted:
            with torch.no_grad():
                image = self._shapes.get(above.inputs, ())
                self._found.append(_measure(node, received.detach(), above, self._batch, image))
        norm = node.op in kinds.NORMS
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


def _measure(node: Node, x: Tensor, above: _Ancestry, examples: int, image: tuple[int, ...]) -> EntryMeasure:
    # Counted from the end: a convolution also takes one example without a batch axis.
    at = x.ndim - (int(node.op[-2]) if node.op.startswith("conv") else 0) - 1
    features, tails, varies = _each(x, at)
    rows = x.movedim(at, -1).reshape(-1, x.shape[at]).double()
    finite = bool(torch.isfinite(x).all())
    flattened = len(image) >= 4 and tuple(x.shape) == (image[0], math.prod(image[1:]))
    channels = ChannelFeatures(*_each(x.reshape(image), 1), examples) if flattened else None
    return EntryMeasure(
        node=node,
        inputs=above.inputs,
        features=features,
        tails=tails,
        varies=varies,
        axis=at,
        low=float(x.min()),
        high=float(x.max()),
        integral=finite and bool((x == x.round()).all()),
        shape=tuple(x.shape),
        examples=examples,
        normalized=above.normalized,
        condition=_condition(rows[:, varies], standardize=False) if finite else None,
        condition_standardized=_condition(rows[:, varies], standardize=True) if finite else None,
        channels=channels,
    )


def _each(x: Tensor, at: int) -> tuple[Moments, Tensor, Tensor]:
    """Moments, kurtosis, and whether it varies, of every feature along one axis."""
    features = moments(x, [d for d in range(x.ndim) if d != at])
    # Equal values that were rounded deviate from their mean by at most eps·|mean| each.
    rounding = torch.finfo(x.dtype).eps * features.mean.abs()
    varies = ~(features.m2 <= features.count * rounding.square())  # NaN varies
    rows = x.movedim(at, -1).reshape(-1, x.shape[at]).double()
    # The squares of standardized values have the mean 1, and the kurtosis less 1 for a variance.
    squares = moments(((rows - features.mean) / features.std()).square(), 0)
    return features, torch.where(varies, 1 + squares.var(), 1.0), varies


def _condition(x: Tensor, *, standardize: bool) -> float | None:
    """Condition number of the second-moment matrix of (1, x), x: (rows, features that vary)."""
    rows, count = x.shape
    # Fewer rows than twice the unknowns say more about the sample than about the data.
    if not count or count > _GRAM_LIMIT or rows < 2 * (count + 1):
        return None
    if standardize:
        each = moments(x, 0)
        x = (x - each.mean) / each.std()
    x = torch.cat([torch.ones_like(x[:, :1]), x], dim=1)
    values = torch.linalg.eigvalsh(x.T @ x / rows)
    # Directions in which nothing varies (features that repeat others) get no gradient and cost no steps.
    varied = values[values > float(values[-1]) * torch.finfo(torch.float64).eps * rows]
    return float(varied[-1] / varied[0])
