"""Does the gradient survive a stack on its way back."""

from dataclasses import dataclass

from musigma.doctor.probes._stacks import Drift, Stack, drift
from musigma.doctor.probes._trace import Trace

__all__ = ["Backward", "backward_drift"]


@dataclass(frozen=True)
class Backward:
    """The gradient of every layer's pre-activations along a stack.

    Args:
        stack: the layers that were compared, first to last; the head is left out.
        norms: E‖∂L/∂z‖² of each, summed over units and positions.
        drift: from the last layer back to the first.
    """

    stack: Stack
    norms: tuple[float, ...]
    drift: Drift


def backward_drift(trace: Trace, stack: Stack) -> Backward | None:
    """Follow the squared gradient norm from a stack's last hidden layer back to its first.

    The norm over all units, not the mean square, is what a variance of gain²/fan_in keeps: the sum doesn't
    care how wide the layers are or how much a stride and a pooling thin them out. The head is left out: it
    scales every layer's gradient alike.
    """
    links = stack.hidden
    if len(links) < 2:
        return None
    norms = tuple(_square_norm(trace, link.layer.node.index, link.layer.size) for link in links)
    found = drift(norms[-1], norms[0], [link.layer.channels for link in links[1:]])
    return None if found is None else Backward(Stack(links, head=False), norms, found)


def _square_norm(trace: Trace, index: int, size: int) -> float:
    return trace.nodes[index].gradient_second_moment * size
