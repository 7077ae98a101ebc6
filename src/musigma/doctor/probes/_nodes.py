"""What one op put out and what came back to it, in numbers; the tensors themselves are let go."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from musigma.doctor.probes import _calls
from musigma.doctor.probes._rectifiers import rectified_argument
from musigma.doctor.probes._summary import mean_square, merged, overall
from musigma.graph import Edge, Node, Source, kinds
from musigma.statistics import Moments, moments

__all__ = ["MIXTURES", "NodeMeasure", "NodeProbe", "across_examples"]

# Ops that lay their units along axis 1 whatever follows, and those that lay them along the last axis.
_CHANNEL_FIRST = (
    kinds.CONVOLUTIONS
    | kinds.TRANSPOSED_CONVOLUTIONS
    | kinds.BATCH_NORMS
    | kinds.GROUP_NORMS
    | kinds.POOLINGS
    | frozenset(("pixel_shuffle", "pixel_unshuffle"))
)
_CHANNEL_LAST = (
    kinds.PRODUCTS
    | kinds.LAYER_NORMS
    | kinds.RMS_NORMS
    | kinds.EMBEDDINGS
    | kinds.ATTENTIONS
    | kinds.RECURRENT
)

# Enough that the share of mixtures is known to 3 %, and that a hundred layers cost less than one forward.
MIXTURES, _COLUMNS = 256, 256
# A rectifier follows what it reads within a few calls: a view, a norm, an addition.
_RECENT = 4


@dataclass
class NodeMeasure:
    """Moments of one node's first floating output, and of the gradient that came back to it.

    Args:
        node: the graph node.
        values: moments over every value; scalars.
        units: (units,) moments over examples and positions; None where the output has no unit axis.
        between: variance between examples at one position, averaged over positions: the part of the signal
            that tells examples apart; NaN where the output has no batch axis or the batch is 1.
        correlation: mean cosine between the outputs of two examples; NaN likewise.
        zeros: fraction of values that are exactly 0.
        rectifies: name of the argument that a rectifier, however it is written, hands on; None for other ops.
        dead: (units,) of a rectifier, the units that are 0 for every example at every position; else None.
        dead_by_chance: behind a rectifier, the share of units that zero-mean weights would leave off for
            every example on the same inputs; NaN where it isn't known or no unit is off.
        flat: fraction of values where the op's own derivative is below 1 % of its largest; NaN for other ops.
        nonfinite: how many values are NaN or infinite.
        nan: how many are NaN.
        inputs_nonfinite: how many values of its floating arguments are; counted where its output has any.
        inputs_nan: how many are NaN, likewise.
        gradient: moments of the gradient of this output; None where none came back.
        gradient_nonfinite: how many of the gradient's values are NaN or infinite.
    """

    node: Node
    values: Moments | None = None
    units: Moments | None = None
    between: float = float("nan")
    correlation: float = float("nan")
    zeros: float = float("nan")
    rectifies: str | None = None
    dead: Tensor | None = None
    dead_by_chance: float = float("nan")
    flat: float = float("nan")
    nonfinite: int = 0
    nan: int = 0
    inputs_nonfinite: int = 0
    inputs_nan: int = 0
    gradient: Moments | None = None
    gradient_nonfinite: int = 0
    shape: tuple[int, ...] = field(default=())

    @property
    def size(self) -> int:
        """How many values the output has."""
        return math.prod(self.shape)

    @property
    def second_moment(self) -> float:
        """E[a²], what the variance law of the next layer multiplies; NaN where nothing was measured."""
        return mean_square(self.values)

    @property
    def mean(self) -> float:
        """The mean over every value."""
        return float("nan") if self.values is None else float(self.values.mean)

    @property
    def std(self) -> float:
        """The standard deviation over every value."""
        return float("nan") if self.values is None else float(self.values.std())

    @property
    def gradient_second_moment(self) -> float:
        """E[g²] of the gradient that came back to this output."""
        return mean_square(self.gradient)


def across_examples(per: Moments) -> tuple[float, float]:
    """Variance between examples averaged over positions, and the mean cosine of two examples.

    With s = Σ_f E_b[a²] and m = Σ_f E_b[a]², the sum over all ordered pairs of examples of ⟨a, a'⟩ is
    n²·m − n·s, so their mean over the mean squared norm is (n·m − s) / ((n − 1)·s).

    Args:
        per: moments over the examples, at every position.
    """
    n = float(per.count.max()) if per.count.numel() else 0.0
    if n < 2 or not per.mean.numel():
        return float("nan"), float("nan")
    m, s = float(per.mean.square().sum()), float((per.mean.square() + per.var()).sum())
    return float(per.var().mean()), (n * m - s) / ((n - 1) * s) if s > 0 else float("nan")


def flat_fraction(op: str, y: Tensor) -> float:
    """The fraction of outputs where a squashing function's derivative is below 1 % of its largest."""
    if op == "tanh":
        return float((1 - y.square() < 0.01).double().mean())
    if op == "sigmoid":
        return float((4 * y * (1 - y) < 0.01).double().mean())
    return float("nan")


