"""Layers in a row without a norm between: how the signal's size changes along them, and by whose fault."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from musigma.graph import Edge, Graph, Node, kinds
from musigma.init.auditing._facts import Facts
from musigma.init.auditing._scene import Scene
from musigma.init.auditing._signal import Spread
from musigma.init.meanfield import gain

# A gain that is off by less costs less than 5 % of the standard deviation a layer.
_TOLERANCE = math.log(1.1)
_MIXING = kinds.WEIGHT_OPS - kinds.EMBEDDINGS - kinds.RECURRENT - kinds.ATTENTIONS


@dataclass(frozen=True, eq=False)
class Chain:
    """Weight layers from the last place where the scale began anew, as a list that is linked backward.

    Attributes:
        node: the last layer.
        parent: the chain without it; None if the scale begins here.
        received: what it received.
        produced: what it put out.
        depth: how many layers the signal has crossed when this one receives it.
        first: what the first layer received.
        chance: variance that finite widths give the logarithm of the second moment received: a Gaussian ReLU
            layer of n units multiplies ‖x‖² by a factor whose logarithm has the variance 5/n (Hanin & Rolnick
            2018); other activations vary less.
        constant: whether a layer before this one has a constant weight.
    """

    node: Node
    parent: "Chain | None"
    received: Spread
    produced: Spread
    depth: int = 0
    first: Spread | None = None
    chance: float = 0.0
    constant: bool = False

    @property
    def start(self) -> Spread:
        """What the first layer received."""
        return self.first or self.received


def chains(scene: Scene, resets: Callable[[Node], bool]) -> Iterator[Chain]:
    """The longest chain that ends in each weight layer.

    Args:
        scene: a model that was recorded.
        resets: whether a node's output begins a new scale.

    Yields:
        Chains whose layers were all measured, in execution order of their ends.

    References:
        None.
    """
    graph, signal = scene.graph, scene.signal
    assert graph is not None
    assert signal is not None
    # Written-out norms count as much as called ones.
    normed = {norm.node.index for norm in graph.norms() if norm.node.op not in kinds.NORMS}
    reaching: dict[int, Chain] = {}
    for node in graph.nodes:
        behind = [reaching[int(s)] for s in node.inputs if isinstance(s, Edge) and int(s) in reaching]
        chain = max(behind, key=lambda c: c.depth, default=None)
        measured = node.index in signal.received and node.index in signal.outputs
        if node.op in _MIXING and measured and graph.weights(node):
            chain = _longer(scene, chain, node, signal.received[node.index], signal.outputs[node.index])
            yield chain
        if chain is not None and not resets(node) and node.index not in normed:
            reaching[node.index] = chain


def _longer(scene: Scene, chain: Chain | None, node: Node, received: Spread, produced: Spread) -> Chain:
    if chain is None:
        return Chain(node, None, received, produced)
    return Chain(
        node,
        chain,
        received,
        produced,
        chain.depth + 1,
        chain.start,
        chain.chance + 5 / max(received.units, 1),
        chain.constant or any(facts.std == 0 for facts in scene.weights(chain.node)),
    )


def normalizes(node: Node) -> bool:
    """Whether a node's output has a size of its own: after a norm, a softmax, an embedding, a recurrence.

    Example:
        >>> from musigma.graph import record
        >>> import torch
        >>> [normalizes(n) for n in record(torch.nn.LayerNorm(2), torch.ones(1, 2))]
        [True]
    """
    return (
        node.op in kinds.NORMS | kinds.SOFTMAXES | kinds.EMBEDDINGS | kinds.RECURRENT
        or node.op == "normalize"
    )


Culprit = tuple[Facts, float, float]


def blame(
    scene: Scene, found: Sequence[tuple[Chain, float]], sign: int
) -> Iterator[tuple[Chain, float, Culprit]]:
    """Who is to blame for chains in which the signal is lost, each weight once.

    Args:
        scene: a model that was recorded.
        found: the chains, each with a number of the caller's.
        sign: −1 where the signal vanishes, 1 where it explodes.

    Yields:
        (chain, its number, culprit): a weight, its E[z²]/E[x²], and the factor that musigma's plan or else
        the activation behind it wants. The longest chain comes first: what it explains needs no second word.
        Where no weight is off by itself, the last one of the shortest chain stands for all. Chains with a
        constant weight are left out: that is a finding by itself, and no wonder.

    References:
        None.
    """
    seen: set[int] = set()
    said: set[str] = set()
    innocent: tuple[Chain, float, Culprit] | None = None
    for chain, number in sorted(found, key=lambda pair: -pair[0].depth):
        # What a layer receives is not its own doing; what the last one puts out is.
        link = chain.parent if sign < 0 else chain
        constant = chain.constant or (sign > 0 and any(f.std == 0 for f in scene.weights(chain.node)))
        if constant or link is None:
            continue
        suspects = [suspect for suspect, _ in _judged(scene, link, sign)]
        innocent = (chain, number, suspects[-1]) if suspects else innocent
        while link is not None and link.node.index not in seen:
            seen.add(link.node.index)
            for suspect, guilty in _judged(scene, link, sign):
                if guilty and suspect[0].name not in said:
                    said.add(suspect[0].name)
                    yield chain, number, suspect
            link = link.parent
    if not said and innocent is not None:
        yield innocent


def _judged(scene: Scene, chain: Chain, sign: int) -> Iterator[tuple[Culprit, bool]]:
    """The weights of a chain's last layer, and whether each is off in the direction of the drift."""
    measured = chain.produced.square / chain.received.square if chain.received.square > 0 else 0.0
    for facts in scene.weights(chain.node):
        factor, law = _factor(facts, measured), scene.expected.get(facts.name)
        if law is not None and law.std > 0 and facts.std > 0:
            wanted = factor * law.var / facts.std**2
            off = not scene.as_planned(facts) and sign * (facts.std - law.std) > 0
        else:
            wanted = _wanted(scene, facts)
            off = sign * math.log(factor / wanted) > _TOLERANCE if factor > 0 else sign < 0
        yield (facts, factor, wanted), off


def _factor(facts: Facts, measured: float) -> float:
    """E[z²]/E[x²] of a layer without its bias: Var(W)·fan_in, or as measured where weights have a mean."""
    # A mean counts where it is beyond five standard errors and adds a percent.
    shifted = facts.mean**2 * facts.count > 25 * facts.std**2
    if facts.fans is None or (shifted and facts.mean**2 * facts.fans.fan_in > 0.01 * facts.std**2):
        return measured
    return float(facts.std**2 * facts.fans.fan_in)


def _wanted(scene: Scene, facts: Facts) -> float:
    """gain² of the activation that follows; 1 where none does or its gain can't be computed."""
    graph = scene.graph
    assert isinstance(graph, Graph)
    found = graph.following_activation(facts.name)
    if found is None or found.fn is None:
        return 1.0
    try:
        return gain(found.name if not found.kwargs else found.fn) ** 2
    except (TypeError, ValueError):
        try:
            return gain(found.fn) ** 2
        except (TypeError, ValueError):
            return 1.0
