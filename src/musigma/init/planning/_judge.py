"""Measured against expected: what lies outside of theory's interval, and why."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from musigma.init.planning._entry import Layer
from musigma.init.planning._seen import Seen
from musigma.init.planning._verification import Check

# Of a hundred layers one lies outside of three standard deviations every fourth time; of four, one in 160.
SIGMAS: Final = 4.0
# What the draws of the theory itself leave open: 1/√2048 of a second moment, and of a correlation.
_OWN: Final = 0.025
# Backward, places and queries count as independent: in the models of the tests that is right to a quarter.
_BACKWARD: Final = 0.25


def judged(
    layers: tuple[Layer, ...], forward: Mapping[int, Seen], energy: Mapping[int, float]
) -> tuple[Check, ...]:
    """One check a layer.

    Args:
        layers: what was expected.
        forward: node index → what was measured.
        energy: node index → sum of squares of the gradient at the output.
    """
    with_gradient = [layer.node for layer in layers if energy.get(layer.node, 0.0) > 0]
    last = energy[with_gradient[-1]] if with_gradient else math.nan
    expected_last = next((x.gradient for x in reversed(layers) if x.node in with_gradient), math.nan)
    checks: list[Check] = []
    for layer in layers:
        if layer.node in forward:
            relative = energy.get(layer.node, math.nan) / last
            checks.append(_check(layer, forward[layer.node], relative, layer.gradient / expected_last))
    return tuple(checks)


def _check(layer: Layer, seen: Seen, gradient: float, expected_gradient: float) -> Check:
    std, expected = math.sqrt(max(seen.second, 0.0)), layer.rms
    low, high = interval(expected, layer.spread)
    # A gradient's energy is a variance: twice the spread of a standard deviation.
    stray = math.hypot(layer.gradient_spread, _BACKWARD)
    gradient_low, gradient_high = interval(expected_gradient, 2 * stray)
    missed = []
    if not math.isfinite(std):
        missed.append("its output is not finite")
    elif std < low or std > high:
        missed.append(f"std {std:.3g} is outside of {low:.3g} … {high:.3g}")
    if (
        math.isfinite(gradient)
        and math.isfinite(gradient_low)
        and not gradient_low <= gradient <= gradient_high
    ):
        missed.append(f"gradient {gradient:.3g} is outside of {gradient_low:.3g} … {gradient_high:.3g}")
    return Check(
        layer.node,
        layer.module,
        layer.weights,
        layer.kind,
        std,
        expected,
        low,
        high,
        seen.across,
        seen.correlation,
        layer.correlation,
        gradient,
        expected_gradient,
        gradient_low,
        gradient_high,
        tuple(missed),
    )


def interval(expected: float, spread: float) -> tuple[float, float]:
    """Where a standard deviation lies whose square has a log of standard deviation `spread`."""
    if not (math.isfinite(expected) and math.isfinite(spread)):
        return math.nan, math.nan
    factor = math.exp(SIGMAS * math.hypot(spread, _OWN) / 2)
    return expected / factor, expected * factor
