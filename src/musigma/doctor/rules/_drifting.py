"""The sentence that the rules about geometric drift share."""

from collections.abc import Sequence

from musigma.doctor._rules import Symptom
from musigma.doctor.probes._stacks import Drift, Stack

__all__ = ["drifting"]


def drifting(
    stack: Stack,
    found: Drift,
    values: Sequence[float],
    *,
    what: str,
    fix: str,
    severe: bool,
    backward: bool = False,
) -> Symptom:
    """A symptom with the factor per layer, its 95 % interval, and both ends.

    Args:
        stack: the layers.
        found: the drift along them, in the direction that `what` names.
        values: what was measured at every layer, in the stack's order.
        what: the quantity and its verb, such as "the activations' mean square falls".
        fix: what to do about it.
        severe: whether it is an error rather than a warning.
        backward: tell it from the last layer to the first.
    """
    values = list(values)
    names = [layer.node.module or f"call {layer.node.index}" for layer in stack.layers]
    back = "back " if backward else ""
    if backward:
        names, values = names[::-1], values[::-1]
    low, high = found.interval
    return Symptom(
        where=tuple(layer.weight for layer in stack.layers if layer.weight is not None),
        message=f"from {names[0]} {back}to {names[-1]} {what} from {values[0]:.3g} to {values[-1]:.3g}, "
        f"a factor {found.factor:.3g} a layer (95 % interval {low:.3g} to {high:.3g}).",
        evidence={
            "layers": found.steps,
            "first": values[0],
            "last": values[-1],
            "factor_per_layer": found.factor,
            "interval": [low, high],
            "slope": found.total / found.steps,
            "values": values,
        },
        fix=fix,
        severity="error" if severe else None,
    )
