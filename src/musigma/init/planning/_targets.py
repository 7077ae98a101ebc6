"""Which spread a layer's output should have, and why."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from musigma.graph import Activation, Edge, Node, kinds
from musigma.init.meanfield import Critical, critical
from musigma.init.meanfield._activations import resolve
from musigma.init.planning._purpose import Purpose, Purposes, constant_factor
from musigma.init.planning._signal import Signal

if TYPE_CHECKING:
    from musigma.init.planning._walk import Walk

# Logits of variance s² cost s²/2 above ln C: 0.03 at a quarter. Less would only let less gradient pass.
HEAD_STD: Final = 0.25
# Below Var(W)·fan_in = 0.01 the layers before a head start with a tenth of their gradient (rule INI216).
HEAD_GAIN: Final = 0.02
# Over so few layers no deviation grows: the stable point matters from four layers in a row on.
SHORT: Final = 3
# Beside what they are added to: what tells positions apart is to be seen, and not to drown what is there.
POSITION: Final = 0.25
# Of logits a tenth: no place is preferred before anything is learned.
LOGIT_BIAS: Final = 0.1


@dataclass(frozen=True)
class Target:
    """The second moment a layer's output should have.

    Attributes:
        second: E[z²].
        reason: why.
        bias_var: how much of it comes from the bias.
    """

    second: float
    reason: str
    bias_var: float = 0.0


class Targets:
    """Targets by purpose, each with its reason.

    Args:
        purposes: what every layer is for.
    """

    def __init__(self, purposes: Purposes) -> None:
        self.purposes = purposes
        self.unreachable: dict[str, str] = {}
        self._points: dict[str, Critical] = {}
        self._fed: dict[int, Critical] = {}

    def of(self, walk: Walk, node: Node, purpose: Purpose, signal: Signal, *, has_bias: bool) -> Target:
        """The target of a layer.

        Args:
            walk: where the signals are.
            node: the layer's op.
            purpose: what it is for.
            signal: what it reads.
            has_bias: whether a bias can carry a part.
        """
        kind = purpose.kind
        if kind == "activation" and purpose.activation is not None:
            return self._before(walk, node, purpose.activation, signal, has_bias=has_bias)
        if kind == "branch" and purpose.place is not None:
            return self._branch(walk, purpose)
        if kind == "head":
            second = max(HEAD_STD**2, HEAD_GAIN * signal.second)
            return Target(second, "output layer: small, so that the loss starts at the one of ignorance")
        if kind == "skip":
            return Target(signal.second, "projection on a skip path: what comes in goes out as large")
        if kind == "score":
            return Target(1 / purpose.scale, "query or key: their products are logits of variance 1")
        if kind == "norm":
            return Target(1.0, "a norm follows: only directions matter, unit variance keeps eps out of it")
        if kind == "gate":
            return Target(1.0, "a factor of a product: variance 1 keeps the product's size")
        return Target(1.0, "no activation follows: the variance is kept at 1")

    def _before(
        self, walk: Walk, node: Node, activation: Activation, signal: Signal, *, has_bias: bool
    ) -> Target:
        label = activation.name
        if activation.fn is None:
            return Target(1.0, f"{label} follows: its halves get variance 1")
        if not (self.purposes.in_chain(node) and self.purposes.chain > SHORT):
            return Target(1.0, f"{label} follows: variance 1 where it bends")
        point = self._point(activation)
        self._fed[activation.node.index] = point
        before = self._feeding(walk, node)
        second = point.std**2
        bias_var = 0.0
        if before is not None and before.bias_var > 0 and has_bias:
            # The weights keep the gradient, what they take from the signal the bias gives back.
            bias_var = min(max(second - before.weight_var * signal.second, 0.0), second / 2)
        if not point.reachable:
            self.unreachable[label] = (
                f"{label} has no point where a deep net keeps both signal and gradient ({point.note}); the "
                "signal's variance is kept, the gradient's isn't: put a normalization before it"
            )
            return Target(second, f"{label} follows: the variance is kept, for lack of a critical point")
        return Target(second, f"{label} follows: std {point.std:.3g} is critical and stable", bias_var)

    def _point(self, activation: Activation) -> Critical:
        assert activation.fn is not None
        # A function written in arithmetic has no name: its values tell whether it is a known one.
        grid = torch.linspace(-6.0, 6.0, 97, dtype=torch.float64, device="cpu")
        key = repr(activation.fn(grid).mul(1e9).round().tolist())
        if key not in self._points:
            self._points[key] = critical(_as_known(activation), depth=self.purposes.chain)
        return self._points[key]

    def _feeding(self, walk: Walk, node: Node) -> Critical | None:
        """The critical point of the activation whose result a layer reads, if nothing lies between."""
        source = next((s for s in node.inputs if walk.signal(s) is not None), None)
        while isinstance(source, Edge):
            at = walk.graph.nodes[source]
            if at.index in self._fed:
                return self._fed[at.index]
            if at.op not in kinds.VIEWS | kinds.DROPOUTS or not at.inputs:
                return None
            source = at.inputs[0]
        return None

    def _branch(self, walk: Walk, purpose: Purpose) -> Target:
        place = purpose.place
        assert place is not None
        start = walk.signal(place.start)
        size = start.second if start is not None and start.second > 0 else 1.0
        learned = [n for n in place.branch.scalings if n.parameters]
        if learned:
            return Target(
                size, f"ends a residual branch that {learned[0].module or 'the model'} scales itself"
            )
        factor = math.prod(constant_factor(n) for n in place.branch.scalings) or 1.0
        second = min(size, size / (place.count * factor**2))
        said = f"{place.count} of them add up" if place.count > 1 else "it is the only one before a norm"
        return Target(
            second, f"ends residual branch {place.index} of {place.count}: {said} to twice the start"
        )


def _as_known(activation: Activation) -> Any:
    """An activation by its name where that says all, so that what is known of it is found again."""
    assert activation.fn is not None
    named = (activation.name, dict(activation.kwargs))
    grid = torch.linspace(-6.0, 6.0, 97, dtype=torch.float64, device="cpu")
    try:
        function, _ = resolve(named)
        same = torch.allclose(function(grid), activation.fn(grid), rtol=0.0, atol=1e-6)
    except (TypeError, ValueError, RuntimeError):
        same = False
    return named if same else activation.fn