def _columns(units: Tensor) -> Tensor:
    """(units, values) thinned to a bounded number of columns, evenly: a copy."""
    step = -(-units.shape[1] // _COLUMNS)
    return units[:, ::step].float().clone()


def _bias(node: Node, args: Any, kwargs: Any) -> Tensor | None:
    """The bias of a linear layer or convolution, which comes third in all of them, or of a norm."""
    bias = kwargs.get("bias")
    if node.op == "linear" or node.op.startswith("conv"):
        bias = kwargs.get("bias", args[2] if len(args) > 2 else None)
    elif node.op not in kinds.NORMS:
        return None
    return bias.detach().float() if isinstance(bias, Tensor) else None


@dataclass(frozen=True)
class Rectified:
    """What a rectifier reads, as far as chance needs it.

    Args:
        units: (units, values) less the bias.
        bias: (units,) of the layer itself; None where there is none, and behind a norm, which starts at 0.
        dropped: (units, values) what a dropout has set to 0; None where there is none.
    """

    units: Tensor
    bias: Tensor | None = None
    dropped: Tensor | None = None

    @property
    def whole(self) -> Tensor:
        """The units with their bias."""
        return self.units if self.bias is None else self.units + self.bias[:, None]


def dead_by_chance(units: Tensor, bias: Tensor | None, dropped: Tensor | None = None) -> float:
    """How often a unit with zero-mean Gaussian weights would be off on all of the same inputs.

    Over random weights a unit's pre-activations are Gaussian with the covariance that the layer's units show
    over the batch, and so is any random mixture of those units: the share of mixtures that are negative at
    every value is the answer, however alike the examples are. Biases are drawn from the layer's own with a
    random sign, since a fair start favours none.

    Args:
        units: (units, values) what went into the rectifier, less the bias.
        bias: (units,), or None.
        dropped: (units, values) where a dropout has made them 0, which counts as off; or None.
    """
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randn(MIXTURES, units.shape[0], generator=generator).to(units.device) @ units
    # The mixture of n units has n times the variance of one.
    mixed = mixed / units.shape[0] ** 0.5
    if bias is not None:
        drawn = bias.abs()[torch.randint(len(bias), (MIXTURES,), generator=generator).to(bias.device)]
        sign = torch.randint(2, (MIXTURES,), generator=generator).to(bias) * 2 - 1
        mixed = mixed + (sign * drawn)[:, None]
    off = mixed < 0
    if dropped is not None:
        off |= dropped[torch.randint(len(dropped), (MIXTURES,), generator=generator).to(dropped.device)]
    return float(off.all(1).double().mean())


class NodeProbe:
    """Collects a `NodeMeasure` per node while the model runs; gradients arrive later, through hooks."""

    def __init__(self, batch: int | None) -> None:
        self._batch = batch
        self._measures: list[NodeMeasure] = []
        self._axes: list[int | None] = []
        self._recent: dict[int, Rectified] = {}

    def see(self, node: Node, args: Any, kwargs: Any, output: Any) -> None:
        """Measure one call; called with the live tensors."""
        outputs = _calls.floating_outputs(output)
        measure = NodeMeasure(node)
        self._measures.append(measure)
        self._axes.append(self._unit_axis(node, outputs[0]) if outputs else None)
        if not outputs:
            return
        if outputs[0].requires_grad:
            outputs[0].register_hook(lambda g: _measure_gradient(measure, g))
        with torch.no_grad():
            self._measure_output(measure, outputs[0].detach(), self._axes[-1])
            _measure_nonfinite(measure, outputs, (args, kwargs))
            measure.rectifies = rectified_argument(node, args, kwargs, [m.node for m in self._measures])
            if measure.rectifies is not None:
                self._compare_with_chance(measure, outputs[0].detach(), self._axes[-1])
            self._remember(node, outputs[0].detach(), self._axes[-1], args, kwargs)

    def of(self, sources: Sequence[Source]) -> NodeMeasure | None:
        """The measurement of what an argument came from, where that is the first output of one node."""
        source = sources[0] if len(sources) == 1 else None
        return self._measures[source] if isinstance(source, Edge) and source.output == 0 else None

    @property
    def last(self) -> NodeMeasure:
        """The latest measurement."""
        return self._measures[-1]

    def done(self) -> tuple[NodeMeasure, ...]:
        """Every measurement, in execution order."""
        return tuple(self._measures)

    def across(self, x: Tensor) -> tuple[float, float]:
        """See `across_examples`; NaN where the first axis isn't the batch."""
        led = x.ndim >= 2 and x.shape[0] == self._batch
        return across_examples(moments(x, 0)) if led else (float("nan"), float("nan"))

    def _measure_output(self, measure: NodeMeasure, out: Tensor, axis: int | None) -> None:
        measure.shape = tuple(out.shape)
        above = self.of(measure.node.arguments.get("input", ()))
        led = out.ndim >= 2 and out.shape[0] == self._batch
        view = led and measure.node.op in kinds.RESHAPES
        if view and above is not None and above.shape[:1] == out.shape[:1] and above.size == out.numel():
            # The same values in another order, each example's its own: nothing new to measure.
            measure.values, measure.zeros = above.values, above.zeros
            measure.between, measure.correlation = above.between, above.correlation
            return
        measure.flat = flat_fraction(measure.node.op, out)
        measure.zeros = 1 - int(torch.count_nonzero(out)) / out.numel()
        if out.ndim < 2:
            measure.values = overall(out)
            return
        per = moments(out, 0)
        measure.values = merged(per)
        if led:
            measure.between, measure.correlation = across_examples(per)
        if axis is not None and axis > 0:
            measure.units = merged(per, [d for d in range(per.mean.ndim) if d != axis - 1])

    def _compare_with_chance(self, measure: NodeMeasure, out: Tensor, axis: int | None) -> None:
        if axis is None:
            return
        measure.dead = (out == 0).movedim(axis, 0).flatten(1).all(1)
        before = self._before(measure.node.arguments.get(measure.rectifies or "", ()))
        if before is None or not bool(measure.dead.any()):
            return
        units = before.units
        if measure.node.op in kinds.CENTERING_NORMS:
            # Normalized and rectified in one call: what the norm makes of its input has no mean.
            units = units - moments(units, 1, keepdim=True).mean.to(units)
            before = Rectified(units)
        measure.dead_by_chance = dead_by_chance(units, before.bias, before.dropped)

    def _before(self, sources: Sequence[Source]) -> Rectified | None:
        source = sources[0] if len(sources) == 1 else None
        return self._recent.get(int(source)) if isinstance(source, Edge) else None

    def _remember(self, node: Node, out: Tensor, axis: int | None, args: Any, kwargs: Any) -> None:
        # A rectifier that works in place has overwritten what it read by the time it is seen.
        if axis is None:
            return
        units, bias = _columns(out.movedim(axis, 0).flatten(1)), _bias(node, args, kwargs)
        above = self._before(node.arguments.get("input", ()))
        if above is not None and above.units.shape == units.shape and node.op in kinds.DROPOUTS:
            self._recent[node.index] = replace(above, dropped=(units == 0) & (above.whole != 0))
        elif bias is None or len(bias) != len(units):
            self._recent[node.index] = Rectified(units)
        else:
            fair = None if node.op in kinds.NORMS else bias
            self._recent[node.index] = Rectified(units - bias[:, None], fair)
        while len(self._recent) > _RECENT:
            del self._recent[next(iter(self._recent))]

    def _unit_axis(self, node: Node, out: Tensor) -> int | None:
        if out.ndim < 2:
            return None
        if node.op in _CHANNEL_FIRST:
            # Convolutions and poolings also take one example without a batch axis: counted from the end.
            return out.ndim - int(node.op[-2]) - 1 if node.op[-2:] in ("1d", "2d", "3d") else 1
        if node.op in _CHANNEL_LAST or out.ndim == 2:
            return out.ndim - 1
        for source in node.inputs:
            if isinstance(source, Edge) and self._measures[source].shape == tuple(out.shape):
                return self._axes[source]
        return 1 if out.ndim >= 4 else out.ndim - 1


def _measure_nonfinite(measure: NodeMeasure, outputs: Sequence[Tensor], arguments: Any) -> None:
    # A mean is finite only where every value is, and it is there already.
    known = measure.values is not None and bool(torch.isfinite(measure.values.mean))
    doubtful = outputs[1:] if known else outputs
    measure.nonfinite = sum(map(_count_nonfinite, doubtful))
    if measure.nonfinite:
        inputs = [t for t in _calls.tensors_in(arguments) if t.is_floating_point() or t.is_complex()]
        measure.nan = sum(map(_count_nan, doubtful))
        measure.inputs_nonfinite = sum(map(_count_nonfinite, inputs))
        measure.inputs_nan = sum(map(_count_nan, inputs))


def _count_nonfinite(t: Tensor) -> int:
    return int((~torch.isfinite(t)).sum())


def _count_nan(t: Tensor) -> int:
    return int(torch.isnan(t).sum())


def _measure_gradient(measure: NodeMeasure, gradient: Tensor) -> None:
    with torch.no_grad():
        measure.gradient = overall(gradient)
        if not bool(torch.isfinite(measure.gradient.mean)):
            measure.gradient_nonfinite = _count_nonfinite(gradient)
