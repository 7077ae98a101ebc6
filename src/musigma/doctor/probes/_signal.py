"""Does a signal survive a plain stack: its second moment, and the part of it that tells examples apart."""

import math
from dataclasses import dataclass

from musigma.doctor.probes._stacks import Drift, Stack, drift

__all__ = ["Collapse", "collapse_of", "explodes", "forward_drift", "vanishes"]

# A hundred times in the standard deviation: what a gradient step changes shrinks by as much, so a hundred
# steps where a healthy stack takes one. Healthy nets stay within it: tanh with Xavier falls as 1/(2l), to
# 1/200 of the mean square at a hundred layers, and torch's default with biases rests at 1/(5·width).
VANISHED = math.log(1e4)
# Thirty times in the standard deviation: a softmax over logits of that size is sure of a guess.
EXPLODED = math.log(1e3)
# Between-example variance over the second moment: 1e-4 is a spread of 1 % around a common output.
_ALIKE = 1e-4
# ... which must also lie two orders of magnitude below what a critical net of the same depth keeps.
_BELOW_CRITICAL = 0.01


def forward_drift(stack: Stack) -> Drift | None:
    """The drift of E[x²] from what the first layer receives to what the last one receives (or puts out).

    A head's own output is left out downward: small heads are small on purpose. See `explodes`.
    """
    layers = stack.layers
    if len(layers) < 2:
        return None
    widths = [layer.channels for layer in layers[:-1]]
    return drift(layers[0].received, layers[-1].received, widths)


def vanishes(stack: Stack) -> Drift | None:
    """The drift where the signal falls by four orders of magnitude beyond chance, else None.

    Measured from 1 where more than that comes in: large inputs that shrink to size are no fault of depth.
    """
    layers = stack.layers
    if len(layers) < 3:
        return None
    found = drift(layers[0].received, layers[-1].received, [layer.channels for layer in layers[:-1]])
    low = drift(min(layers[0].received, 1.0), layers[-1].received, [layer.channels for layer in layers[:-1]])
    if found is None or low is None:
        return None
    return found if low.total < -VANISHED and found.total < 0 and found.significant else None


def explodes(stack: Stack) -> Drift | None:
    """The drift where the signal, the outputs included, grows by three orders of magnitude beyond chance.

    Measured from 1 where less than that comes in: biases lift small inputs to their own size.
    """
    layers = stack.layers
    if len(layers) < 2:
        return None
    widths = [layer.channels for layer in layers]
    found = drift(max(layers[0].received, 1.0), layers[-1].produced, widths)
    return found if found is not None and found.total > EXPLODED and found.significant else None


@dataclass(frozen=True)
class Collapse:
    """Where examples become alike in a stack.

    Args:
        depth: index of the first layer that receives the collapsed signal.
        share: between-example variance over the second moment there.
        critical: what a critical ReLU stack of this depth keeps of the same start.
        start: the share that the first layer receives.
        std: root of the second moment there: what looks healthy.
        last: the share that the stack's last layer receives.
    """

    depth: int
    share: float
    critical: float
    start: float
    std: float
    last: float


def collapse_of(stack: Stack, batch: int) -> Collapse | None:
    """The first layer that receives examples which a critical net would still tell apart; None if none does.

    The share of variance between examples is (1 − c)(n − 1)/n for their mean cosine c and n examples. On the
    critical line 1 − c falls only as a power of the depth (ReLU: 9π²/2l²), off it geometrically.
    """
    layers = stack.layers
    start = _share(stack, 0)
    if batch < 2 or not start > 0:
        return None
    whole = (batch - 1) / batch
    cosine, last = 1 - min(start / whole, 1.0), _share(stack, len(layers) - 1)
    for depth in range(1, len(layers)):
        cosine = relu_cosine(cosine)
        share, critical = _share(stack, depth), (1 - cosine) * whole
        if share < _ALIKE and share < _BELOW_CRITICAL * critical:
            std = layers[depth].received ** 0.5
            return Collapse(depth, share, critical, start, std, last)
    return None


def _share(stack: Stack, index: int) -> float:
    layer = stack.layers[index]
    return layer.received_between / layer.received if layer.received > 0 else float("nan")


def relu_cosine(c: float) -> float:
    """The cosine of two examples after a ReLU layer with He's variance, from their cosine before it.

    c' = (√(1 − c²) + c·(π − arccos c)) / π.

    References:
        Cho & Saul 2009, "Kernel methods for deep learning", eq. 6 with n = 1.
    """
    c = max(-1.0, min(1.0, c))
    return (math.sqrt(1 - c * c) + c * (math.pi - math.acos(c))) / math.pi
